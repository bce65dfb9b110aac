"""What a Python source imports, from its syntax tree."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["needed", "optional", "part", "named"]
"""How strictly a module is imported.

``needed``: the import must succeed. ``optional``: the code handles a failed import. ``part``: b in ``from a import b``,
which may be a module. ``named``: a string that may name a module.
"""


class Import(NamedTuple):
    """One import; ``name`` is dotted and absolute."""

    name: str
    line: int
    kind: Kind


_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+(?=:|$)")
_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
_GUARDS = (ast.Try, ast.TryStar, ast.With, ast.If)
_EMPTY = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)  # a third of the nodes
_PLATFORM = {"version_info", "platform", "implementation"}  # of sys, as in ``if sys.version_info >= (3, 12):``
_STANDARD = sys.stdlib_module_names | {"__main__"}
_RANKING: tuple[Kind, ...] = ("needed", "optional", "part", "named")


_IMPORTING = (ast.Import, ast.ImportFrom, ast.Call, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Constant)
"""Node types that ``_imports_of`` handles, out of the tens of thousands of nodes in a project's sources."""


def imports(tree: ast.Module, module: str, *, is_package: bool) -> list[Import]:
    """Return the strictest import of each module name, without the standard library and ``if TYPE_CHECKING`` blocks."""
    package = module if is_package else module.rpartition(".")[0]
    by_name: dict[str, Import] = {}
    for node, is_guarded in _nodes(tree):
        for item in _imports_of(node, package, module) if isinstance(node, _IMPORTING) else ():
            kind: Kind = "optional" if is_guarded and item.kind == "needed" else item.kind
            known = by_name.get(item.name)
            if known is None or _RANKING.index(kind) < _RANKING.index(known.kind):
                by_name[item.name] = Import(item.name, item.line, kind)
    return [item for name, item in sorted(by_name.items()) if name.partition(".")[0] not in _STANDARD]


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node that runs, with True if a failing import there is handled or platform-dependent."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, is_guarded = stack.pop()
        yield node, is_guarded
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            stack += [(item, is_guarded) for item in node.orelse]
            continue
        guards = is_guarded or (isinstance(node, _GUARDS) and _handles_failure(node))
        stack += [(item, guards) for item in ast.iter_child_nodes(node) if _may_import(item)]


def _may_import(node: ast.AST) -> bool:
    """Skip nodes without imports; a docstring may begin with a module name but doesn't import it."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    return not isinstance(node, _EMPTY)


def _imports_of(node: ast.AST, package: str, module: str) -> Iterator[Import]:
    """Yield the imports of one node of ``module``; ``package`` is its package (the module itself if it is one)."""
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
        if module == package and getattr(getattr(node.func, "value", None), "id", "") == "__all__":  # .append, .extend
            yield from _named_in(node, module)
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
    start = package if package_argument is None else _package(package_argument, package, module)
    if target := _absolute(dots + name.value, start):
        yield Import(target, node.lineno, "optional" if called == "find_spec" else "needed")


def _argument(node: ast.Call, at: int, name: str) -> ast.expr | None:
    if at < len(node.args):
        return node.args[at]
    return next((item.value for item in node.keywords if item.arg == name), None)


def _package(argument: ast.expr, package: str, module: str) -> str:
    """Return the package that a relative name starts from; '' if it is only known at run time."""
    if isinstance(argument, ast.Constant):
        return str(argument.value) if argument.value is not None else package
    return {"__package__": package, "__name__": module}.get(getattr(argument, "id", ""), "")


def _exported(node: ast.Assign | ast.AugAssign | ast.AnnAssign, package: str) -> Iterator[Import]:
    """Handle ``__all__`` of a package: ``from package import *`` imports the modules that it names."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets) and node.value is not None:
        yield from _named_in(node.value, package)


def _named_in(node: ast.expr, package: str) -> Iterator[Import]:
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
    """Return True if the code handles a failing import in the block, or checks Python's version or platform first."""
    if isinstance(node, ast.Try | ast.TryStar):
        return any(handler.type is None or _names_import_error(handler.type) for handler in node.handlers)
    if isinstance(node, ast.With):
        return any(_names_import_error(item.context_expr) for item in node.items if _is_suppress(item.context_expr))
    if isinstance(node, ast.If):
        return any(isinstance(item, ast.Attribute) and item.attr in _PLATFORM for item in ast.walk(node.test))
    return False


def _is_suppress(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) == "suppress"


def _names_import_error(expression: ast.expr) -> bool:
    return any(getattr(item, "id", getattr(item, "attr", "")) in _CAUGHT for item in ast.walk(expression))
