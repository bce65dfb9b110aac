"""Prepare the folder of a run for its attempts: its description, code and provenance, without earlier results."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from pipeline.cluster import launchers
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.core.tables import first_of
from pipeline.data.trees import Tree
from pipeline.execution import initial_weights
from pipeline.execution.run import VARIABLES, Run
from pipeline.execution.work import Say, Work
from pipeline.keys import ABSENT, import_closure, rank_environment, script_files
from pipeline.keys.import_closure import matches
from pipeline.keys.process_groups import uses_process_group
from pipeline.runs import acceptance, journal, preparation, provenance
from trainers.contract import run_folder

NAMES_SHOWN = 5  # in a message
_LEFT_OUT_SHOWN = 3


def remarks(run: Run) -> list[str]:
    """Return what users should know about the run's key and code before hours of training."""
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
    if (accepted := run.accepted) is not None:  # this training replaces it
        acceptance.withdraw(run.folder, accepted)
    reason = run.reason if run.folder.result.exists() else "it had ended, and has no result that counts"
    if (place := preparation.set_aside_outputs(run.folder, journal.attempts(run.folder.journal) + 1)) is not None:
        work.say(f"earlier files of the script are kept in {place}, as the run is made anew: {reason}")
    if run.key_lacks is not None:  # its checkpoints depend on the unkeyed files, too
        shutil.rmtree(run.folder.path / run_folder.CHECKPOINTS, ignore_errors=True)
    for path in (
        run.folder.result,
        run.folder.summary,
        *(run.folder.path / name for name in (run_folder.PRUNE, run_folder.PRUNED, run_folder.DEPENDENCIES)),
        *run.folder.path.glob(f"{run_folder.NODES}/*/{run_folder.DEPENDENCIES}"),
    ):
        path.unlink(missing_ok=True)
    if isinstance(run.pack, Tree):
        run.pack.lay_down()
    if run.start is not None:
        initial_weights.place(run.start, run.folder.path, run.config.data_dir)
    preparation.prepare(run.folder, run.inputs(work.services.code))
    if not matches(run.root, run.folder.code, run.key.parts["code"]):
        raise PacelineError("its code was edited while the run was being prepared", hint="the same command again")
    origin, patch = work.services.provenance(run, work.argv, work.started, work.say)
    origin.write(run.folder.path, patch)
    _record_variables(run)
    provenance.keep_lock(run.root, run.folder.path)


def _record_variables(run: Run) -> None:
    """Write digests of the variables that ranks on this computer inherit; on other hosts theirs count."""
    path = run.folder.path / VARIABLES
    path.unlink(missing_ok=True)
    if launchers.capabilities(run.config.cluster).is_this_computer:
        env = (run.config.resolved.get("program") or {}).get("env") or {}
        keyed = {*env, *(name for host in run.config.cluster.hosts for name in host.env)}  # the key has their values
        write_json(path, rank_environment.variable_digests(os.environ, keyed))


def collect_provenance(run: Run, argv: Sequence[str], now: float, say: Say) -> tuple[provenance.Provenance, bytes]:
    """Return the run's provenance and patch; warn of files of the checkout that the patch can't hold."""
    weights = initial_weights.local_file(run.config, run.root)
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
