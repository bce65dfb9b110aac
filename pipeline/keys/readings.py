"""Cached parse results of Python sources: digest, imports, and file names.

An entry stays valid as long as the source, the parsing code and Python are the same.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.cache import Cache
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_bytes, sha256_file, sha256_text
from pipeline.keys import imports
from pipeline.keys.imports import Import

_MOST = 256  # cached sources, or twice the number of the latest walk if that is more; a run needs about thirty


_OWN_PLACE = re.compile(rb"\b(__file__|resources|get_data)\b")
_JOIN = ("join", "joinpath", "Path", "PurePath")
_FILE = re.compile(r"[\w@+ -][\w./@+ -]{0,200}\.\w{1,12}")


_WRITES = re.compile(
    r"to_(?!device|tensor)\w+|save\w*|dump|write\w*|(Rotating)?FileHandler|mkdir|makedirs|remove|unlink"
)
_WRITING = re.compile(r"[wax][bt+]{0,2}")  # modes of open
_IN_FOLDER = re.compile(r"([\w@+-][\w./@+ -]{0,200})/[^/]*")
KEEP_EMPTY_FOLDER = (".gitignore", ".gitkeep", ".keep")  # files with which a repository has a folder without others


class Reading(NamedTuple):
    """The parse result of one source.

    ``digest`` comes from ``pipeline.keys.imports``. ``names`` are string constants that may name files; ``files`` are
    the same, for a source that locates files relative to itself.
    """

    digest: str
    imports: tuple[Import, ...]
    files: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Readings:
    """The parse results of a project's sources."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known = Cache(root, "imports", most=_MOST)
        self._new: dict[str, Any] = {}
        self._count = 0

    def of(self, path: str, source: bytes, shown: str = "") -> Reading:
        """Parse the module at ``path`` (relative to its import folder), or return the cached result.

        A compiled module counts by its bytes. ``shown`` is the path in the snapshot, if different. Raises UsageError.
        """
        text = sha256_bytes(source)
        if not path.endswith(".py"):
            return Reading(digest=text, imports=())
        name = sha256_text(f"{self._reader} {path} {text}")
        known = self._known.get(name)
        self._count += 1
        if known is None:
            known = self._new[name] = _read(source, path, shown or path)
        return Reading(
            digest=known["digest"],
            imports=tuple(
                Import(name, line, kind) for kind, lines in known["imports"].items() for name, line in lines.items()
            ),
            files=tuple(known["names"] if known["from_own_place"] else ()),
            names=tuple(known["names"]),
        )

    def keep(self) -> None:
        """Write new entries to the cache."""
        if self._new:
            Cache(self._root, "imports", most=max(_MOST, 2 * self._count)).keep(self._new)

    @cached_property
    def _reader(self) -> str:
        readers = (__file__, str(imports.__file__))
        return " ".join([*(sha256_file(Path(reader)) for reader in readers), sys.version])


def module_of(path: str) -> str:
    """Return the dotted module name for a source path relative to its import folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _read(source: bytes, path: str, shown: str) -> dict[str, Any]:
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{shown}{line} can't be parsed: {why}", hint="fix the file, then the same command") from error
    imported = imports.imports(tree, module_of(path), is_package=path.endswith("/__init__.py"))
    kinds: dict[str, dict[str, int]] = {}
    for item in imported:
        kinds.setdefault(item.kind, {})[item.name] = item.line
    from_own_place = _OWN_PLACE.search(source) is not None
    digest = imports.digest(tree, source)
    return {"digest": digest, "imports": kinds, "names": _names(tree), "from_own_place": from_own_place}


def _names(tree: ast.Module) -> list[str]:
    """Return string constants, and paths joined from constants, that look like names of files that are read.

    A script that writes ``results/a.png`` expects the folder, of which git may keep nothing but ``results/.gitkeep``.
    """
    texts = Counter(text for node in ast.walk(tree) for text in (_constant(node), _joined(node)) if text)
    written = Counter(_written(tree))
    folders = {match[1] for text in texts if (match := _IN_FOLDER.fullmatch(text))}
    placeholders = (f"{folder}/{name}" for folder in folders for name in KEEP_EMPTY_FOLDER)
    return sorted([*placeholders, *(text for text in texts if _FILE.fullmatch(text) and texts[text] > written[text])])


def _written(tree: ast.Module) -> Iterator[str]:
    """Yield the constants in calls that write files by their names: ``frame.to_csv("a.csv")``, ``open("a", "w")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            place = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            given = (*place, *node.args, *(word.value for word in node.keywords))
            texts = [_constant(item) or _joined(item) for item in given]
            if _WRITES.fullmatch(called) or (called == "open" and any(map(_WRITING.fullmatch, texts))):
                yield from filter(None, texts)


def _constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _joined(node: ast.AST) -> str:
    """Join constant path parts.

    Returns ``configs/a.yaml`` for ``folder / "configs" / "a.yaml"`` and ``os.path.join(folder, "configs", "a.yaml")``.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left = _joined(node.left) or _constant(node.left)
        return "/".join(filter(None, (left, _constant(node.right)))) if _constant(node.right) else ""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _JOIN:
        parts = [_constant(item) for item in node.args]
        known = parts[len(parts) - next((at for at, part in enumerate(reversed(parts)) if not part), len(parts)) :]
        return "/".join(known)
    return ""
