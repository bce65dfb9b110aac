"""What counts of a Python source in a key, what it imports, and which files it names; parse results are cached.

A cached result stays valid as long as the source, this code and Python are the same.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
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
from pipeline.keys import source_imports
from pipeline.keys.source_imports import Import, imports

_MOST = 256  # cached sources, or twice the number of the latest walk if that is more; a run needs about thirty


class SourceReading(NamedTuple):
    """The parse result of one source.

    ``names`` are string constants that may name files; ``files`` are the same, for a source that locates files
    relative to itself.
    """

    digest: str
    imports: tuple[Import, ...]
    files: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> SourceReading:
        """Return the reading that ``_read`` has made an entry of the cache of."""
        return cls(
            digest=entry["digest"],
            imports=tuple(
                Import(name, line, kind) for kind, lines in entry["imports"].items() for name, line in lines.items()
            ),
            files=tuple(entry["names"] if entry["from_own_place"] else ()),
            names=tuple(entry["names"]),
        )


class Readings:
    """The parse results of a project's sources."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cache = Cache(root, "imports", most=_MOST)
        self._new: dict[str, Any] = {}
        self._count = 0

    def of(self, path: str, source: bytes, shown: str = "") -> SourceReading:
        """Parse the module at ``path`` (relative to its import folder), or return the cached result.

        A compiled module counts by its bytes. ``shown`` is the path in the snapshot, if different. Raises UsageError.
        """
        content = sha256_bytes(source)
        if not path.endswith(".py"):
            return SourceReading(digest=content, imports=())
        name = sha256_text(f"{self._parser} {path} {content}")
        entry = self._cache.get(name)
        self._count += 1
        if entry is None:
            entry = self._new[name] = _read(source, path, shown or path)
        return SourceReading.of_json(entry)

    def keep(self) -> None:
        """Write new entries to the cache."""
        if self._new:
            Cache(self._root, "imports", most=max(_MOST, 2 * self._count)).keep(self._new)

    @cached_property
    def _parser(self) -> str:
        """What a result depends on besides the source: this code and Python."""
        code = (__file__, str(source_imports.__file__))
        return f"{' '.join(sha256_file(Path(file)) for file in code)} {sys.version}"


def _read(source: bytes, path: str, shown: str) -> dict[str, Any]:
    """Parse a source. Return the fields of its ``SourceReading`` as JSON, the imports as kind → name → line."""
    try:
        tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{shown}{line} can't be parsed: {why}", hint="fix the file, then the same command") from error
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines_by_kind: dict[str, dict[str, int]] = {}
    for item in imports(tree, module, is_package=path.endswith("/__init__.py")):
        lines_by_kind.setdefault(item.kind, {})[item.name] = item.line
    return {
        "digest": digest(tree, source),
        "imports": lines_by_kind,
        "names": _names(tree),
        "from_own_place": _OWN_PLACE.search(source) is not None,
    }


# ------------------------------------------------------------------------------- files that a source names
_OWN_PLACE = re.compile(rb"\b(__file__|resources|get_data)\b")
_JOIN = ("join", "joinpath", "Path", "PurePath")
_FILE = re.compile(r"[\w@+ -][\w./@+ -]{0,200}\.\w{1,12}")
_WRITES = re.compile(
    r"to_(?!device|tensor)\w+|save\w*|dump|write\w*|(Rotating)?FileHandler|mkdir|makedirs|remove|unlink"
)
_WRITING = re.compile(r"[wax][bt+]{0,2}")  # modes of open
_IN_FOLDER = re.compile(r"([\w@+-][\w./@+ -]{0,200})/[^/]*")
KEEP_EMPTY_FOLDER = (".gitignore", ".gitkeep", ".keep")  # files with which a repository has a folder without others


def _names(tree: ast.Module) -> list[str]:
    """Return string constants, and paths joined from constants, that look like names of files that are read.

    A name counts as read if it occurs more often than in calls that write. A script that writes ``results/a.png``
    expects the folder, of which git may keep nothing but ``results/.gitkeep``.
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
            subject = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            arguments = (*subject, *node.args, *(keyword.value for keyword in node.keywords))
            texts = [_constant(item) or _joined(item) for item in arguments]
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
        constant_end = [*itertools.takewhile(bool, reversed(parts))]
        return "/".join(reversed(constant_end))
    return ""


# ------------------------------------------------------------------------------- the digest of a source
_TYPES = re.compile(rb"# type:(?! ?ignore).*")  # comments that torch.jit reads
_LEFT_OUT = frozenset({"ctx", "kind", "type_ignores", "type_comment"})  # implied by the position, or without meaning


def digest(tree: ast.Module, source: bytes) -> str:
    """Return a hex digest that doesn't change when a formatter rewrites ``source``, whose tree is ``tree``."""
    hashed = hashlib.sha256("\n".join(_tokens(tree)).encode())
    for comment in _TYPES.findall(source):
        hashed.update(b"\n" + comment.rstrip())
    return hashed.hexdigest()


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Flatten the tree, depth first.

    Uses an explicit stack, because a sum of a thousand terms is nested a thousand levels deep.
    """
    stack: list[object] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, _Text):
            yield item
        elif isinstance(item, ast.AST):
            yield f"{type(item).__name__}("
            stack.append(_Text(")"))
            for name, value in reversed(_fields(item)):
                stack += (value, _Text(name))
        elif isinstance(item, list):
            yield "["
            stack.append(_Text("]"))
            stack += reversed(item)
        else:  # hex, because Python limits the length of decimal integers
            yield f"{type(item).__name__} {hex(item) if type(item) is int else ascii(item)}"


class _Text(str):
    """A finished token on the stack, as opposed to a value that still has to be flattened."""

    __slots__ = ()


def _fields(node: ast.AST) -> list[tuple[str, object]]:
    """Return the non-empty fields of a node: which empty fields exist depends on the Python version."""
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "targets" and isinstance(node, ast.Delete):
            value = _spread(node.targets)
        if value is not None and value != [] and name not in _LEFT_OUT:
            fields.append((name, value))
    return fields


def _spread(targets: list[ast.expr]) -> list[ast.expr]:
    """Treat ``del (a, b)`` as ``del a, b``, which formatters produce."""
    only = targets[0] if len(targets) == 1 else None
    return list(only.elts) if isinstance(only, ast.Tuple) else targets
