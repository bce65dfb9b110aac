"""Checks of the section ``program``: a user's script in place of the classifier (Paceline's built-in trainer).

``ScriptData`` finds the data among the paths in a script's arguments.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.schema import leaves
from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.places import shown
from pipeline.core.program import CLASSIFIER, SCRIPT
from pipeline.core.specs import Cluster
from pipeline.keys import script_files
from pipeline.keys.content_key import names_seed
from pipeline.keys.script_files import DataPath, ScriptFiles, uses_process_group
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig, names, placeholder_of_data

_CLASSIFIER_SECTIONS = ("dataset", "model", "optimizer", "schedule", "trainer", "strategy", "init")


def describes_script(resolved: Mapping[str, Any]) -> bool:
    """Whether the section has fields of a script: of the one to run, or for verbs that look up runs of scripts."""
    return bool((resolved.get(programs.SECTION) or {}).keys() - {"name"})


def with_script_facts(resolved: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Fill in what follows from the script's code: ``program.script`` of a module, the number of ranks for ``auto``.

    It is 1 for a script that uses no process group. Raises UsageError: there is no such module.
    """
    resolved = _with_file_of_module(resolved, root)
    cluster, section = resolved["cluster"], resolved.get(programs.SECTION) or {}
    if section.get("name") != SCRIPT.name or cluster["nproc_per_node"] != "auto":
        return resolved
    if section.get("torchrun") is not False and uses_process_group(resolved, root):
        return resolved
    return {**resolved, "cluster": {**cluster, "nproc_per_node": 1}}


def _with_file_of_module(resolved: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Set ``program.script`` to the file of ``program.module``, which `python -m` looks up in the working directory."""
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
    if section.get("script") not in (None, script):  # a stored configuration has both, in agreement
        raise UsageError(
            f"both program.script={section['script']} and program.module={module} say what to run; take one"
        )
    return {**resolved, programs.SECTION: {**section, "script": script}}


def with_script(
    resolved: Mapping[str, Any], words: Sequence[str], root: Path, *, must_exist: bool = True, has_step: bool = False
) -> tuple[dict[str, Any], ScriptFiles | None]:
    """Return the configuration as a script's run stores it, and the script's files; for the classifier None instead.

    Args:
        words: the overrides.
        must_exist: refuse missing files, and fields of a script without a script; False to look up earlier runs.
        has_step: a step makes the data; it may use the seed even if the script doesn't.

    Raises UsageError: the script is missing or its settings can't work; a word that sets something of the classifier.
    """
    section = dict(resolved[programs.SECTION])
    if section["name"] != SCRIPT.name:
        return _without_script(resolved, must_exist=must_exist), None
    _refuse_words_of_the_classifier(words)
    if must_exist and not has_step:
        _refuse_unused_seed(words, resolved)
    try:
        settings = ScriptConfig(**section)
    except (ConfigError, TypeError) as error:
        raise UsageError(str(error)) from error
    files = script_files.find(settings, root=root, must_exist=must_exist)
    data = ScriptData(files.data, settings.untracked, root)
    section["args"] = data.with_placeholders(settings.args)
    paths = [shown(item.path, root) for item in data.paths]
    section["data"] = paths if len(paths) > 1 else "".join(paths) or None  # a list, one path or None
    section["workdir"] = files.workdir
    if settings.script:
        section["script"] = files.shown_name or None
    of_script = {name: value for name, value in resolved.items() if name not in _CLASSIFIER_SECTIONS}
    files = files._replace(data=tuple(data.paths), notes=tuple(data.notes))
    return {**of_script, programs.SECTION: section}, files


def _without_script(resolved: Mapping[str, Any], *, must_exist: bool) -> dict[str, Any]:
    """Return the configuration of the classifier, without this section. Raises UsageError: fields of a script in it."""
    section = resolved[programs.SECTION]
    if section["name"] != CLASSIFIER.name:
        raise UsageError(
            f"program.name={section['name']}: that name says which kind of program runs, {CLASSIFIER.name} or "
            f"{SCRIPT.name}, and program.script=FILE sets it; leave it out"
        )
    script_fields = [name for name in section if name != "name"]
    if script_fields and not must_exist:  # these fields choose the runs that are looked up
        return dict(resolved)
    if script_fields:
        raise UsageError(f"program.{script_fields[0]} says something of a script, and none is named: program.script=…")
    return {name: value for name, value in resolved.items() if name != programs.SECTION}


def _refuse_words_of_the_classifier(words: Sequence[str]) -> None:
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if name.partition(".")[0].partition("@")[0] in _CLASSIFIER_SECTIONS:
            raise UsageError(
                f"{word}: {name} is a setting of Paceline's own trainer, and program=script runs a script of yours; "
                f"its own arguments are set by program.args.{name.partition('.')[2] or 'NAME'}=…"
            )


def _refuse_unused_seed(words: Sequence[str], resolved: Mapping[str, Any]) -> None:
    """Raise UsageError for ``seed=…`` if the script never gets the seed, because all seeds would give equal runs."""
    section = resolved[programs.SECTION]
    # it gets it by {seed}, or by ${seed}, which is replaced by now: a value that is SEED or ends in =SEED
    seed, values = str(resolved["seed"]), [section.get("args"), section.get("env"), resolved["cluster"].get("env")]
    gets_seed = names_seed(section) or any(f"={value}".endswith(f"={seed}") for _, value in leaves(values))
    for word in words:
        if word.lstrip("+").partition("=")[0] == "seed" and not gets_seed:
            raise UsageError(
                f"{word}: the script never sees it: none of its arguments and variables has {{seed}}",
                hint="program.args.seed='{seed}' (its own option for it), or program.env.SEED='{seed}'",
            )


def check_script(settings: ScriptConfig, cluster: Cluster) -> None:
    """Raise UsageError for cluster settings that don't work with this script."""
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


# ------------------------------------------------------------------------------- paths in arguments
_PATH = re.compile(r"(?P<name>[^/=]*=)?(?P<path>(?:/|~/).*[^/].*)", re.DOTALL)
_WRITTEN = re.compile(
    r"\b(artifacts|cache|checkpoints?|ckpts?|dest|destination|export|(log|out|output|save|run|work)(s|dir|file)?|logging|"
    r"results?|scratch|te?mp|tensorboard|tb|wandb|exps?|experiments?|snapshots?|workspace|project|o|"
    r"(model|target) dir)\b"
)
"""Words in the name of an option that say that the script writes to this path; _READ: that it reads it."""
_READ = re.compile(r"\b(from|init|input|load|pretrained|resume)\b")
_OF_THE_SYSTEM = ("/dev", "/proc", "/sys")


def is_written(option: str) -> bool:
    """Whether a script writes to the path of an option, by its name: ``--output-dir``, not ``--init-checkpoint``."""
    spaced = re.sub(r"[-_.=]", " ", option).lower()
    return _WRITTEN.search(spaced) is not None and _READ.search(spaced) is None


class ScriptData:
    """Finds a script's data: the paths of ``program.data``, and existing absolute paths in its arguments.

    In the arguments the placeholder {data} replaces them, because data lie elsewhere on hosts. Results: ``paths``, and
    ``notes``, a line per path in the arguments. Paths below ``untracked`` stay, because every host has them.
    """

    def __init__(self, paths: Sequence[DataPath], untracked: Sequence[str], root: Path) -> None:
        self.paths, self._root = [*paths], root
        self._untracked = [Path(path).expanduser() for path in untracked]
        self.notes = list[str]()

    def with_placeholders(self, args: Any) -> Any:
        """Return ``program.args`` with a placeholder for each path that is data, and add these paths to ``paths``."""
        if isinstance(args, Mapping):
            return {name: self._convert_values(str(name), value) for name, value in args.items()}
        if not isinstance(args, list):
            return args
        # the option of each word: the word before it, if that is one
        options = ["", *(word if isinstance(word, str) and word.startswith("-") else "" for word in args)]
        return [self._convert_word(options[n], f"program.args[{n}]", word) for n, word in enumerate(args)]

    def _convert_values(self, option: str, value: Any) -> Any:
        """Return the value of one named argument, or its list of values, with placeholders."""
        field = f"program.args.{option}"
        if isinstance(value, list):
            return [self._convert_word(option, field, word) for word in value]
        return self._convert_word(option, field, value)

    def _convert_word(self, option: str, field: str, word: Any) -> Any:
        """Return one argument, with a placeholder if it is the path of data.

        ``option``: the flag before it; ``field``: its name in notes; ``word``: the argument, also as ``name=/data``.
        """
        match = _PATH.fullmatch(word) if isinstance(word, str) else None
        if match is None or names(word):
            return word
        prefix, written_path = match["name"] or "", match["path"]
        path = Path(os.path.abspath(Path(written_path).expanduser()))  # noqa: PTH100
        if any(path.is_relative_to(untracked) for untracked in self._untracked):
            return word
        # data are part of the key; outputs and paths that exist only on hosts are not, which a note tells the user
        is_output = is_written(f"{option} {prefix}")
        if not path.exists():
            if not is_output:
                self.notes.append(
                    f"{field}={written_path} isn't here: the key has its name and not its contents; program.data=<its "
                    f"path here> and {{data}} in its place send it to the hosts"
                )
            return word
        if self._is_too_wide(path) or not (path.is_file() or path.is_dir()):
            return word
        if is_output:
            self.notes.append(
                f"{field}={written_path} is not in the key: by its name the script writes there; {{run}} is a folder "
                f"that is kept, and program.data={path} with {{data}} makes it data"
            )
            return word
        if path.is_dir() and not any(path.iterdir()):
            self.notes.append(f"{field}={written_path} is empty, so nothing of it is in the key")
            return word
        return f"{prefix}{self._placeholder(path, field, written_path)}"

    def _is_too_wide(self, path: Path) -> bool:
        """Whether a folder holds more than data: the project, a home, all temporary files, or special files."""
        other_folders = (self._root, Path.home(), Path(tempfile.gettempdir()))
        return any(folder.is_relative_to(path) for folder in other_folders) or str(path).startswith(_OF_THE_SYSTEM)

    def _placeholder(self, path: Path, field: str, written_path: str) -> str:
        """Return the placeholder for a path, and add the path to the data unless it is inside of data found before."""
        for number, data in enumerate(self.paths):
            if path.is_relative_to(data.path):
                below = path.relative_to(data.path).as_posix()
                return placeholder_of_data(number) + ("" if below == "." else f"/{below}")
        self.paths.append(DataPath(field, path))
        self.notes.append(
            f"{field}={written_path} is data: its contents are part of the key, and it is sent to the hosts; "
            f"program.untracked=['{path}'] leaves it where it is and out of the key"
        )
        return placeholder_of_data(len(self.paths) - 1)
