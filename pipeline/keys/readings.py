"""What a Python source contains: the digest that counts in a key, its imports, and names of files. Read from its syntax
tree, without importing it, for ``import_closure``, and cached by content."""

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
from typing import Any, Literal, NamedTuple

from pipeline.core.cache import Cache
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_bytes, sha256_file, sha256_text

_MOST_CACHED = 256  # sources, or twice the number of the latest walk if that is more; a run needs about thirty


class SourceReading(NamedTuple):
    """The parse result of one source."""

    digest: str
    imports: tuple[Import, ...]
    files: tuple[str, ...] = ()  # ``names`` if the source opens files beside itself, else empty
    names: tuple[str, ...] = ()  # string constants that may name files

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> SourceReading:
        """Return the reading from its cache entry, the result of ``_parse``."""
        return cls(
            digest=entry["digest"],
            imports=tuple(
                Import(name, line, kind) for kind, lines in entry["imports"].items() for name, line in lines.items()
            ),
            files=tuple(entry["names"] if entry["from_own_folder"] else ()),
            names=tuple(entry["names"]),
        )


class Readings:
    """The parse results of a project's sources."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cache = Cache(root, "imports", most=_MOST_CACHED)
        self._new: dict[str, Any] = {}  # cache entries that this process has added
        self._count = 0

    def of(self, path: str, source: bytes, shown: str = "") -> SourceReading:
        """Parse the module at ``path`` (relative to its import folder), or return the cached result. A compiled module
        counts by its bytes. ``shown`` is the path in the snapshot, if different. Raises UsageError."""
        content = sha256_bytes(source)
        if not path.endswith(".py"):
            return SourceReading(digest=content, imports=())
        name = sha256_text(f"{self._parser} {path} {content}")
        entry = self._cache.get(name)
        self._count += 1
        if entry is None:
            entry = self._new[name] = _parse(source, path, shown or path)
        return SourceReading.of_json(entry)

    def keep(self) -> None:
        """Write new entries to the cache."""
        if self._new:
            Cache(self._root, "imports", most=max(_MOST_CACHED, 2 * self._count)).keep(self._new)

    @cached_property
    def _parser(self) -> str:
        """The version of the parser: cache entries of another one don't count."""
        return f"{sha256_file(Path(__file__))} {sys.version}"


def _parse(source: bytes, path: str, shown: str) -> dict[str, Any]:
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
        "names": _file_names(tree),
        "from_own_folder": _OWN_FOLDER.search(source) is not None,
    }


# ------------------------------------------------------------------------------- files that a source names
_OWN_FOLDER = re.compile(rb"\b(__file__|resources|get_data)\b")  # a source with one of these opens files beside itself
_JOINING_CALLS = ("join", "joinpath", "Path", "PurePath")
_FILE_NAME = re.compile(r"[\w@+ -][\w./@+ -]{0,200}\.\w{1,12}")
_WRITING_CALL = re.compile(
    r"to_(?!device|tensor)\w+|save\w*|dump|write\w*|(Rotating)?FileHandler|mkdir|makedirs|remove|unlink"
)
_WRITING_MODE = re.compile(r"[wax][bt+]{0,2}")  # modes of open
_IN_FOLDER = re.compile(r"([\w@+-][\w./@+ -]{0,200})/[^/]*")
KEEP_EMPTY_FOLDER = (".gitignore", ".gitkeep", ".keep")  # a repository has an empty folder by such a file in it


def _file_names(tree: ast.Module) -> list[str]:
    """Return string constants, and paths joined from constants, that look like names of files that are read."""
    uses = Counter(text for node in ast.walk(tree) for text in (_constant_text(node), _joined_path(node)) if text)
    # a name that only stands in calls which write isn't read
    written = Counter(_written_names(tree))
    read = [text for text in uses if _FILE_NAME.fullmatch(text) and uses[text] > written[text]]
    # a script that writes results/a.png expects the folder, of which git may keep nothing but results/.gitkeep
    folders = {match[1] for text in uses if (match := _IN_FOLDER.fullmatch(text))}
    return sorted([*(f"{folder}/{name}" for folder in folders for name in KEEP_EMPTY_FOLDER), *read])


def _written_names(tree: ast.Module) -> Iterator[str]:
    """Yield the constants in calls that write: ``path.write_text(…)``, ``open(name, "w")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            subject = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            arguments = (*subject, *node.args, *(keyword.value for keyword in node.keywords))
            texts = [_constant_text(item) or _joined_path(item) for item in arguments]
            if _WRITING_CALL.fullmatch(called) or (called == "open" and any(map(_WRITING_MODE.fullmatch, texts))):
                yield from filter(None, texts)


def _constant_text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _joined_path(node: ast.AST) -> str:
    """Join constant path parts: ``configs/a.yaml`` for ``folder / "configs" / "a.yaml"`` and for ``os.path.join``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left = _joined_path(node.left) or _constant_text(node.left)
        return "/".join(filter(None, (left, _constant_text(node.right)))) if _constant_text(node.right) else ""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _JOINING_CALLS:
        parts = [_constant_text(item) for item in node.args]
        constant_end = [*itertools.takewhile(bool, reversed(parts))]  # join(root, "a", "b.txt") has a/b.txt
        return "/".join(reversed(constant_end))
    return ""


# ------------------------------------------------------------------------------- the digest of a source
_TYPE_COMMENT = re.compile(rb"# type:(?! ?ignore).*")  # torch.jit reads these comments, so they count
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_ignores", "type_comment"})  # follow from others, or mean nothing


def digest(tree: ast.Module, source: bytes) -> str:
    """Return the sha256 of a source by its tree: comments and formatting don't change it."""
    hashed = hashlib.sha256("\n".join(_tokens(tree)).encode())
    for comment in _TYPE_COMMENT.findall(source):
        hashed.update(b"\n" + comment.rstrip())
    return hashed.hexdigest()


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Flatten the tree, depth first."""
    # no recursion: a sum of a thousand terms is as many levels deep
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
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "targets" and isinstance(node, ast.Delete):
            value = _unpacked_targets(node.targets)
        if value is not None and value != [] and name not in _IGNORED_FIELDS:
            fields.append((name, value))
    return fields


def _unpacked_targets(targets: list[ast.expr]) -> list[ast.expr]:
    """Treat ``del (a, b)`` as ``del a, b``, which formatters produce."""
    only = targets[0] if len(targets) == 1 else None
    return list(only.elts) if isinstance(only, ast.Tuple) else targets


# ------------------------------------------------------------------------------- the imports of a source
Kind = Literal["needed", "optional", "part", "named"]
"""How strictly a module is imported, the strictest first.

``needed``: the import must succeed. ``optional``: the code handles a failed import. ``part``: b in ``from a import b``,
which may be a module. ``named``: a string that may name a module.
"""


class Import(NamedTuple):
    """One import; ``name`` is dotted and absolute."""

    name: str
    line: int
    kind: Kind


_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+(?=:|$)")  # my_package.nets, also in "my_package.nets:MyNet"
_CAUGHT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_GUARDS = (ast.Try, ast.TryStar, ast.With, ast.If)
_NODES_WITHOUT_IMPORTS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # a third of all nodes
_PLATFORM_ATTRIBUTES = {"version_info", "platform", "implementation"}  # of sys: ``if sys.version_info >= (3, 12):``
_STANDARD_MODULES = sys.stdlib_module_names | {"__main__"}
_RANKING: tuple[Kind, ...] = ("needed", "optional", "part", "named")
_IMPORTING = (ast.Import, ast.ImportFrom, ast.Call, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Constant)
"""The types of nodes that ``_imports_of`` handles, a few of the tens of thousands of nodes in a project's sources."""


def imports(tree: ast.Module, module: str, *, is_package: bool) -> list[Import]:
    """Return the strictest import of each module name, without the standard library and ``if TYPE_CHECKING`` blocks."""
    package = module if is_package else module.rpartition(".")[0]
    by_name: dict[str, Import] = {}
    for node, is_guarded in _nodes(tree):
        for item in _imports_of(node, package, module) if isinstance(node, _IMPORTING) else ():
            kind: Kind = "optional" if is_guarded and item.kind == "needed" else item.kind
            before = by_name.get(item.name)
            if before is None or _RANKING.index(kind) < _RANKING.index(before.kind):
                by_name[item.name] = Import(item.name, item.line, kind)
    return [item for name, item in sorted(by_name.items()) if name.partition(".")[0] not in _STANDARD_MODULES]


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield (node, is guarded) for every node that runs; guarded: a failing import is handled, or for one platform."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_guarded = stack.pop()
        yield node, is_guarded
        if isinstance(node, ast.If) and _is_type_checking(node.test):  # only its else branch runs
            stack += [(item, is_guarded) for item in node.orelse]
            continue
        guards = is_guarded or (isinstance(node, _GUARDS) and _handles_failure(node))
        stack += [(item, guards) for item in ast.iter_child_nodes(node) if _may_import(item)]


def _may_import(node: ast.AST) -> bool:
    """Return False for nodes without imports, such as docstrings, which may begin with the name of a module."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    return not isinstance(node, _NODES_WITHOUT_IMPORTS)


def _imports_of(node: ast.AST, package: str, module: str) -> Iterator[Import]:
    """Yield the imports of one node of ``module``; ``package``: the package from which its relative imports start."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, "needed") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        if base:
            yield Import(base, node.lineno, "needed")
            yield from (
                Import(f"{base}.{alias.name}", node.lineno, "part") for alias in node.names if alias.name != "*"
            )
    elif isinstance(node, ast.Call):
        yield from _imports_of_call(node, package, module)
        # __all__.append(…), __all__.extend(…) in a package: `from package import *` imports what it lists
        if module == package and getattr(getattr(node.func, "value", None), "id", "") == "__all__":
            yield from _exported_names(node, module)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and module == package:
        yield from _exported(node, module)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (text := _DOTTED.match(node.value)):
        yield Import(text.group(), node.lineno, "named")


def _imports_of_call(node: ast.Call, package: str, module: str) -> Iterator[Import]:
    """Handle ``import_module("name")``, ``__import__("name")`` and ``find_spec("name")``, which counts as optional."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    name = _argument(node, 0, "name")
    if called not in ("import_module", "__import__", "find_spec") or not isinstance(name, ast.Constant):
        return
    if not isinstance(name.value, str):
        return
    package_argument = _argument(node, 1, "package") if called != "__import__" else None
    level = _argument(node, 4, "level") if called == "__import__" else None
    dots = "." * level.value if isinstance(level, ast.Constant) and isinstance(level.value, int) else ""
    start = package if package_argument is None else _start_of_relative_name(package_argument, package, module)
    if target := _absolute(dots + name.value, start):
        yield Import(target, node.lineno, "optional" if called == "find_spec" else "needed")


def _argument(node: ast.Call, position: int, name: str) -> ast.expr | None:
    if position < len(node.args):
        return node.args[position]
    return next((item.value for item in node.keywords if item.arg == name), None)


def _start_of_relative_name(argument: ast.expr, package: str, module: str) -> str:
    """Return the package that ``argument`` names in ``import_module(name, argument)``; '': only known at run time."""
    if isinstance(argument, ast.Constant):
        return str(argument.value) if argument.value is not None else package
    return {"__package__": package, "__name__": module}.get(getattr(argument, "id", ""), "")


def _exported(node: ast.Assign | ast.AugAssign | ast.AnnAssign, package: str) -> Iterator[Import]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets) and node.value is not None:
        yield from _exported_names(node.value, package)


def _exported_names(node: ast.expr, package: str) -> Iterator[Import]:
    for item in ast.walk(node):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield Import(f"{package}.{item.value}", item.lineno, "part")


def _absolute(name: str, package: str) -> str:
    """Resolve a relative name: ``..a`` in package x.y is x.a; '' if the name leaves the top-level package."""
    relative = name.lstrip(".")
    level = len(name) - len(relative)
    if not level:
        return name
    parts = package.split(".") if package else []
    if level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([relative] if relative else [])])


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _handles_failure(node: ast.AST) -> bool:
    if isinstance(node, ast.Try | ast.TryStar):
        return any(handler.type is None or _names_import_error(handler.type) for handler in node.handlers)
    if isinstance(node, ast.With):
        return any(_names_import_error(item.context_expr) for item in node.items if _is_suppress(item.context_expr))
    if isinstance(node, ast.If):
        attributes = (item for item in ast.walk(node.test) if isinstance(item, ast.Attribute))
        return any(attribute.attr in _PLATFORM_ATTRIBUTES for attribute in attributes)
    return False


def _is_suppress(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) == "suppress"


def _names_import_error(expression: ast.expr) -> bool:
    return any(getattr(item, "id", getattr(item, "attr", "")) in _CAUGHT_ERRORS for item in ast.walk(expression))
