"""A Python source by what it does: a digest of its syntax tree without comments, docstrings and layout.

``ast.dump`` is not used, since what it prints changes from one Python to the next. Where the code can see its own
text (``__doc__``, ``inspect.getsource``), the text counts: ``sight`` says how far it sees. Line numbers never count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from typing import Literal

Sight = Literal["none", "own", "all"]

_ALL = frozenset({
    "__doc__", "getdoc", "getcomments", "getsource", "getsourcelines", "findsource", "get_source", "get_data",
    "linecache", "tokenize", "doctest", "pydoc",
    "jit",  # torch.jit reads sources, and types from comments
})  # fmt: skip
_NAMING = (ast.Name, ast.Attribute, ast.alias, ast.ImportFrom, ast.Constant)
_LEFT_OUT = frozenset({"ctx", "kind", "type_ignores", "type_comment"})  # given by the place, or no part of the meaning


def digest(tree: ast.Module) -> str:
    """Hex digest, equal for two trees of which a formatter makes the other."""
    return hashlib.sha256("\n".join(_tokens(tree)).encode()).hexdigest()


def sight(tree: ast.Module) -> Sight:
    """What text of sources the code can read: none, that of its own file, or that of others too."""
    found: Sight = "none"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "__doc__":  # of the very module
            found = "own"
        elif not _ALL.isdisjoint(_names(node)):
            return "all"
    return found


def _names(node: ast.AST) -> tuple[str, ...]:
    if not isinstance(node, _NAMING):  # most nodes
        return ()
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.alias):
        return tuple(node.name.split("."))
    if isinstance(node, ast.ImportFrom):
        return tuple((node.module or "").split("."))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(value, "__doc__")
        return (node.value,)
    return ()


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Depth first. With a stack of its own: a sum of a thousand terms is a thousand levels deep."""
    waiting: list[object] = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Text):
            yield item
        elif isinstance(item, ast.AST):
            yield f"{type(item).__name__}("
            waiting.append(_Text(")"))
            for name, value in reversed(_fields(item)):
                waiting += (value, _Text(name))
        elif isinstance(item, list):
            yield "["
            waiting.append(_Text("]"))
            waiting += reversed(item)
        else:  # hex: what a decimal integer may be long is limited
            yield f"{type(item).__name__} {hex(item) if type(item) is int else ascii(item)}"


class _Text(str):
    """A token that is ready, among values that are not."""

    __slots__ = ()


def _fields(node: ast.AST) -> list[tuple[str, object]]:
    """What is set of a node: empty fields differ from Python to Python."""
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            value = [item for item in value if not _is_text(item)]
        if name == "targets" and isinstance(node, ast.Delete):
            value = _spread(node.targets)
        if value is not None and value != [] and name not in _LEFT_OUT:
            fields.append((name, value))
    return fields


def _is_text(item: object) -> bool:
    """A docstring, or a string that stands alone elsewhere, such as below an attribute: Python drops it."""
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)


def _spread(targets: list[ast.expr]) -> list[ast.expr]:
    """``del (a, b)``, which formatters write as ``del a, b``."""
    only = targets[0] if len(targets) == 1 else None
    return list(only.elts) if isinstance(only, ast.Tuple) else targets
