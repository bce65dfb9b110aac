"""The import closure of a run: all sources and installed distributions that it can import, found without importing any.
They are the parts ``code`` and ``environment`` of the content key, and the sources are what is copied to the hosts.

A walk reads syntax trees. It follows imports at any depth into the project, Paceline itself, editable installs, and
``cluster.env.PYTHONPATH``. A string that names a module of the project counts as an import. The *snapshot* is the copy
of the sources in the run folder; paths in it are relative, as in ``trainers/classifier.py``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipeline.core import places
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_bytes, sha256_file
from pipeline.core.places import MODULES
from pipeline.keys import ABSENT
from pipeline.keys.installed import Installed, InstalledModule
from pipeline.keys.readings import Import, Readings, SourceReading
from trainers.core.errors import install

LARGEST_BYTES = 1 << 20
"""Data files of packages that are larger than this are left out."""
_MOST_DATA_FILES = 200  # in one folder of a package; a folder with more is a data set
_NOT_DATA = (".py", ".pyc", ".pyi", ".so", ".dylib", ".pyd", ".md", ".rst", ".ipynb", ".log")
_OUTPUT_FOLDERS = ("__pycache__", "checkpoints", "logs", "outputs", "runs", "wandb", "mlruns", "lightning_logs")
_SUFFIXES = (*(f"/__init__{end}" for end in (*EXTENSION_SUFFIXES, ".py")), *EXTENSION_SUFFIXES, ".py")  # Python's order
_TORCH = "torch"
_CONTROLLER = ("pipeline", "hydra_plugins", "dodo")  # the controller's half, which no host has


class Closure(NamedTuple):
    """What a run imports: files, by their paths in the snapshot, and installed distributions."""

    digests: Mapping[str, str]  # path in the snapshot → digest of what counts in the key
    sources: Mapping[str, Path]  # path in the snapshot → path on disk
    versions: Mapping[str, str]  # distribution → version; missing module → "absent"
    unresolved: Mapping[str, str] = MappingProxyType({})  # missing module that is imported unconditionally → file:line
    left_out: tuple[str, ...] = ()  # package data over the size limit, as ``PATH (SIZE bytes)``
    names: tuple[str, ...] = ()  # constants in the sources that may name files


class ScriptEntry(NamedTuple):
    """A file that a run starts: a script, or a module started by ``python -m``."""

    file: str
    folder: str  # imports are looked up here first; a script lies here, a module here or in packages below
    prefix: str  # of the paths of this folder's files in the snapshot


def import_closure(
    root: Path,
    entries: str | Collection[str],
    python_path: Sequence[str] = (),
    ignored: Collection[str] = (),
    script: ScriptEntry | None = None,
    may_lack: bool = False,
) -> Closure:
    """Collect everything that ``python -m entry`` can import, from the source text.

    Args:
        python_path: the folders of ``cluster.env.PYTHONPATH``.
        ignored: modules that are left out, with all that only they import.
        script: a file that the run starts. Its missing imports aren't refused: only the run can tell if it needs them.
        may_lack: record missing imports of the entries instead of refusing them, because the hosts may have them.

    Raises UsageError: an entry doesn't exist, a module can't be parsed, or an import isn't covered by the key.
    """
    _refuse_working_tree(root, python_path)
    names = [entries] if isinstance(entries, str) else [*entries]
    walk = _Walk(root, python_path, script, ignored, may_lack=may_lack)
    # the node half must not import the controller's half; an entry of the controller's half itself may
    walk.forbidden = () if any(name.partition(".")[0] in _CONTROLLER for name in names) else _CONTROLLER
    for name in names:
        if walk.file_of(name) is not None:
            walk.follow(name)
        elif not walk.is_installed(name):
            raise UsageError(f"{name} is not a module under {root}")
    if script is not None:
        walk.follow_script(script)
    for name in walk.installed.shadowing_modules():
        walk.follow_shadowing(name)
    walk.readings.keep()
    walk.installed.keep()
    data, left_out = _data_files(walk.readings_by_path, walk.disk_paths)
    digests = {path: reading.digest for path, reading in walk.readings_by_path.items()}
    digests |= {name: sha256_file(path) for name, path in data.items()}
    sources = {name: Path(on_disk) for name, on_disk in walk.disk_paths.items()} | data
    return Closure(
        digests=dict(sorted(digests.items())),
        sources={name: sources[name] for name in sorted(digests)},
        versions=walk.versions(),
        unresolved=dict(sorted(walk.unresolved.items())),
        left_out=left_out,
        names=tuple(sorted({name for reading in walk.readings_by_path.values() for name in reading.names})),
    )


def _refuse_working_tree(root: Path, python_path: Sequence[str]) -> None:
    """Refuse the project folder on PYTHONPATH: ranks would import files from it that aren't hashed."""
    for entry in python_path:
        if os.path.realpath(root / entry) == os.path.realpath(root):
            raise UsageError(
                f"cluster.env.PYTHONPATH names the project's own folder {entry}, of which a run has its own copy",
                hint=f"leave {entry} out of it",
            )


def source_file(root: Path, module: str, python_path: Sequence[str] = ()) -> Path | None:
    """Return the source of a module as a run's copy of the code would contain it, or None."""
    file = _Walk(root, python_path).file_of(module)
    return None if file is None else Path(file.on_disk)


def matches(root: Path, folder: Path, digests: Mapping[str, str]) -> bool:
    """Return True if the files in ``folder`` have these digests (path → digest). Raises OSError, UsageError."""
    readings = Readings(root)
    copies = {name: (folder / name).read_bytes() for name in digests}
    return all(  # files of program.inputs count by their bytes, sources by their syntax trees
        sha256_bytes(copies[name]) == digest or readings.of(name, copies[name]).digest == digest
        for name, digest in digests.items()
    )


class _File(NamedTuple):
    """A source: its path in the snapshot, its path on disk, and its path relative to the folder it is imported from."""

    path: str
    on_disk: str
    import_path: str


class _Walk:
    """One walk along the imports, and what it has found so far.

    Attributes:
        readings_by_path: path in the snapshot → what the source there contains.
        disk_paths: path in the snapshot → path on disk.
        imported_parts: top-level module of a distribution → imported names below it.
        absent: missing modules; ``unresolved``: those imported unconditionally → file:line.
        forbidden: packages that a run must not import.
    """

    def __init__(
        self,
        root: Path,
        python_path: Sequence[str],
        script: ScriptEntry | None = None,
        seen: Collection[str] = (),
        may_lack: bool = False,
    ) -> None:
        self.root, self.script = root, script
        self.installed, self.readings = Installed(root, python_path), Readings(root)
        self.may_lack = may_lack
        self.forbidden: Collection[str] = ()
        self.readings_by_path: dict[str, SourceReading] = {}
        self.disk_paths: dict[str, str] = {}
        self.imported_parts: dict[str, set[str]] = defaultdict(set)
        self.absent: set[str] = set()
        self.unresolved: dict[str, str] = {}
        self._seen = {*seen}
        # caches of _locate, file_of and _list_folder
        self._located: dict[str, tuple[tuple[str, ...], InstalledModule | None]] = {}
        self._files: dict[str, _File | None] = {}
        self._listed: dict[str, frozenset[str]] = {}

    def follow(self, name: str) -> None:
        """Read a module of a source tree and everything that it imports."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self._seen:
                continue
            self._seen.add(name)
            parts = name.split(".")
            waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]  # parent packages run first
            file = self.file_of(name)
            if file is not None:
                reading = self._read(file)
                waiting += [item.name for item in reading.imports if self._must_follow(item, file.path)]

    def follow_script(self, script: ScriptEntry) -> None:
        """Read a file that is started by its path or as a module, and everything that it imports."""
        name = os.path.relpath(script.file, script.folder)
        file = _File(path=f"{script.prefix}{name}", on_disk=script.file, import_path=name)
        if "/" in name:
            self.follow(name.rpartition("/")[0].replace("/", "."))  # python -m runs the packages around it first
        for item in self._read(file).imports:
            if self._must_follow(item, file.path):
                self.follow(item.name)

    def _read(self, file: _File) -> SourceReading:
        with open(file.on_disk, "rb") as source:  # noqa: PTH123  (Path.open costs as much as the read)
            reading = self.readings_by_path[file.path] = self.readings.of(file.import_path, source.read(), file.path)
        self.disk_paths[file.path] = file.on_disk
        return reading

    def is_installed(self, name: str) -> bool:
        """Return True if an installed distribution has the module, and record it so that its version counts."""
        top, _, rest = name.partition(".")
        module = self._locate(top)[1]
        if module is None or not module.owners:
            return False
        self.imported_parts[top].add(rest)
        return True

    def follow_shadowing(self, name: str) -> None:
        """Follow a module on the ranks' PYTHONPATH that hides one of Python's or of an installed package, which then
        import it too, or that Python runs at startup, such as sitecustomize."""
        path = "cluster.env.PYTHONPATH"
        if name not in self.forbidden and self._must_follow(Import(name, 1, "optional"), path):
            self.follow(name)

    def _must_follow(self, item: Import, path: str) -> bool:
        """Return True if the walk must follow an import; else record it as installed or missing. Raises UsageError."""
        if item.name in self._seen:
            return False
        top, _, rest = item.name.partition(".")
        # A string that looks like a module name counts only if the project has such a module.
        if item.kind == "named" and not self._is_of_paceline_or_project(top):
            return False
        # These two name a module for certain. A "part" (b in ``from a import b``) may be an attribute instead, and a
        # "named" string may be any text, so neither of these is refused or recorded as missing.
        names_a_module = item.kind in ("needed", "optional")
        if top in self.forbidden and not self._is_of_script(top):
            if names_a_module:
                raise _refusal(
                    path, item, "the controller's half, which no host has", "move what both need into trainers/"
                )
            return False
        bases, installed = self._locate(top)
        # Look for sources first: the project and an installed distribution may share a namespace package.
        if bases and (self.file_of(item.name) or self._is_namespace_package(item.name)):
            return True
        if item.kind == "named":  # a string counts only if it names a source, which this one doesn't
            return False
        if installed is not None and installed.owners:
            self.imported_parts[top].add(rest)
        elif names_a_module and installed is not None and installed.strays:
            # such as a folder on sys.path, whose files are neither hashed nor have a version
            where = f"would come from {installed.strays[0]}, which no installed distribution has"
            raise _refusal(path, item, where, f"{install('-e PROJECT')}, or put it beside trainers/")
        elif names_a_module and not self._is_made_at_run_time(item.name):
            self._record_missing(item, path)
        return False

    def _is_of_paceline_or_project(self, top: str) -> bool:
        names = self._list_folder(str(self.root))
        return top in places.MODULES or top in names or f"{top}.py" in names or self._is_of_script(top)

    def _is_of_script(self, top: str) -> bool:
        names = self._list_folder(self.script.folder) if self.script is not None else frozenset[str]()
        return top in names or f"{top}.py" in names

    def _record_missing(self, item: Import, path: str) -> None:
        """Record a missing import as absent. Raises UsageError: code of the project or of Paceline imports it
        unconditionally, no script is started, and ``may_lack`` doesn't excuse it."""
        if item.kind == "optional" or self.script is not None or not self._is_of_project(path):
            self.absent.add(item.name)
            if item.kind == "optional":
                return
            # users are warned of gaps in their own code, not in a dependency's
            of_script = self.script is not None and Path(self.disk_paths[path]).is_relative_to(self.script.folder)
            if of_script or self._is_of_project(path):
                self.unresolved.setdefault(item.name, f"{path}:{item.line}")
            return
        top = item.name.partition(".")[0]
        if self.may_lack and not self._locate(top)[0]:  # a host that has the distribution has all of its modules
            self.absent.add(top)
            self.unresolved.setdefault(top, f"{path}:{item.line}")
            return
        raise missing_module_error(item.name, f"{path}:{item.line}")

    def _is_of_project(self, path: str) -> bool:
        return Path(self.disk_paths[path]).is_relative_to(self.root) or path.partition("/")[0] in places.MODULES

    def _is_made_at_run_time(self, name: str) -> bool:
        """Return True for names below a plain module, such as six.moves, which only its own code defines."""
        parent = self.file_of(name.rpartition(".")[0])
        return parent is not None and "/__init__." not in parent.path

    def file_of(self, name: str) -> _File | None:
        """Return the source file of a module; None for a missing module or a namespace package."""
        if name not in self._files:
            self._files[name] = self._find(name)
        return self._files[name]

    def _find(self, name: str) -> _File | None:
        top, _, rest = name.partition(".")
        inner = f"/{rest.replace('.', '/')}" if rest else ""
        for base in self._locate(top)[0]:
            suffix = self._find_suffix(f"{base}{inner}")
            if suffix is not None:
                prefix = ""
                if self.script is not None and base == f"{self.script.folder}/{top}":
                    prefix = self.script.prefix
                module = f"{top}{inner}{suffix}"
                return _File(path=f"{prefix}{module}", on_disk=f"{base}{inner}{suffix}", import_path=module)
        return None

    def _is_namespace_package(self, name: str) -> bool:
        top, _, rest = name.partition(".")
        folders = [f"{base}/{rest.replace('.', '/')}" for base in self._locate(top)[0]]
        # with a compiled __init__.pyc alone, Python takes the folder for a plain package, of which there is no source
        return any(os.path.isdir(folder) and "__init__.pyc" not in self._list_folder(folder) for folder in folders)  # noqa: PTH112

    def _locate(self, top: str) -> tuple[tuple[str, ...], InstalledModule | None]:
        """Return the bases of a top-level module's sources in Python's order, and the installed module of that name. A
        base is a path without suffix: /x/a for /x/a.py and for the package /x/a. A namespace package has several."""
        if top not in self._located:
            folders = dict.fromkeys([*([self.script.folder] if self.script else []), str(self.root)])
            bases = [f"{folder}/{top}" for folder in folders]
            if top in places.MODULES:
                bases.append(f"{places.HOME}/{top}")
            of_project = next((base for base in bases if self._find_suffix(base) is not None), None)
            if of_project is not None:  # it hides an installed module of that name
                self._located[top] = ((of_project,), None)
            else:
                installed = self.installed.find(top)
                may_share = installed is None or installed.is_namespace
                shared = [base for base in bases if may_share and os.path.isdir(base)]  # noqa: PTH112
                self._located[top] = ((*shared, *(installed.bases if installed else ())), installed)
        return self._located[top]

    def _find_suffix(self, base: str) -> str | None:
        """Return what follows a base in the path of its source, such as ``/__init__.py``; None without a source."""
        folder, _, name = base.rpartition("/")
        names = self._list_folder(folder)
        for suffix in _SUFFIXES:
            if suffix[0] == "/" and name in names:
                is_listed = suffix[1:] in self._list_folder(base)
            else:
                is_listed = name + suffix in names
            if is_listed and os.path.isfile(f"{base}{suffix}"):  # noqa: PTH113
                return suffix
        return None

    def _list_folder(self, folder: str) -> frozenset[str]:
        """List a folder, once per walk: most of the hundreds of names that are looked up don't exist."""
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(os.listdir(folder))  # noqa: PTH208
            except OSError:
                self._listed[folder] = frozenset()
        return self._listed[folder]

    def versions(self) -> dict[str, str]:
        """Return the version of each imported distribution, and ``absent`` for missing optional modules."""
        names = set[str]()
        for top, parts in self.imported_parts.items():
            installed = self._locate(top)[1]
            names |= installed.distributions(parts) if installed is not None else set()
        installed_versions = {name: self.installed.version(name) or ABSENT for name in names}
        return dict(sorted({**dict.fromkeys(self.absent, ABSENT), **installed_versions}.items()))


def _data_files(
    readings: Mapping[str, SourceReading], disk_paths: Mapping[str, str]
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the data files of modules by path in the snapshot, and descriptions of those that are too large."""
    candidates: dict[str, Path] = {}
    for name, reading in sorted(readings.items()):
        if name.partition("/")[0].removesuffix(".py") in MODULES or not name.endswith(".py"):  # Paceline has no data
            continue
        folder, inside = Path(disk_paths[name]).parent, name.rpartition("/")[0]
        # of a package all data files count, as code may list them; beside a plain module, those that its source names
        if inside and name.endswith("/__init__.py"):
            below = _data_files_below(folder)
            candidates |= {f"{inside}/{path.relative_to(folder).as_posix()}": path for path in below}
        for path in (folder / file for file in reading.files):
            if ".." in path.parts or not _is_data(path):
                continue
            candidates[os.path.normpath(f"{inside}/{path.relative_to(folder).as_posix()}").lstrip("/")] = path
    sizes = {name: path.stat().st_size for name, path in candidates.items()}
    too_large = tuple(f"{name} ({size:,} bytes)" for name, size in sorted(sizes.items()) if size > LARGEST_BYTES)
    return {name: path for name, path in candidates.items() if sizes[name] <= LARGEST_BYTES}, too_large


def _data_files_below(folder: Path) -> Iterator[Path]:
    entries = sorted(folder.iterdir())
    files = [path for path in entries if _is_data(path)]
    yield from files if len(files) <= _MOST_DATA_FILES else ()
    for path in entries:
        is_left_out = path.name.startswith(".") or path.name in _OUTPUT_FOLDERS or path.is_symlink()
        if not is_left_out and path.is_dir() and not (path / "__init__.py").exists():  # packages are walked by imports
            yield from _data_files_below(path)


def _is_data(path: Path) -> bool:
    return not path.name.startswith(".") and not path.name.endswith(_NOT_DATA) and path.is_file()


def missing_module_error(name: str, place: str, elsewhere: str = "") -> UsageError:
    """Return the error for a module that is imported at ``place`` (file:line) and doesn't exist here. ``elsewhere``: an
    override for the case that the hosts have it."""
    if name == _TORCH:  # a controller may do without it
        what, hints = f"{place} imports torch, which is not installed here", [install(name)]
    else:
        nowhere = "neither a file of the project nor of the standard library nor of an installed distribution"
        what, optional = f"{place} imports {name}: {nowhere}", f"try: import {name} … except ImportError"
        hints = [
            f"{install('PACKAGE')}, the one that has it",
            "where it is code of yours in another folder, cluster.env.PYTHONPATH=<that folder>",
            f"where it may be missing, {optional}",
        ]
    hints[1:1] = [f"where the hosts have it, {elsewhere}"] if elsewhere else []
    return UsageError(what, hint="; or, ".join(hints))


def _refusal(path: str, item: Import, what: str, hint: str) -> UsageError:
    return UsageError(f"{path}:{item.line} imports {item.name}: {what}", hint=hint)
