"""The files of a user's script: the script, what it imports, its inputs and its data. All but the data count in the key
and are copied to the hosts, into the run's *snapshot*.

Files of the project keep their paths in the snapshot; the folder of a script outside the project is ``_script`` there.
"""

from __future__ import annotations

import functools
import io
import os
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.errors import UsageError, nearest
from pipeline.core.files import expanded, refuse_odd_pattern, sha256_file
from pipeline.core.places import MODULES, shown
from pipeline.core.processes import git
from pipeline.core.program import TORCHRUN
from pipeline.keys import ABSENT
from pipeline.keys.import_closure import LARGEST_BYTES, Closure, ScriptEntry, import_closure
from pipeline.keys.installed import Installed
from pipeline.keys.readings import KEEP_EMPTY_FOLDER
from trainers.contract.run_folder import SCRIPT_OUTSIDE
from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig, data_paths, words

STARTER = "trainers.script.start"
"""The module that starts torchrun with the script on each host."""

_LIKENESS = 0.7  # similarity for "did you mean": "nope" must not suggest "opt"
_FILE_NAME = re.compile(r"[\w@+][\w./@+ -]{0,200}\.\w{1,12}")  # a word that may be the name of a file
_TORCH = "torch"  # its version counts even if the script doesn't import it, because torchrun is part of torch


class DataPath(NamedTuple):
    """A file or folder of data that a script gets, as an absolute path, and the setting (``field``) that names it."""

    field: str
    path: Path


class ScriptFiles(NamedTuple):
    """The files of a script, as absolute paths."""

    root: Path
    folder: Path  # of the script; for python -m the folder that imports start in
    file: Path | None  # the script, or the executable of program.command (None: each host looks it up in its PATH)
    is_python: bool  # False for program.command
    workdir: str  # relative to the snapshot
    inputs: tuple[str, ...]
    data: tuple[DataPath, ...]
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # how the paths in the arguments count

    @property
    def path(self) -> str:
        """The script's path in the snapshot; '' if the run starts a command instead."""
        return self._in_snapshot(self.file) if self.file is not None and self.is_python else ""

    @property
    def shown_name(self) -> str:
        """The script as config.json names it: relative to the project if it lies there."""
        return "" if self.file is None else shown(self.file, self.root)

    def closure(self, python_path: Sequence[str] = ()) -> Closure:
        """Collect all files that the run imports or declares as inputs. Raises UsageError."""
        # may_lack: torchrun's module imports torch, which hosts have and this computer may lack. The script below needs
        # no such permission, because the missing imports of a script are never refused.
        of_starter = import_closure(self.root, (STARTER, TORCHRUN), python_path, may_lack=True)
        digests, sources, imported = dict(of_starter.digests), dict(of_starter.sources), of_starter
        names: tuple[str, ...] = ()  # only a Python script's own sources name its files
        versions = {**of_starter.versions, _TORCH: Installed(self.root, python_path).version(_TORCH) or ABSENT}
        if self.file is not None and self.is_python:
            entry = ScriptEntry(file=str(self.file), folder=str(self.folder), prefix=self._prefix)
            imported = import_closure(self.root, (), python_path, script=entry)
            names = imported.names
            digests |= imported.digests
            sources |= imported.sources
            versions |= imported.versions
        # these files count by their bytes, even a source that is imported too: the script may read its comments
        executable = [self.file] if self.file is not None and not self.is_python else []
        by_bytes = [*executable, *self._input_files()]
        by_bytes += self._read_by_name(names, {*sources.values(), *by_bytes})
        for path in by_bytes:
            digests[self._in_snapshot(path)], sources[self._in_snapshot(path)] = sha256_file(path), path
        self._refuse_missing_workdir(sources)
        # an entry is "PATH (SIZE bytes)"; a file that program.inputs names is in the snapshot whatever its size
        left_out = tuple(entry for entry in imported.left_out if entry.partition(" (")[0] not in sources)
        return Closure(
            digests=dict(sorted(digests.items())),
            sources=dict(sorted(sources.items())),
            versions=versions,
            unresolved=imported.unresolved,
            left_out=left_out,
            names=names,
        )

    @property
    def _prefix(self) -> str:
        """What the paths of the script's folder begin with in the snapshot."""
        if not self.folder.is_relative_to(self.root):
            return f"{SCRIPT_OUTSIDE}/"
        return "" if self.folder == self.root else f"{self.folder.relative_to(self.root).as_posix()}/"

    def _in_snapshot(self, path: Path) -> str:
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return f"{SCRIPT_OUTSIDE}/{path.relative_to(self.folder).as_posix()}"

    def _input_files(self) -> Iterator[Path]:
        """Yield the files of ``program.inputs``. Raises UsageError: a pattern matches none."""
        for pattern in self.inputs:
            paths = [*self._matches(pattern.removeprefix(f"{SCRIPT_OUTSIDE}/"))]
            if not paths:
                folders = " or ".join(dict.fromkeys((str(self.folder), str(self.root))))
                raise UsageError(f"program.inputs: {pattern!r} matches no file in {folders}")
            yield from paths

    def _read_by_name(self, names: Sequence[str], in_snapshot: Collection[Path]) -> list[Path]:
        """Find project files that the script's code names, as in ``open("configs/default.txt")``.

        A name is relative to the working directory, the script's folder or the project. Outputs, large files and files
        that git ignores don't count, nor those ``in_snapshot`` already."""
        files = dict[Path, None]()
        for name, path in _existing(names, dict.fromkeys((self.root / self.workdir, self.folder, self.root))):
            if path in in_snapshot or not path.is_relative_to(self.root):
                continue
            inside = path.relative_to(self.root).as_posix()
            is_output = any(fnmatch(inside, pattern) or fnmatch(name, pattern) for pattern in self.outputs)
            # results/.gitkeep matches the output results/*, yet no run writes it: the snapshot needs it, because the
            # folder results, in which the script writes, exists by this file alone
            if is_output and path.name not in KEEP_EMPTY_FOLDER:
                continue
            if path.stat().st_size <= LARGEST_BYTES:
                files[path] = None
        return _kept_by_git([*files], self.root)

    def _matches(self, pattern: str) -> Iterator[Path]:
        """Yield the matches in the script's folder; if there are none, those in the project."""
        for folder in dict.fromkeys((self.folder, self.root)):
            if files := _files_of(folder, pattern):
                yield from files
                return

    def _refuse_missing_workdir(self, sources: dict[str, Path]) -> None:
        if not self.workdir or (self.root / self.workdir).is_dir():
            return
        if not any(name.startswith(f"{self.workdir}/") for name in sources):
            raise UsageError(
                f"program.workdir={self.workdir} is no folder of the snapshot, which holds what the script imports and "
                "program.inputs",
                hint=f"program.inputs=['{self.workdir}/*'], or a folder that has one of these files",
            )


def _existing(names: Iterable[str], folders: Collection[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the names that are files in one of the folders; the first folder with it counts."""
    for name in names:
        paths = (folder / name for folder in folders)
        path = next((path for path in paths if ".." not in path.parts and path.is_file()), None)
        if path is not None:
            yield name, path


def _kept_by_git(paths: Sequence[Path], root: Path) -> list[Path]:
    """Return the paths without those that git ignores; all of them outside of a repository."""
    if not paths:
        return []
    names = [str(path.relative_to(root)) for path in paths]
    listed = git.answer(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names)
    if listed is None:
        return [*paths]
    kept = {root / name for name in listed.split("\0") if name}
    return [path for path in paths if path in kept]


def unsnapshotted_files(files: ScriptFiles, code: Closure, args: Any) -> list[str]:
    """List the files that exist and that the script names although the snapshot (``code``) lacks them. They are
    returned as ``program.inputs`` would name them. ``args``: the arguments of the script."""
    missing: dict[str, None] = {}
    names = filter(_FILE_NAME.fullmatch, sorted({*words(args), *code.names}))
    for _, path in _existing(names, (files.folder, files.root)):
        name = path.relative_to(files.root if path.is_relative_to(files.root) else files.folder).as_posix()
        if path not in code.sources.values() and not any(fnmatch(name, pattern) for pattern in files.outputs):
            missing[name] = None
    return [*missing]


def with_model_inputs(code: Closure, root: Path, patterns: Sequence[str]) -> Closure:
    """Add the files of ``model.inputs``. Raises UsageError: a pattern matches nothing or leaves the project."""
    if not patterns:
        return code
    inputs: dict[str, Path] = {}
    for pattern in patterns:
        _refuse_outside("model.inputs", pattern)
        refuse_odd_pattern(pattern, f"model.inputs: {pattern!r}")
        files = _files_of(root, pattern)
        if not files:
            raise UsageError(f"model.inputs: {pattern!r} matches no file in {root}")
        inputs |= {path.relative_to(root).as_posix(): path for path in files}
    digests = {**code.digests, **{name: sha256_file(path) for name, path in inputs.items()}}
    sources = {**code.sources, **inputs}
    return code._replace(digests=dict(sorted(digests.items())), sources=dict(sorted(sources.items())))


def _files_of(folder: Path, pattern: str) -> list[Path]:
    matched = sorted(folder.glob(pattern))
    inside = [path for item in matched if item.is_dir() for path in sorted(item.rglob("*"))]
    files = [path for path in (*matched, *inside) if path.is_file() and "__pycache__" not in path.parts]
    return [*dict.fromkeys(files)]


def find(settings: ScriptConfig, *, root: Path, must_exist: bool = True) -> ScriptFiles:
    """Resolve all paths of a script's settings, relative ones from ``root``.

    ``must_exist`` is False for a run of the past. Raises UsageError: a file doesn't exist or is a folder, or a pattern
    leads out of its folder or can't match."""
    _check_patterns(settings)
    resolve = functools.partial(_absolute, root=root, must_exist=must_exist)
    if settings.script:
        file: Path | None = _python_file(settings.script, resolve)
    else:
        file = _program(settings.command[0], resolve, must_exist=must_exist)
    folder = file.parent if file is not None else root
    # python -m a.b finds b.py, or b/__main__.py, below the folder that holds the top-level package
    if settings.module and file is not None:
        is_package = file.name == "__main__.py" and not settings.module.endswith("__main__")
        folder = file.parents[settings.module.count(".") + is_package]
    workdir = os.path.normpath(settings.workdir) if settings.workdir else ""
    if not folder.is_relative_to(root) and workdir.partition("/")[0] != SCRIPT_OUTSIDE:
        workdir = f"{SCRIPT_OUTSIDE}/{workdir}".rstrip("/")  # the folder that the user would start the script in
    data = [DataPath("program.data", resolve("program.data", name)) for name in data_paths(settings.data)]
    return ScriptFiles(
        root=root,
        folder=folder,
        file=file,
        is_python=bool(settings.script),
        workdir="" if workdir == "." else workdir,
        inputs=tuple(settings.inputs),
        outputs=tuple(settings.outputs),
        data=tuple(data),
    )


def _check_patterns(settings: ScriptConfig) -> None:
    _refuse_outside("program.workdir", settings.workdir)
    for field, patterns in (("program.inputs", settings.inputs), ("program.outputs", settings.outputs)):
        for pattern in patterns:
            _refuse_outside(field, pattern)
            refuse_odd_pattern(pattern.removeprefix("{run}/"), f"{field}: {pattern!r}")


_Resolve = Callable[[str, str], Path]
"""Turns a setting's name (``program.script``) and the path that stands there into an absolute path."""


def _python_file(name: str, resolve: _Resolve) -> Path:
    path = resolve("program.script", name)
    if path.is_symlink():  # Python looks for modules in the folder of the file itself
        path = path.resolve()
    if path.is_dir():
        raise UsageError(f"program.script={name} is a folder; name the file in it, such as {name.rstrip('/')}/train.py")
    if path.suffix != ".py":
        raise UsageError(f"program.script={name} is no Python file (.py); program.command=[./{path.name}] runs others")
    return path


def _program(name: str, resolve: _Resolve, *, must_exist: bool) -> Path | None:
    """Return the executable's path; None for a plain name, which each host looks up in its PATH."""
    if "/" not in name:
        return None
    path = resolve("program.command", name)
    if must_exist and (path.is_dir() or not os.access(path, os.X_OK)):
        what = "a folder" if path.is_dir() else "not executable"
        raise UsageError(f"program.command: {name} is {what}", hint=f"chmod +x {path}" if path.is_file() else None)
    return path


def _absolute(field: str, name: str, *, root: Path, must_exist: bool) -> Path:
    path = Path(os.path.abspath(root / expanded(name, f"{field}={name}")))  # noqa: PTH100
    if must_exist and not path.exists():
        close = nearest(path.name, _sibling_names(path), _LIKENESS)
        raise UsageError(f"{field}={name}: there is no {path}" + (f"; did you mean {close}?" if close else ""))
    return path


def _sibling_names(path: Path) -> list[str]:
    with suppress(OSError):
        return sorted(other.name for other in path.parent.iterdir())
    return []


def _refuse_outside(field: str, pattern: str) -> None:
    if pattern.startswith(("/", "~")) or ".." in Path(pattern).parts:
        raise UsageError(f"{field}: {pattern!r} leads out of its folder; write it relative to the project, without ..")


_FRAMEWORKS = (
    "accelerate|colossalai|composer|deepspeed|detectron2|fairscale|horovod|ignite|lightning|lightning_fabric|megatron|"
    "mmengine|pytorch_lightning|torch_xla|torchrec|torchtitan|torchtune|trl"
)
_CODE = re.compile(  # in a source
    rf"\b(torch\.distributed|torch import distributed|init_process_group|init_device_mesh|DistributedDataParallel|"
    rf"FullyShardedDataParallel|fully_shard|DistributedSampler|RANK|LOCAL_RANK|WORLD_SIZE)\b"
    rf"|^\s*(import|from)\s+({_FRAMEWORKS})\b",
    re.MULTILINE,
)
# transformers alone doesn't make several ranks useful, its Trainer does
_TRAINER = re.compile(r"^\s*(import|from)\s+transformers\b.*?\b\w*Trainer\b", re.MULTILINE | re.DOTALL)
# in the command, its arguments and variables
_WORDS = re.compile(r"(?<![a-z])(accelerate|ddp|deepspeed|distributed|fsdp|horovodrun|torchrun|torch\.distributed)\b")
_OF_PACELINE = (*(f"{name}/" for name in MODULES), "paceline.py")


def uses_process_group(resolved: Mapping[str, Any], root: Path) -> bool:
    """Return True if the configured script uses a process group: only then does it start several ranks unasked."""
    python_path = str((resolved["cluster"]["env"] or {}).get("PYTHONPATH") or "").split(":")
    try:
        script = ScriptConfig(**resolved["program"])
        if _WORDS.search("\n".join(map(str, (*script.command, *words(script.args), *script.env))).lower()):
            return True
        files = find(script, root=root, must_exist=False)
        sources = files.closure([*filter(None, python_path)]).sources if files.file is not None else {}
        own = [name for name in sources if name.endswith(".py") and not name.startswith(_OF_PACELINE)]
        return any(_names_process_group(sources[name]) for name in own)
    except (UsageError, ConfigError, OSError):  # the start of the run reports it
        return False


def _names_process_group(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not (_CODE.search(text) or _TRAINER.search(text)):  # a cheap first look: most files name nothing of it
        return False
    code = _without_comments(text)
    return _CODE.search(code) is not None or _TRAINER.search(code) is not None


def _without_comments(text: str) -> str:
    """Blank out comments: they don't count in the key, so they must not decide the number of ranks."""
    lines = text.splitlines(keepends=True)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = f"{lines[row - 1][:column]}\n"
    except (tokenize.TokenError, SyntaxError):
        return text
    return "".join(lines)
