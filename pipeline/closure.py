"""Which files of the node half a run imports: the part of the content key that follows the code.

Read statically from the syntax tree, so nothing of torch is imported. A registry (a dict literal of
name → "package.module") counts only the entry whose name the configuration chose; any other string that
names a module of the package counts as an import of it.

What one source imports is remembered under the digest of its bytes (parsing them is most of the work); which files
there are, and what they hold, is looked at each time.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.files import sha256_bytes, sha256_file, sha256_text
from pipeline.remembered import Remembered

_MOST = 512  # sources remembered; a run needs about thirty


@dataclass(frozen=True, kw_only=True)
class Closure:
    """``files`` are relative to the project root, sorted; ``third_party`` are top-level import names."""

    files: tuple[Path, ...]
    third_party: tuple[str, ...]


def import_closure(root: Path, module: str, chosen: Collection[str]) -> Closure:
    """Everything that ``python -m module`` can import, found from its source.

    Args:
        root: the folder that holds the top-level package.
        module: dotted name of the entry, for example ``trainers.classifier``.
        chosen: names that the configuration takes from registries (model, dataset, …).

    Raises:
        FileNotFoundError: the entry module is not there.
        SyntaxError: a module that can't be parsed.
    """
    package = module.partition(".")[0]
    if _file_of(root, module) is None:
        raise FileNotFoundError(f"{module} is not a module under {root}")
    readings = Readings(root, "imports", Path(__file__))
    waiting, seen, files, external = [module], set[str](), set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file_of(root, name)
        if path is None:
            continue
        files.add(path)
        parts = name.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]  # parent packages run first
        source = (root / path).read_bytes()
        always, entries = readings.of(path, source, partial(_imports, source, name, path, package))
        for imported in [*always, *(target for key, target in entries if key in chosen)]:
            if imported.partition(".")[0] == package:
                waiting.append(imported)
            else:
                external.add(imported)
    readings.keep()
    return Closure(files=tuple(sorted(map(Path, files))), third_party=tuple(sorted(external)))


class Readings:
    """What is read out of sources, remembered as long as the source, its ``reader``'s code and Python stay the same."""

    def __init__(self, root: Path, kind: str, reader: Path) -> None:
        self._known = Remembered(root, kind, most=_MOST)
        self._reader = f"{sha256_file(reader)} {sys.version}"
        self._new: dict[str, Any] = {}

    def of(self, path: str, source: bytes, read: Callable[[], Any]) -> Any:
        """What ``read`` returns, as JSON gives it back."""
        name = sha256_text(f"{self._reader} {path} {sha256_bytes(source)}")
        found = self._known[name]
        if found is None:
            found = self._new[name] = read()
        return found

    def keep(self) -> None:
        """Write down what was read anew."""
        if self._new:
            self._known.keep(self._new)


def _file_of(root: Path, module: str) -> str | None:
    """Relative to the root. Texts, because two hundred names are asked for and as Paths take 5 ms."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if os.path.isfile(f"{root}/{path}"):  # noqa: PTH113
            return path
    return None


def _imports(source: bytes, name: str, path: str, package: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Dotted names that one module imports, and the entries of its registries: (name, dotted name).

    For ``from a import b`` both a and a.b (b may be a module); of third-party packages the top-level name alone.
    """
    tree = ast.parse(source, filename=path)
    names_modules = f"{package}.".encode() in source.replace(f"from {package}.".encode(), b"")
    found: set[str] = set()
    entries: list[tuple[str, str]] = []
    of_registries: set[int] = set()  # a dict comes before its values in this order
    for node in ast.walk(tree) if names_modules else _statements(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name, path.endswith("__init__.py"))
            found.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Dict):
            for key, value in _registered(node, package):
                of_registries.add(id(value))
                entries.append((key, _module(value)))
        elif isinstance(node, ast.Constant) and id(node) not in of_registries and _names_module(node, package):
            found.add(_module(node))
    own = {imported for imported in found if imported.partition(".")[0] == package}
    others = {imported.partition(".")[0] for imported in found - own} - sys.stdlib_module_names
    return sorted(own | others), entries


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements at every depth without their expressions, for the many modules that name no module in a string."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, ())
            if isinstance(inner, list):
                waiting += inner


def _absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    parent = parts[: len(parts) - node.level + is_package]
    return ".".join([*parent, node.module] if node.module else parent)


def _registered(node: ast.Dict, package: str) -> Iterator[tuple[str, ast.Constant]]:
    """Entries of a registry: its name, and the constant that names a module."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and _names_module(value, package):
            yield str(key.value), value


def _module(node: ast.Constant) -> str:
    return str(node.value).partition(":")[0]


def _names_module(node: ast.Constant, package: str) -> bool:
    return isinstance(node.value, str) and node.value.startswith(f"{package}.") and " " not in node.value
