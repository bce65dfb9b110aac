"""Which files of the node half a run imports: the part of the content key that follows the code.

Read statically from the syntax tree, so nothing of torch is imported. The options that the configuration chose
(model, optimizer, …) are imported by name, so their modules are entries of their own. A string that names a module of
the package counts as an import of it.

Each file counts by the digest of its syntax tree (``pipeline.syntax``). That digest and what a source imports are
remembered under the digest of its bytes (parsing them is most of the work); which files there are, and what they hold,
is looked at each time.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import syntax
from pipeline.errors import UsageError
from pipeline.files import sha256_bytes, sha256_file, sha256_text
from pipeline.remembered import Remembered

_MOST = 512  # sources remembered; a run needs about thirty


@dataclass(frozen=True, kw_only=True)
class Closure:
    """The files that a run imports, by their paths in the code snapshot, sorted.

    ``digests`` is what counts of each, ``sources`` where it lies; ``third_party`` are top-level import names.
    """

    digests: Mapping[str, str]
    sources: Mapping[str, Path]
    third_party: tuple[str, ...]


def import_closure(root: Path, entries: str | Collection[str]) -> Closure:
    """Everything that ``python -m entry`` can import, found from its source.

    Args:
        root: the folder that holds the top-level package.
        entries: dotted name of the entry, for example ``trainers.classifier``; or several, as with a run's options.

    Raises:
        FileNotFoundError: an entry module is not there.
        UsageError: a module that can't be parsed.
    """
    waiting = [entries] if isinstance(entries, str) else [*entries]
    packages = {entry.partition(".")[0] for entry in waiting}
    for entry in waiting:
        if _file_of(root, entry) is None:
            raise FileNotFoundError(f"{entry} is not a module under {root}")
    readings = Readings(root)
    seen, found, external = set[str](), dict[str, Reading](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file_of(root, name)
        if path is None:
            continue
        parts = name.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]  # parent packages run first
        reading = found[path] = readings.of(path, (root / path).read_bytes())
        for imported in reading.imports:
            if imported.partition(".")[0] in packages:
                waiting.append(imported)
            else:
                external.add(imported)
    readings.keep()
    digests = _digests(found)
    sources = {name: root / name for name in digests}
    return Closure(digests=digests, sources=sources, third_party=tuple(sorted(external)))


def matches(root: Path, folder: Path, digests: Mapping[str, str]) -> bool:
    """Whether the copies in ``folder`` are the files that ``digests`` were taken of, up to what doesn't count of them.

    ``root`` is the project, where what is known of sources lies. Raises OSError, UsageError.
    """
    readings = Readings(root)
    found = {name: readings.of(name, (folder / name).read_bytes()) for name in digests}
    return all(digest in (found[name].digest, found[name].text) for name, digest in digests.items())


def _digests(found: Mapping[str, Reading]) -> dict[str, str]:
    """The tree of each file; its text where code can see that."""
    everywhere = any(reading.sight == "all" for reading in found.values())
    return {
        path: reading.text if everywhere or reading.sight == "own" else reading.digest
        for path, reading in sorted(found.items())
    }


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read out of one source.

    ``text`` is the sha256 of its bytes, ``digest`` and ``sight`` are of ``pipeline.syntax``; ``imports`` are dotted
    names.
    """

    text: str
    digest: str
    sight: str
    imports: list[str]


class Readings:
    """What is read out of sources, remembered as long as the source, the code that reads and Python stay the same."""

    def __init__(self, root: Path) -> None:
        self._known = Remembered(root, "imports", most=_MOST)
        self._reader = " ".join([sha256_file(Path(__file__)), sha256_file(Path(syntax.__file__)), sys.version])
        self._new: dict[str, Any] = {}

    def of(self, path: str, source: bytes) -> Reading:
        """Of the module at ``path``, relative to the project root. Raises UsageError: it can't be parsed."""
        text = sha256_bytes(source)
        name = sha256_text(f"{self._reader} {path} {text}")
        found = self._known[name]
        if found is None:
            found = self._new[name] = _read(source, path)
        return Reading(text=text, **found)

    def keep(self) -> None:
        """Write down what was read anew."""
        if self._new:
            self._known.keep(self._new)


def _read(source: bytes, path: str) -> dict[str, Any]:
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{path}{line} can't be parsed: {why}", try_="mend the file, then the same command") from error
    return {"digest": syntax.digest(tree), "sight": syntax.sight(tree), "imports": _imports(tree, source, path)}


def _file_of(root: Path, module: str) -> str | None:
    """Relative to the root. Texts, because two hundred names are asked for and as Paths take 5 ms."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if os.path.isfile(f"{root}/{path}"):  # noqa: PTH113
            return path
    return None


def _imports(tree: ast.Module, source: bytes, path: str) -> list[str]:
    """Dotted names that one module imports.

    For ``from a import b`` both a and a.b (b may be a module); of third-party packages the top-level name alone.
    """
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = name.partition(".")[0]
    names_modules = f"{package}.".encode() in source.replace(f"from {package}.".encode(), b"")
    found: set[str] = set()
    for node in ast.walk(tree) if names_modules else _statements(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name, path.endswith("__init__.py"))
            found.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and _names_module(node, package):
            found.add(str(node.value).partition(":")[0])
    own = {imported for imported in found if imported.partition(".")[0] == package}
    others = {imported.partition(".")[0] for imported in found - own} - sys.stdlib_module_names
    return sorted(own | others)


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


def _names_module(node: ast.Constant, package: str) -> bool:
    return isinstance(node.value, str) and node.value.startswith(f"{package}.") and " " not in node.value
