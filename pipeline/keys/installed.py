"""The installed distribution that a top-level module comes from (``PIL``: Pillow), and its version, for content keys.

Each distribution lists its files in a file RECORD. Nothing is imported. Results are cached until an install changes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import site
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pipeline.core.cache import Cache
from pipeline.core.files import sha256_file, sha256_text

_MOST_CACHED = 256  # modules
_AT_STARTUP = {"sitecustomize", "usercustomize"}  # Python runs them before any program


class InstalledModule(NamedTuple):
    """Where a top-level module would be imported from. A namespace package may have several owners and folders."""

    is_namespace: bool
    owners: Mapping[str, Sequence[str]]  # distribution → its names below the module; empty if it is the only owner
    bases: tuple[str, ...]  # in editable installs and PYTHONPATH: /x/a for /x/a.py and for /x/a/__init__.py
    strays: tuple[str, ...]  # other paths, which no distribution lists in its RECORD

    def distributions(self, parts: Collection[str]) -> set[str]:
        """Return the owners of ``parts`` (dotted names below the module); all owners if their lists don't decide."""
        owners = {owner for owner, names in self.owners.items() for part in parts if _has(names, part)}
        return owners or {*self.owners}


class Installed:
    """Modules installed for this interpreter. ``python_path``: folders of the ranks' PYTHONPATH, searched first."""

    def __init__(self, root: Path, python_path: Sequence[str] = ()) -> None:
        self._root = os.path.realpath(root)
        self._python_path = [str(root / entry) for entry in python_path if (root / entry).is_dir()]
        self._cache = Cache(root, "installed", most=_MOST_CACHED)
        self._new: dict[str, Any] = {}

    def find(self, name: str) -> InstalledModule | None:
        """Locate a top-level module; None if it doesn't exist."""
        spec = PathFinder.find_spec(name, self._path)
        if spec is None or not spec.origin:  # no module or only a namespace package: an editable install may have it
            spec = _editable_spec(name) or spec
        if spec is None:
            return None
        owners: dict[str, list[str]] = {}
        bases: list[str] = []
        strays: list[str] = []
        for path in [spec.origin] if spec.origin else spec.submodule_search_locations or ():
            base = _base(path, name) if spec.origin else path
            owners_here = self._owners(name, str(Path(base).parent))
            owners.update(owners_here)
            if not owners_here:
                (bases if self._is_source(path) else strays).append(base)
        return InstalledModule(is_namespace=not spec.origin, owners=owners, bases=tuple(bases), strays=tuple(strays))

    def shadowing_modules(self) -> list[str]:
        """List modules on the ranks' PYTHONPATH that shadow other modules or that Python runs at startup."""
        others = [entry for entry in self._path if entry not in self._python_path]
        names = {name for folder in self._python_path for name in _modules(folder)}
        return sorted(name for name in names if name in _AT_STARTUP or PathFinder.find_spec(name, others) is not None)

    def version(self, name: str) -> str | None:
        """Return ``version`` of a distribution on the ranks' path."""
        return version(name, self._path)

    def keep(self) -> None:
        """Write new entries to the cache."""
        if self._new:
            self._cache.keep(self._new)

    @cached_property
    def _path(self) -> list[str]:
        """The search path of the ranks' Python without the project, which the caller searches first."""
        return [*self._python_path, *(entry for entry in sys.path if entry and os.path.realpath(entry) != self._root)]

    def _owners(self, name: str, folder: str) -> dict[str, list[str]]:
        if folder not in self._path:
            return {}
        owners: dict[str, list[str]] = self._cached(f"{folder} {name}", lambda: _owners(name, folder))
        return owners

    def _is_source(self, path: str) -> bool:
        """Return True if a file changes without an install: its content counts in the key, and not a version."""
        editable: list[str] = self._cached("editable", lambda: _editable_folders(self._path))
        return any(Path(path).is_relative_to(folder) for folder in (*editable, *self._python_path))

    def _cached(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the cache entry of that name for the current installs; compute it if there is none."""
        key = sha256_text(f"{self._state} {name}")
        entry = self._cache.get(key)
        if entry is None:
            entry = self._new[key] = compute()
        return entry

    @cached_property
    def _state(self) -> str:
        """The state of all installs: each install or removal changes a .dist-info folder and its parent's mtime."""
        lines = [sha256_file(Path(__file__)), sys.version]
        for folder in self._path:
            try:
                names = [name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))]  # noqa: PTH208
                lines += [f"{folder} {os.stat(folder).st_mtime_ns} {sorted(names)}"] if names else []  # noqa: PTH116
            except OSError:  # an archive, or a folder that isn't there
                continue
        return "\n".join(lines)


def _modules(folder: str) -> set[str]:
    """Return the top-level modules of a folder, without namespace packages, which shadow nothing."""
    suffixes = (".py", *EXTENSION_SUFFIXES)
    paths = list(Path(folder).iterdir())
    names = {path.name.partition(".")[0] for path in paths if path.name.endswith(suffixes)}
    return names | {path.name for path in paths if (path / "__init__.py").is_file()}


def version(name: str, path: Sequence[str] | None = None) -> str | None:
    """Return the version of an installed distribution, or None. A distribution installed from a folder, repository or
    file may change under the same version, so a digest of its content is appended."""
    searched = [*(sys.path if path is None else path)]
    distribution = next(iter(importlib.metadata.distributions(name=name, path=searched)), None)
    if distribution is None:
        return None
    # importlib.metadata.version parses METADATA as an e-mail, which takes 1 ms for each distribution
    header = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    versions = [line.partition(":")[2].strip() for line in header.splitlines() if line.startswith("Version:")]
    number = versions[0] if versions else distribution.version
    if distribution.read_text("direct_url.json") is None:
        return number
    return f"{number} (content {sha256_text(_content(distribution))[:12]})"


def _content(distribution: Distribution) -> str:
    """Return the lines of RECORD (path, digest, size) that don't depend on where the distribution is installed."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    return "\n".join(sorted(line for line in lines if not re.match(r"\.\.|/|[^,]*(\.dist-info/|\.pyc,)", line)))


def _owners(name: str, folder: str) -> dict[str, list[str]]:
    """Return the owners of a module in ``folder``: distribution → dotted names below the module that it installs."""
    files_by_owner: dict[str, Sequence[str]] = {}
    line = re.compile(rf"^{re.escape(name)}(?:/([^,\n]*))?(?:\.[^/,\n]*)?(?:,|$)", re.MULTILINE)
    is_site = folder in [*site.getsitepackages(), site.getusersitepackages()]
    for distribution in importlib.metadata.distributions(path=[folder]):
        record = distribution.read_text("RECORD") or ""
        files = line.findall(record.replace('"', ""))
        # an .egg-info outside site-packages is a leftover of a build in a working tree and owns nothing
        if not record and is_site and name in _declared(distribution):
            files = [""]
        if files:
            files_by_owner[normal_name(distribution.name)] = files
    shared = len(files_by_owner) > 1  # a sole owner needs no list of parts
    return {owner: _topmost(files) if shared else [] for owner, files in files_by_owner.items()}


def _declared(distribution: Distribution) -> list[str]:
    """Return the top-level modules of a distribution without a file list (Debian): top_level.txt, else its name."""
    declared = distribution.read_text("top_level.txt")
    return declared.split() if declared is not None else [normal_name(distribution.name).replace("-", "_")]


def _topmost(files: Sequence[str]) -> list[str]:
    """Return the dotted names of the topmost packages and modules among these files."""
    packages = {file.rpartition("/")[0] for file in files if file.rpartition("/")[2].startswith("__init__.")}
    modules = {file.removesuffix(".py").split(".")[0] for file in files if file.endswith((".py", ".so"))}
    names = {name.replace("/", ".") for name in packages | modules}
    return sorted(name for name in names if names.isdisjoint(_above(name)))


def _above(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def normal_name(name: str) -> str:
    """Return a distribution's name in lower case with ``-`` for ``_`` and ``.``, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _has(names: Sequence[str], part: str) -> bool:
    return any(part == name or part.startswith(f"{name}.") for name in names if name)


def _base(origin: str, name: str) -> str:
    """Return the module path without suffix: /x/a for both /x/a/__init__.py and /x/a.py."""
    folder, file = os.path.split(origin)
    return folder if file.startswith("__init__.") else os.path.join(folder, name)  # noqa: PTH118


def _editable_spec(name: str) -> ModuleSpec | None:
    """Find the module through the finder that an editable install's .pth file put on ``sys.meta_path``."""
    for finder in sys.meta_path:
        owner = finder if isinstance(finder, type) else type(finder)
        if "editable" in owner.__module__:
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
    return None


def _editable_folders(path: Sequence[str]) -> list[str]:
    folders = []
    for distribution in importlib.metadata.distributions(path=[*path]):
        origin = distribution.read_text("direct_url.json")
        direct_url = json.loads(origin) if origin else {}
        if direct_url.get("dir_info", {}).get("editable"):
            folders.append(unquote(urlsplit(direct_url["url"]).path))
    return folders
