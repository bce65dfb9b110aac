"""Which files of the node half a run imports: the part of the content key that follows the code.

Read statically from the syntax tree, so nothing of torch is imported. A registry (a dict literal of
name → "package.module") counts only the entry whose name the configuration chose; any other string that
names a module of the package counts as an import of it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


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
    waiting, seen, external = [module], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        path = _file_of(root, name)
        if path is None or name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:depth]) for depth in range(1, len(parts))]  # parent packages run first
        for imported in _imports((root / path).read_bytes(), name, path, package, chosen):
            if imported.partition(".")[0] == package:
                waiting.append(imported)
            else:
                external.add(imported.partition(".")[0])
    files = sorted(path for name in seen if (path := _file_of(root, name)) is not None)
    return Closure(files=tuple(files), third_party=tuple(sorted(external - set(sys.stdlib_module_names))))


def _file_of(root: Path, module: str) -> Path | None:
    base = Path(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if (root / path).is_file():
            return path
    return None


def _imports(source: bytes, name: str, path: Path, package: str, chosen: Collection[str]) -> Iterator[str]:
    """Dotted names that one module imports; for ``from a import b`` both a and a.b (b may be a module)."""
    tree = ast.parse(source, filename=str(path))
    names_modules = f"{package}.".encode() in source.replace(f"from {package}.".encode(), b"")
    skipped: set[int] = set()  # a dict comes before its values in this order
    for node in ast.walk(tree) if names_modules else _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name, path.name == "__init__.py")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Dict):
            skipped.update(map(id, _unchosen(node, package, chosen)))
        elif isinstance(node, ast.Constant) and id(node) not in skipped and _names_module(node, package):
            yield str(node.value).partition(":")[0]


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


def _unchosen(node: ast.Dict, package: str, chosen: Collection[str]) -> Iterator[ast.expr]:
    """Values of a registry dict whose key the configuration did not choose."""
    for key, value in zip(node.keys, node.values, strict=True):
        is_entry = isinstance(value, ast.Constant) and _names_module(value, package)
        if is_entry and isinstance(key, ast.Constant) and key.value not in chosen:
            yield value


def _names_module(node: ast.Constant, package: str) -> bool:
    return isinstance(node.value, str) and node.value.startswith(f"{package}.") and " " not in node.value
