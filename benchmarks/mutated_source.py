"""A Python source with one place changed: an operator, a number, a condition, a statement."""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping


# ---------------------------------------------------------------------------------------------- code
class _Mutator(ast.NodeTransformer):
    """Changes the ``wanted``-th place that can be changed."""

    OPERATORS: Mapping[type, type] = {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
        ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
        ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.FloorDiv: ast.Mult,
    }  # fmt: skip

    def __init__(self, wanted: int) -> None:
        self.wanted, self.seen, self.what = wanted, 0, ""

    def _mine(self, what: str, node: ast.AST) -> bool:
        self.seen += 1
        if self.seen - 1 != self.wanted:
            return False
        self.what = f"{what} in line {getattr(node, 'lineno', '?')}"
        return True

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value is None or node.value is Ellipsis:
            return node
        if isinstance(node.value, bool) and self._mine("flag", node):
            return ast.Constant(not node.value)
        if isinstance(node.value, (int, float)) and not isinstance(node.value, bool) and self._mine("number", node):
            return ast.Constant(node.value + 1)
        if isinstance(node.value, str) and self._mine("text", node):
            return ast.Constant(node.value + "x")
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) in self.OPERATORS and self._mine("operator", node):
            node.op = self.OPERATORS[type(node.op)]()
            return node
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._mine("and/or", node):
            node.op = self.OPERATORS[type(node.op)]()
            return node
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if type(node.ops[0]) in self.OPERATORS and self._mine("comparison", node):
            node.ops[0] = self.OPERATORS[type(node.ops[0])]()
            return node
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._mine("condition", node):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if self._mine("statement left out", node):
            return ast.Pass()
        return self.generic_visit(node)


def mutated(source: str, chance: random.Random) -> tuple[str, str]:
    """The source with one place changed, and which."""
    count = _Mutator(-1)
    count.visit(ast.parse(source))
    if not count.seen:
        return source, ""
    mutator = _Mutator(chance.randrange(count.seen))
    tree = ast.fix_missing_locations(mutator.visit(ast.parse(source)))
    return ast.unparse(tree), mutator.what
