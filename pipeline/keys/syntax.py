"""A Python source by what it does: a digest of its syntax tree, without comments, layout and line numbers.

Docstrings count: libraries read them (pydantic's descriptions, argparse), and nobody can tell from a source whether one
does. Of the comments those with types count, which torch.jit reads. ``ast.dump`` is not used, since what it prints
changes from one Python to the next.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator

_TYPES = re.compile(rb"# type:(?! ?ignore).*")
_LEFT_OUT = frozenset({"ctx", "kind", "type_ignores", "type_comment"})  # given by the place, or no part of the meaning


def digest(tree: ast.Module, source: bytes) -> str:
    """Hex digest, equal for two sources of which a formatter makes the other. ``tree`` is that of ``source``."""
    found = hashlib.sha256("\n".join(_tokens(tree)).encode())
    for comment in _TYPES.findall(source):
        found.update(b"\n" + comment.rstrip())
    return found.hexdigest()


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
        if name == "targets" and isinstance(node, ast.Delete):
            value = _spread(node.targets)
        if value is not None and value != [] and name not in _LEFT_OUT:
            fields.append((name, value))
    return fields


def _spread(targets: list[ast.expr]) -> list[ast.expr]:
    """``del (a, b)``, which formatters write as ``del a, b``."""
    only = targets[0] if len(targets) == 1 else None
    return list(only.elts) if isinstance(only, ast.Tuple) else targets
