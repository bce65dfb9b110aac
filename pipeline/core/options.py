"""Options by convention: option NAME of a group is the module NAME of the group's package, if it defines settings.

Settings are a dataclass that derives from the group's base class, or from one of its derived ones. They are read out
of the module's source without importing the module, because a model's imports torch, which the controller never does.
So the class may use what the standard library, ``trainers.core.config``, ``pipeline.core.errors`` and its base's module
offer, and constants of its module.

Another installed package adds an option by an entry point: of the group ``paceline.models`` for what
``trainers.models`` holds, ``paceline.launchers`` for ``pipeline.cluster.launchers``, and so on. Its value is the
option's module. An option of the project goes before one of the same name.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.core.errors import UsageError, suggestion, text_of
from pipeline.core.places import HOME
from trainers.core.config import installed_options, option_names


class Options:
    """The options of one group. ``field`` is what names the choice: ``model``, ``cluster.launcher``; ``derived`` are
    classes between the group's base and the settings of options that have fields in common."""

    def __init__(self, field: str, package: str, base: type[Any], *derived: type[Any]) -> None:
        self.field, self.package, self.base, self.bases = field, package, base, (base, *derived)
        self._classes: dict[str, type[Any]] = {}

    def names(self) -> list[str]:
        """All options, sorted."""
        folder = HOME / self.package.replace(".", "/")
        return sorted({*self.installed(), *(name for base in self.bases for name in option_names(folder, base))})

    def installed(self) -> dict[str, str]:
        """The options of other installed packages: name → module."""
        return installed_options(self.package)

    def is_own(self, name: str) -> bool:
        """Whether the option is one of the project's."""
        return name.isidentifier() and self._own(name).is_file()

    def target(self, name: str) -> str:
        """The dotted name of the option's module. Raises UsageError: no such option."""
        if self.is_own(name):
            return f"{self.package}.{name}"
        try:
            return self.installed()[name]
        except KeyError:
            raise self._unknown(name) from None

    def settings(self, name: str) -> type[Any]:
        """The settings class of an option; read once in a process, as an import would be.

        Raises:
            UsageError: no such option, or its settings can't be read without the rest of its module.
        """
        if name not in self._classes:
            self._classes[name] = self._evaluated(name)
        return self._classes[name]

    def module(self, name: str) -> ModuleType:
        """The option's module, imported: for options of the controller half. Raises UsageError."""
        if self.target(name) not in sys.modules:
            self.settings(name)  # says what is wrong with it
        return import_module(self.target(name))

    def imported_settings(self, name: str) -> type[Any]:
        """The settings class of an option that was chosen before, so its module can be imported: not read twice."""
        module = import_module(self.target(name))
        values = (value for value in vars(module).values() if isinstance(value, type))
        return next(value for value in values if _is_settings(value, module.__name__, self.bases))

    def _evaluated(self, name: str) -> type[Any]:
        target = self.target(name)
        file = self._own(name) if self.is_own(name) else source_of_installed(target)
        if file is None:
            raise UsageError(f"{self.field}={name}: an installed package says that it is {target}, which isn't there")
        path = str(file.relative_to(HOME) if file.is_relative_to(HOME) else file)
        try:
            tree = _settings(file.read_bytes(), self.bases)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self.field}={name}: {path}: {error}") from error
        if tree is None:
            unknown, base = self._unknown(name), self.base.__name__
            raise UsageError(f"{unknown} ({path} has no settings: a dataclass that begins with class …({base}):)")
        return _class(tree, target, path, self.bases)

    def _own(self, name: str) -> Path:
        return HOME / self.package.replace(".", "/") / f"{name}.py"

    def _unknown(self, name: str) -> UsageError:
        return UsageError(f"{self.field}={name!r} is not an option; {suggestion(name, self.names())}")


def source_of_installed(module: str) -> Path | None:
    """The file of an installed module; neither it nor the packages around it are imported."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for part in rest:
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations) if spec else None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _settings(source: bytes, bases: tuple[type[Any], ...]) -> ast.Module | None:
    """The settings class alone, with the imports and constants that it uses; None where there is none.

    Raises:
        SyntaxError: the module can't be parsed.
        ValueError: two such classes, one that is no dataclass, or one that uses more of its module than it may.
    """
    tree = ast.parse(source)
    settings = [item for item in tree.body if isinstance(item, ast.ClassDef) and _derives(item, bases)]
    if not settings:
        return None
    if len(settings) > 1:
        raise ValueError(
            f"{settings[0].name} and {settings[1].name} are both settings; an option is a module of its own"
        )
    if not any("dataclass" in ast.unparse(item) for item in settings[0].decorator_list):
        raise ValueError(f"{settings[0].name} is no dataclass; write @dataclass(kw_only=True) above it")
    of_bases = (base.__module__ for base in bases)
    allowed = {"trainers.core.config", "pipeline.core.errors", *of_bases, *sys.stdlib_module_names}
    kept: list[ast.stmt] = []
    used = _names(settings[0])
    for item in tree.body:
        bound = used & bound_names(item)
        if not bound or item is settings[0]:
            continue
        if not _may_be_used(item, allowed):
            raise ValueError(
                f"{settings[0].name} uses {min(bound)} of line {item.lineno}; settings can use the standard library, "
                f"{', '.join(sorted(allowed - sys.stdlib_module_names))} and literals, as they are read without torch"
            )
        kept.append(item)
    return ast.Module(body=[*kept, settings[0]], type_ignores=[])


def _derives(item: ast.ClassDef, bases: tuple[type[Any], ...]) -> bool:
    return [ast.unparse(parent) for parent in item.bases] in [[base.__name__] for base in bases]


def _names(item: ast.ClassDef) -> set[str]:
    """What the class refers to, after the annotations of its functions were taken out, which nobody needs."""
    for part in ast.walk(item):
        if isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.FunctionDef):
            part.returns = None
    return {part.id for part in ast.walk(item) if isinstance(part, ast.Name)}


def bound_names(item: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a meaning to."""
    if isinstance(item, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in item.names}
    if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {item.name}
    return {part.id for part in ast.walk(item) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _may_be_used(item: ast.stmt, allowed: set[str]) -> bool:
    if isinstance(item, ast.Import):
        return all(alias.name.partition(".")[0] in allowed for alias in item.names)
    if isinstance(item, ast.ImportFrom):
        module = item.module or ""
        return not item.level and (module in allowed or module.partition(".")[0] in allowed)
    return isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None and _is_literal(item.value)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def _class(tree: ast.Module, module: str, path: str, bases: tuple[type[Any], ...]) -> type[Any]:
    """Evaluate what ``_settings`` returned, its annotations too: as texts they would be looked up in no module."""
    space: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), space)
    except Exception as error:  # whatever a class statement can raise
        raise UsageError(f"{path}: its settings can't be read: {type(error).__name__}: {text_of(error)}") from error
    (settings,) = (item for item in space.values() if isinstance(item, type) and _is_settings(item, module, bases))
    return settings


def _is_settings(item: type[Any], module: str, bases: tuple[type[Any], ...]) -> bool:
    return item.__module__ == module and not {*item.__bases__}.isdisjoint(bases)
