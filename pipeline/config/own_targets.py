"""Classes and functions of a person's own, read in their source before anything starts: nothing of them is imported.

``model.target=my_package.nets:MyNet`` names one. What can't be decided from the source (a name that is made by a
call, arguments that are passed on) is left to the hosts, which say it with file and line too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError, nearest, suggestion
from pipeline.core.options import bound_names, source_of_installed
from pipeline.keys.import_closure import source_of
from trainers.core.config import OWN, TrainConfig

_OFFERED = {
    "dataset": ("source",),
    "model": ("num_classes", "channels", "image_size"),
    "optimizer": ("lr", "weight_decay"),
    "trainer.loss": ("num_classes",),
    "dataset.augmentation": ("seeds",),
}
_ARGUMENTS = {"trainer.loss": "trainer.loss_args", "dataset.augmentation": "dataset.augmentation_args"}
_OF_A_CALL = {  # what functions are called with
    "trainer.loss": ("logits", "labels"),
    "trainer.metrics": ("logits", "labels"),
    "dataset.augmentation": ("image",),
}
_BASES = {"model": "torch.nn.Module", "optimizer": "torch.optim.Optimizer"}
_MOST_IMPORTS = 8
_Callable = ast.ClassDef | ast.FunctionDef
_Value = ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.JoinedStr


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A module, as text. ``shown`` is its path as messages name it."""

    module: str
    shown: str
    tree: ast.Module
    is_package: bool


@dataclass(frozen=True, kw_only=True)
class _Sources:
    root: Path
    behind: Sequence[str]

    def read(self, module: str) -> _Source | None:
        """None: there is no such module, or none in Python. Raises UsageError: it can't be parsed."""
        path = source_of(self.root, module, self.behind) or source_of_installed(module)
        if path is None or path.suffix != ".py":
            return None
        shown = str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError as error:
            raise UsageError(f"{shown}:{error.lineno}: {error.msg}") from error
        except ValueError as error:
            raise UsageError(f"{shown}: {error}") from error
        return _Source(module=module, shown=shown, tree=tree, is_package=path.name == "__init__.py")


def check_targets(train: TrainConfig, root: Path, behind: Sequence[str] = ()) -> None:
    """Refuse a target that isn't there, and arguments that it doesn't take.

    Args:
        root: the project.
        behind: the folders of ``cluster.env.PYTHONPATH``.

    Raises:
        UsageError: names the field, near names, and file and line.
    """
    sources = _Sources(root=root, behind=behind)
    data = {"dataset.target": getattr(train.dataset, "target", "")} if train.dataset.name == OWN else {}
    for field, target in {**data, **train.targets}.items():
        found = _target(sources, f"{field}={target}", target)
        group = field if field in _ARGUMENTS else field.rpartition(".")[0]
        if found is not None:
            _check_kind(*found, group, f"{field}={target}")
            _check_arguments(*found, group, _arguments(train, group))


def _check_kind(source: _Source, item: _Callable, group: str, said: str) -> None:
    """Refuse a class without the base that it needs, and a function where there must be a class."""
    if group not in _BASES or item.decorator_list:
        return
    if isinstance(item, ast.ClassDef):
        what = None if item.bases or item.keywords else "a class without a base"
    else:
        what = "a function" if group == "optimizer" else None
    if what is not None:
        where = f"{item.name} ({source.shown}:{item.lineno})"
        raise UsageError(f"{said}: {where} is {what}", hint=f"class {item.name}({_BASES[group]}): …")


def check_step(said: str, target: str, given: Mapping[str, Any], root: Path) -> None:
    """Refuse a step's function that isn't there, or can't be called as steps are.

    Args:
        said: begins messages: ``step.clean``.
        given: its arguments besides ``inputs`` and ``out``.

    Raises:
        UsageError: names the field, near names, and file and line.
    """
    name = target.partition(":")[2]
    found = _target(_Sources(root=root, behind=()), f"{said}.function={target}", target)
    made = _signature(found[0].tree, found[1]) if found is not None else None
    if found is None or made is None:
        return
    for word in ("inputs", "out"):
        if word not in made.names and not made.takes_any:
            where = f"{name} ({found[0].shown}:{found[1].lineno})"
            raise UsageError(
                f"{said}: {where} has no argument {word}, which every step gets", hint=f"def {name}(inputs, out)"
            )
    _check_arguments(*found, said, {**given, "inputs": (), "out": ""})


def _target(sources: _Sources, said: str, target: str) -> tuple[_Source, _Callable] | None:
    """Where a target is defined; None: it can't be told. Raises UsageError: it isn't there, or can't be one."""
    module, _, name = target.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(
            f"{said}: {module} is a module of Python's own, and none of its classes or functions is made for this",
            hint=f"{said.partition('=')[0]}=my_package.my_module:NAME, a class or function of yours or of a package",
        )
    source = sources.read(module)
    if source is None:
        raise _missing(sources.root, said, module)
    return _find(sources, source, name, said)


def _missing(root: Path, said: str, module: str) -> UsageError:
    path = root / f"{module.replace('.', '/')}.py"
    folder = path.parent if path.parent.is_dir() else root
    package = module.rpartition(".")[0] if folder != root else ""
    close = nearest(path.stem if package else module.partition(".")[0], sorted(_modules(folder)))
    near = f"; did you mean {'.'.join(filter(None, (package, close)))}?" if close else ""
    return UsageError(
        f"{said}: there is no module {module} under {root}, nor is it installed here{near}", hint=f"write {path}"
    )


def _modules(folder: Path) -> Iterator[str]:
    """The modules and packages of a folder."""
    for path in folder.iterdir():
        if path.suffix == ".py" or (path.is_dir() and next(path.glob("*.py"), None) is not None):
            yield path.stem


def _arguments(train: TrainConfig, group: str) -> Mapping[str, Any]:
    if group == "trainer.metrics":
        return {}
    section, _, name = _ARGUMENTS.get(group, f"{group}.args").partition(".")
    arguments: Mapping[str, Any] = getattr(getattr(train, section), name)
    return arguments


def _find(sources: _Sources, source: _Source, name: str, said: str) -> tuple[_Source, _Callable] | None:
    """Where a class or function is defined; None: it can't be told. Raises UsageError: its module has no such name."""
    for _ in range(_MOST_IMPORTS):
        item = _definition(source.tree, name)
        if isinstance(item, _Callable):
            return source, item
        if item is None:
            if any(isinstance(part, ast.ImportFrom) and part.names[0].name == "*" for part in source.tree.body):
                return None
            raise UsageError(f"{said}: {source.shown} has no class or function {name}; {_near(source, name)}")
        if not isinstance(item, ast.ImportFrom):
            if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(item.value, _Value):
                what = f"{name} ({source.shown}:{item.lineno}) is {ast.unparse(item.value)[:40]}"
                raise _no_callable(said, what, source, name)
            if isinstance(item, ast.Import):
                raise _no_callable(said, f"{name} ({source.shown}:{item.lineno}) is a module", source, name)
            return None
        alias = next(alias for alias in item.names if name in (alias.asname, alias.name))
        package = _imported(source, item)
        followed = sources.read(package)
        if (followed is None or _definition(followed.tree, alias.name) is None) and (
            sources.read(f"{package}.{alias.name}") is not None
        ):
            raise _no_callable(said, f"{name} ({source.shown}:{item.lineno}) is a module", source, name)
        if followed is None:
            return None
        source, name = followed, alias.name
    return None


def _no_callable(said: str, what: str, source: _Source, name: str) -> UsageError:
    return UsageError(f"{said}: {what}, and no class or function; {_near(source, name)}")


def _definition(tree: ast.Module, name: str) -> ast.stmt | None:
    """The last statement of a module, or of its conditions, that gives the name a meaning."""
    return next((item for item in reversed([*_statements(tree.body)]) if name in bound_names(item)), None)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for item in body:
        if isinstance(item, ast.If | ast.Try):
            handlers = [item.body, *(part.body for part in getattr(item, "handlers", ())), item.orelse]
            for part in handlers:
                yield from _statements(part)
        else:
            yield item


def _imported(source: _Source, item: ast.ImportFrom) -> str:
    if not item.level:
        return item.module or ""
    parts = source.module.split(".")
    parts = parts[: len(parts) - item.level + source.is_package]
    return ".".join([*parts, *([item.module] if item.module else [])])


def _near(source: _Source, name: str) -> str:
    lines = {
        alias.asname or alias.name: item.lineno
        for item in source.tree.body
        if isinstance(item, ast.ImportFrom)
        for alias in item.names
    } | {item.name: item.lineno for item in source.tree.body if isinstance(item, _Callable)}
    close = nearest(name, sorted(lines))
    if close:
        return f"did you mean {close} ({source.shown}:{lines[close]})?"
    return f"it has: {', '.join(lines) or 'none'}"


def _check_arguments(source: _Source, item: _Callable, group: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a class or function doesn't take, and one that it needs and doesn't get."""
    made = _signature(source.tree, item)
    if made is None:
        return
    where = f"{item.name} ({source.shown}:{item.lineno})"
    field = _ARGUMENTS.get(group, f"{group}.args")
    told = _OF_A_CALL.get(group, ()) if isinstance(item, ast.FunctionDef) else ()
    if made.positional is not None and made.positional < len(told):
        takes = f"takes {made.positional or 'no'} argument{'' if made.positional == 1 else 's'} by place"
        raise UsageError(f"{where} {takes}; {group} is called with {' and '.join(told)}")
    names = made.names[1 if group == "optimizer" else len(told) :]
    for name in given:
        if name not in names and not made.takes_any:
            raise UsageError(f"{field}.{name} is no argument of {where}; {suggestion(name, names)}")
    for name in names:
        if name in made.needed and name not in given and name not in _OFFERED.get(group, ()):
            if group == "trainer.metrics":
                raise UsageError(f"{where} needs {name}; a metric gets logits and labels alone")
            raise UsageError(f"{where} needs {name}, which has no default", hint=f"{field}.{name}=VALUE")


@dataclass(frozen=True, kw_only=True)
class _Signature:
    """``names`` can be given, ``needed`` must be; ``takes_any``: others too. ``positional``: how many can be given by
    place, None: any number."""

    names: list[str]
    positional: int | None
    needed: set[str]
    takes_any: bool


def _signature(tree: ast.Module, item: _Callable) -> _Signature | None:
    """None: only running it would tell (a class whose base is elsewhere, a decorator)."""
    if item.decorator_list:
        return None
    if isinstance(item, ast.FunctionDef):
        return _of_function(item, first=0)
    made = next((part for part in item.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if made is not None:
        return None if made.decorator_list else _of_function(made, first=1)  # without self
    base = _definition(tree, item.bases[0].id) if len(item.bases) == 1 and isinstance(item.bases[0], ast.Name) else None
    return _signature(tree, base) if isinstance(base, ast.ClassDef) and base is not item else None


def _of_function(function: ast.FunctionDef, *, first: int) -> _Signature:
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    needed = {*positional[: len(positional) - len(args.defaults)]} | {arg.arg for arg, value in named if value is None}
    names = [*positional[first:], *(arg.arg for arg in args.kwonlyargs)]
    by_place = None if args.vararg is not None else len(positional) - first
    return _Signature(names=names, positional=by_place, needed=needed, takes_any=args.kwarg is not None)
