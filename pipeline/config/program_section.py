"""Check the section ``program`` of a configuration: a user's script in place of the classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.script_data import ScriptData
from pipeline.config.values import leaves
from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.places import shown
from pipeline.core.program import CLASSIFIER, SCRIPT
from pipeline.core.specs import Cluster
from pipeline.keys import script_files
from pipeline.keys.canonical import names_seed
from pipeline.keys.process_groups import uses_process_group
from pipeline.keys.script_files import ScriptFiles
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig

_CLASSIFIER_SECTIONS = ("dataset", "model", "optimizer", "schedule", "trainer", "strategy", "init")


def describes_script(resolved: Mapping[str, Any]) -> bool:
    """Return True if the section describes a script: the one to run, or those whose runs are looked up."""
    return bool((resolved.get(programs.SECTION) or {}).keys() - {"name"})


def with_ranks(resolved: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Set ``program.script`` from ``program.module``, and the number of ranks of a script that needs only one.

    ``nproc_per_node=auto`` becomes 1 if the script uses no process group.

    Raises UsageError: there is no such module.
    """
    resolved = _with_file_of_module(resolved, root)
    cluster, section = resolved["cluster"], resolved.get(programs.SECTION) or {}
    if section.get("name") != SCRIPT.name or cluster["nproc_per_node"] != "auto":
        return resolved
    if section.get("torchrun") is not False and uses_process_group(resolved, root):
        return resolved
    return {**resolved, "cluster": {**cluster, "nproc_per_node": 1}}


def _with_file_of_module(resolved: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Set ``program.script`` from ``program.module``, which python -m looks up in the working directory first."""
    section = resolved.get(programs.SECTION) or {}
    module = section.get("module")
    if not module:
        return dict(resolved)
    inner = str(module).replace(".", "/")
    folders = dict.fromkeys((root / str(section.get("workdir") or ""), root))
    files = [folder / name for folder in folders for name in (f"{inner}.py", f"{inner}/__main__.py")]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise UsageError(
            f"program.module={module}: there is no {inner}.py and no {inner}/__main__.py in "
            f"{' or '.join(map(str, folders))}",
            hint="a module of the project; one that is installed runs as program.command=[python,-m,NAME]",
        )
    script = file.relative_to(root).as_posix()
    if section.get("script") not in (None, script):  # what is read from config.json has both
        raise UsageError(
            f"both program.script={section['script']} and program.module={module} say what to run; take one"
        )
    return {**resolved, programs.SECTION: {**section, "script": script}}


def with_script(
    resolved: Mapping[str, Any], words: Sequence[str], root: Path, *, must_exist: bool = True, has_step: bool = False
) -> tuple[dict[str, Any], ScriptFiles | None]:
    """Return the configuration with the section for config.json, and the script's files; for the classifier neither.

    Args:
        words: the overrides.
        must_exist: refuse missing files and arguments without a script; False to look up earlier runs.
        has_step: a step makes the data, and it may use a seed that the script doesn't use.

    Raises UsageError: the script is missing or its settings can't work; a word that sets something of the classifier.
    """
    section = dict(resolved[programs.SECTION])
    if section["name"] != SCRIPT.name:
        return _without_script(resolved, must_exist=must_exist), None
    _refuse_words_of_the_classifier(words)
    if must_exist and not has_step:
        _refuse_unseen_seed(words, resolved)
    try:
        settings = ScriptConfig(**section)
    except (ConfigError, TypeError) as error:
        raise UsageError(str(error)) from error
    files = script_files.find(settings, root=root, must_exist=must_exist)
    data = ScriptData(files.data, settings.untracked, root)
    section["args"] = data.with_placeholders(settings.args)
    paths = [shown(one.path, root) for one in data.paths]
    section["data"] = paths if len(paths) > 1 else "".join(paths) or None
    section["workdir"] = files.workdir
    if settings.script:
        section["script"] = files.shown_name or None
    of_script = {name: value for name, value in resolved.items() if name not in _CLASSIFIER_SECTIONS}
    files = files._replace(data=tuple(data.paths), notes=tuple(data.notes))
    return {**of_script, programs.SECTION: section}, files


def _without_script(resolved: Mapping[str, Any], *, must_exist: bool) -> dict[str, Any]:
    """Return the configuration of a classifier. Raises UsageError: the section ``program`` is that of a script."""
    section = resolved[programs.SECTION]
    if section["name"] != CLASSIFIER.name:
        raise UsageError(
            f"program.name={section['name']}: that name says which kind of program runs, {CLASSIFIER.name} or "
            f"{SCRIPT.name}, and program.script=FILE sets it; leave it out"
        )
    of_script = [name for name in section if name != "name"]
    if of_script and not must_exist:  # these fields choose the runs that are looked up
        return dict(resolved)
    if of_script:
        raise UsageError(f"program.{of_script[0]} says something of a script, and none is named: program.script=…")
    return {name: value for name, value in resolved.items() if name != programs.SECTION}


def _refuse_words_of_the_classifier(words: Sequence[str]) -> None:
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name.partition(".")[0].partition("@")[0] in _CLASSIFIER_SECTIONS:
            raise UsageError(
                f"{word}: {name} is a setting of Paceline's own trainer, and program=script runs a script of yours; "
                f"its own arguments are set by program.args.{name.partition('.')[2] or 'NAME'}=…"
            )


def _refuse_unseen_seed(words: Sequence[str], resolved: Mapping[str, Any]) -> None:
    """Refuse several seeds for a script that gets none of them: all of these runs would be equal. Raises UsageError.

    A script gets the seed by {seed}, or by ${seed}, whose value then stands in the key.
    """
    section = resolved[programs.SECTION]
    seed, values = str(resolved["seed"]), [section.get("args"), section.get("env"), resolved["cluster"].get("env")]
    gets_seed = names_seed(section) or any(f"={value}".endswith(f"={seed}") for _, value in leaves(values))
    for word in words:
        if word.lstrip("+").partition("=")[0] == "seed" and not gets_seed:
            raise UsageError(
                f"{word}: the script never sees it: none of its arguments and variables has {{seed}}",
                hint="program.args.seed='{seed}' (its own option for it), or program.env.SEED='{seed}'",
            )


def check_script(settings: ScriptConfig, cluster: Cluster) -> None:
    """Refuse cluster settings that don't work with scripts. Raises UsageError."""
    if not settings.torchrun and cluster.world_size > 1:
        raise UsageError(
            f"program.torchrun=false starts one process, and the cluster has {cluster.world_size} ranks",
            hint="cluster.nproc_per_node=1" if cluster.nnodes == 1 else "cluster=local cluster.nproc_per_node=1",
        )
    if cluster.settings.checkpoint_mirror is not None and not settings.resumes:
        raise UsageError(
            "cluster.checkpoint_mirror keeps copies of what a script goes on from, and no argument of it has {resume}",
            hint="program.args.NAME='{resume}', or cluster.checkpoint_mirror=null",
        )
    if cluster.settings.min_nodes:
        raise UsageError(
            f"cluster.min_nodes={cluster.settings.min_nodes}: a script may come to other weights on fewer ranks, which "
            "would be another run; cluster.spares=[NAME] keeps their number"
        )
