"""The preparation of a run folder for a launch: description, code, data and provenance of the run are written, and what
an earlier training left is removed or set aside. Also: remarks to the user about the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cluster import launchers
from pipeline.core import documents
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic, write_json
from pipeline.core.tables import first_of
from pipeline.execution.run import VARIABLES, Run
from pipeline.execution.work import Say, Work
from pipeline.keys import ABSENT, import_closure, rank_environment, script_files
from pipeline.keys.content_key import ContentKey
from pipeline.keys.import_closure import matches
from pipeline.keys.script_files import uses_process_group
from pipeline.runs import acceptance, journal, provenance
from pipeline.runs.folder import DESCRIBED, RunFolder
from pipeline.runs.result import why_altered
from trainers.contract import run_folder

NAMES_SHOWN = 5  # in a message
_LEFT_OUT_SHOWN = 3


def remarks(run: Run) -> list[str]:
    """Return warnings and remarks about the run's key and code, which users need before hours of training."""
    lines = [*run.config.notes]
    script, ranks = run.config.script, run.config.cluster.world_size
    if script is not None and ranks > 1 and not uses_process_group(run.config.resolved, run.root):
        lines.append(
            f"WARNING: nothing in the script's code or words asks for a process group, so each of the {ranks} ranks "
            "runs all of it and writes the same files; cluster.nproc_per_node=1 on one host starts it once"
        )
    if script is not None and run.sealed:
        names = script_files.unsnapshotted_files(script, run.code, run.config.resolved["program"].get("args"))
        if names:
            lines.append(
                f"the script names files of the project that aren't in its copy: {first_of(names, NAMES_SHOWN)}; "
                f"where it reads them, type program.inputs=[{','.join(names)}] before the script"
            )
    inputs = "program.inputs" if script is not None else "model.inputs"
    keyed = run.key.parts["environment"]
    # imports that were found nowhere: a typing error, or a folder that isn't on the ranks' path
    lacking = [f"{name} ({place})" for name, place in run.code.unresolved.items() if keyed.get(name) == ABSENT]
    if lacking:
        lines.append(
            f"WARNING: not in the project and not installed here, so the key counts it as absent: "
            f"{first_of(lacking, NAMES_SHOWN)}; folders with modules belong in cluster.env.PYTHONPATH"
        )
    if run.code.left_out:
        lines.append(
            f"not copied to the hosts, as files next to modules may have {import_closure.LARGEST_BYTES:,} bytes: "
            f"{first_of(run.code.left_out, NAMES_SHOWN)}; {inputs} takes files of any size"
        )
    return lines


def prepare_folder(work: Work) -> None:
    """Write the run folder as an attempt needs it, without results of earlier ones. Raises PacelineError."""
    run = work.run
    if (accepted := run.accepted) is not None:  # this training replaces the acceptance
        acceptance.withdraw(run.folder, accepted)
    reason = run.reason if run.folder.result.exists() else "it had ended, and has no result that counts"
    kept_in = set_aside_outputs(run.folder, journal.attempts(run.folder.journal) + 1)
    if kept_in is not None:
        work.say(f"earlier files of the script are kept in {kept_in}, as the run is made anew: {reason}")
    if run.key_lacks is not None:  # the checkpoints depend on files that the key lacks, too
        shutil.rmtree(run.folder.path / run_folder.CHECKPOINTS, ignore_errors=True)
    for path in (
        run.folder.result,
        run.folder.summary,
        *(run.folder.path / name for name in (run_folder.PRUNE, run_folder.PRUNED, run_folder.DEPENDENCIES)),
        *run.folder.path.glob(f"{run_folder.NODES}/*/{run_folder.DEPENDENCIES}"),
    ):
        path.unlink(missing_ok=True)
    run.pack.create()
    if run.initial_weights is not None:
        run.initial_weights.put_into(run.folder.path, run.config.data_dir)
    prepare(run.folder, inputs_of(run, work.services.code))
    # the sources were read for the key earlier than they were copied
    if not matches(run.root, run.folder.code, run.key.parts["code"]):
        raise PacelineError("its code was edited while the run was being prepared", hint="the same command again")
    origin, patch = work.services.provenance(run, work.argv, work.started, work.say)
    origin.write(run.folder.path, patch)
    _record_variables(run)
    provenance.keep_lock(run.root, run.folder.path)


def _record_variables(run: Run) -> None:
    """Write digests of the variables that ranks on this computer inherit; ranks on other hosts inherit other ones."""
    path = run.folder.path / VARIABLES
    path.unlink(missing_ok=True)
    if launchers.capabilities(run.config.cluster).is_this_computer:
        env = (run.config.resolved.get("program") or {}).get("env") or {}
        keyed = {*env, *(name for host in run.config.cluster.hosts for name in host.env)}  # the key has their values
        write_json(path, rank_environment.variable_digests(os.environ, keyed))


def collect_provenance(run: Run, argv: Sequence[str], now: float, say: Say) -> tuple[provenance.Provenance, bytes]:
    """Return the run's provenance and patch; warn of changed files that the patch can't hold. ``now``: unix time."""
    weights = run.initial_weights.named_file if run.initial_weights is not None else None
    origin, patch = provenance.collect(
        run.root,
        run.config.shown_words(argv),
        run.details(now),
        outputs=[run.config.runs_dir, run.config.data_dir, *filter(None, [weights])],  # the run has a copy of them
        secrets=run.config.secrets,
        imported=[*run.code.sources.values()],
    )
    if origin.left_out:
        more = len(origin.left_out) - _LEFT_OUT_SHOWN
        and_more = f", and {more} more (provenance.json)" if more > 0 else ""
        say(f"WARNING: not kept for doit reproduce: {'; '.join(origin.left_out[:_LEFT_OUT_SHOWN])}{and_more}")
    return origin, patch


class RunInputs(NamedTuple):
    """What a run is made from.

    ``sources``: path in the snapshot → file, exactly the code of the key, so that nothing else can be imported.
    ``config_yaml``: ``config`` for users to read. ``pack_path``: the folder of the data; None without data."""

    key: ContentKey
    config: Mapping[str, Any]
    config_yaml: str
    sources: Mapping[str, Path]
    pack_path: Path | None


def inputs_of(run: Run, sources: Mapping[str, Path] | None = None) -> RunInputs:
    """Return what the run is made from. ``sources``: files to copy the code from (None: the project's own)."""
    from pipeline.config import compose  # it imports Hydra

    return RunInputs(
        key=run.key,
        config=run.config.resolved,
        config_yaml=compose.as_yaml(run.config.resolved),
        sources=sources or run.code.sources,
        pack_path=run.pack.path,
    )


def prepare(folder: RunFolder, inputs: RunInputs) -> None:
    """Write key.json, configuration, code snapshot and the link to the data. Raises OSError."""
    _write_key(folder, inputs.key)
    write_config(folder, inputs)
    shutil.rmtree(folder.code, ignore_errors=True)  # files of an earlier snapshot
    for name, source in inputs.sources.items():
        write_atomic(folder.code / name, source.read_bytes())
    _link_data(folder, inputs.pack_path)


def restore(folder: RunFolder, inputs: RunInputs) -> None:
    """Rewrite what was altered of a finished training's description, and the link to its data. Raises OSError."""
    _link_data(folder, inputs.pack_path)
    recorded = folder.recorded_files()
    altered = {name for name in DESCRIBED if name not in recorded or why_altered(folder.path / name, recorded[name])}
    if run_folder.KEY in altered:
        _write_key(folder, inputs.key)
    # without a result no file can be checked by its digest, but the configuration by the key
    if altered & {run_folder.CONFIG, run_folder.CONFIG_YAML} and (recorded or folder.config_altered(inputs.key)):
        write_config(folder, inputs)
    result = folder.intact_result(inputs.key)
    if run_folder.SUMMARY in altered and result is not None:
        documents.write_sealed(folder.summary, result.summary)


def write_config(folder: RunFolder, inputs: RunInputs) -> None:
    """Write the resolved configuration for ranks (config.json) and for users (config.yaml). Raises OSError."""
    write_json(folder.path / run_folder.CONFIG, inputs.config)
    write_atomic(folder.path / run_folder.CONFIG_YAML, inputs.config_yaml)


def _write_key(folder: RunFolder, key: ContentKey) -> None:
    write_json(folder.path / run_folder.KEY, {"key": key.short, "digest": key.digest, **key.parts})


def _link_data(folder: RunFolder, pack_path: Path | None) -> None:
    if pack_path is None:
        return
    link, target = folder.path / run_folder.DATA, pack_path.resolve()
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    elif link.exists():  # a copy of the run folder whose links were followed
        link.rename(link.with_name(f"{link.name}.bad"))
    link.symlink_to(target, target_is_directory=True)


def set_aside_outputs(folder: RunFolder, attempt: int) -> Path | None:
    """Move the files of a script that had ended into the folder of ``attempt``, which makes the run anew: otherwise the
    script would resume from its last checkpoint. Return the folder they are in now; None if there are none."""
    has_ended = folder.summary.exists() or folder.result.exists()
    paths = [folder.path / name for name in (run_folder.METRICS, *folder.program.folders)]
    if not has_ended or not any(path.is_file() for top in paths for path in (top, *top.rglob("*"))):
        return None
    target = folder.path / run_folder.ATTEMPTS / str(attempt) / "before"
    while target.exists():  # of an earlier command that didn't reach its launch
        target = target.with_name(f"{target.name}-")
    target.mkdir(parents=True)
    for path in filter(Path.exists, paths):
        path.replace(target / path.name)
    return target
