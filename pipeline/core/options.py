"""Find the options of a configuration group (models, launchers, samplers, …) and read their settings classes.

By convention the option NAME of a group is the module NAME in the group's package, and this module defines one settings
class: ``model=resnet18`` is trainers/models/resnet18.py. Other installed packages add options by entry points
(``paceline.models`` for ``trainers.models``); of two options with one name the project's own is taken.
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
from pipeline.core.places import HOME, shown
from trainers.core.config import installed_options, option_names


class Options:
    """The options of one group: modules of ``package``, of which the configuration field ``field`` names one.

    A settings class derives from ``base`` or one of the ``derived`` classes. As a model's module imports torch, the
    controller doesn't import it, but executes only the settings class out of its source. So this class may use only
    the standard library, ``trainers.core.config``, ``pipeline.core.errors``, the module of its base, and constants of
    its own module.
    """

    def __init__(self, field: str, package: str, base: type[Any], *derived: type[Any]) -> None:
        self.field, self.package, self.base, self.bases = field, package, base, (base, *derived)
        self._classes: dict[str, type[Any]] = {}

    def names(self) -> list[str]:
        """Return all options, sorted."""
        folder = HOME / self.package.replace(".", "/")
        return sorted({*self.installed(), *(name for base in self.bases for name in option_names(folder, base))})

    def installed(self) -> dict[str, str]:
        """Return the options of other installed packages: name → module."""
        return installed_options(self.package)

    def is_own(self, name: str) -> bool:
        """Return True if the option belongs to the project, not to another installed package."""
        return name.isidentifier() and self._own_file(name).is_file()

    def target(self, name: str) -> str:
        """Return the dotted name of the option's module. Raises UsageError: no such option."""
        if self.is_own(name):
            return f"{self.package}.{name}"
        try:
            return self.installed()[name]
        except KeyError:
            raise self._unknown(name) from None

    def settings(self, name: str) -> type[Any]:
        """Return an option's settings class. Raises UsageError: no such option, or its settings can't be read."""
        if name not in self._classes:
            self._classes[name] = self._read_settings(name)
        return self._classes[name]

    def module(self, name: str) -> ModuleType:
        """Import the option's module, for options of the controller half. Raises UsageError."""
        if self.target(name) not in sys.modules:
            self.settings(name)  # reports invalid settings with a good message
        return import_module(self.target(name))

    def _read_settings(self, name: str) -> type[Any]:
        target = self.target(name)
        file = self._own_file(name) if self.is_own(name) else source_of_installed(target)
        if file is None:
            raise UsageError(f"{self.field}={name}: an installed package says that it is {target}, which isn't there")
        path = shown(file, HOME)
        try:
            tree = _extract_settings(file.read_bytes(), self.bases)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self.field}={name}: {path}: {error}") from error
        if tree is None:
            unknown, base = self._unknown(name), self.base.__name__
            raise UsageError(f"{unknown} ({path} has no settings: a dataclass that begins with class …({base}):)")
        return _execute(tree, target, path)

    def _own_file(self, name: str) -> Path:
        return HOME / self.package.replace(".", "/") / f"{name}.py"

    def _unknown(self, name: str) -> UsageError:
        return UsageError(f"{self.field}={name!r} is not an option; {suggestion(name, self.names())}")


def source_of_installed(module: str) -> Path | None:
    """Return the file of an installed module without importing it or its parent packages."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    # find_spec of a dotted name would import the parent packages, so each level is searched in the folders of the last
    for part in rest:
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations) if spec else None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _extract_settings(source: bytes, bases: tuple[type[Any], ...]) -> ast.Module | None:
    """Extract the settings class with the imports and constants that it may use; None if there is none.

    Raises SyntaxError; ValueError: there are two such classes, or the class is no dataclass.
    """
    tree = ast.parse(source)
    base_lists = [[base.__name__] for base in bases]  # a settings class has exactly one base, one of these
    classes = [item for item in tree.body if isinstance(item, ast.ClassDef)]
    settings = [item for item in classes if [ast.unparse(parent) for parent in item.bases] in base_lists]
    if not settings:
        return None
    if len(settings) > 1:
        raise ValueError(
            f"{settings[0].name} and {settings[1].name} are both settings; an option is a module of its own"
        )
    if not any("dataclass" in ast.unparse(item) for item in settings[0].decorator_list):
        raise ValueError(f"{settings[0].name} is no dataclass; write @dataclass(kw_only=True) above it")
    # annotations of its methods may name classes of torch, which can't be imported here
    for part in ast.walk(settings[0]):
        if isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.FunctionDef):
            part.returns = None
    allowed = {"trainers.core.config", "pipeline.core.errors", *(base.__module__ for base in bases)}
    kept = [item for item in tree.body if item is settings[0] or _may_be_used(item, allowed | sys.stdlib_module_names)]
    return ast.Module(body=kept, type_ignores=[])


def _may_be_used(item: ast.stmt, allowed: set[str]) -> bool:
    """Return True for an import of the ``allowed`` modules, and for a constant with a literal value."""
    if isinstance(item, ast.Import):
        return all(alias.name.partition(".")[0] in allowed for alias in item.names)
    if isinstance(item, ast.ImportFrom):
        module = item.module or ""
        return not item.level and module != "__future__" and {module, module.partition(".")[0]} & allowed != set()
    return isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None and _is_literal(item.value)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def _execute(tree: ast.Module, module: str, path: str) -> type[Any]:
    """Execute the extracted statements and return the settings class."""
    # dont_inherit: deferred annotations would be looked up in the option's module, which is never imported
    space: dict[str, Any] = {"__name__": module}
    try:
        exec(compile(tree, path, "exec", dont_inherit=True), space)
    except NameError as error:
        raise UsageError(
            f"{path}: its settings can't be read: {error}; they can use literals, the standard library and "
            "trainers.core.config, as they are read without torch"
        ) from error
    except Exception as error:  # a class statement can raise anything
        raise UsageError(f"{path}: its settings can't be read: {type(error).__name__}: {text_of(error)}") from error
    (name,) = (item.name for item in tree.body if isinstance(item, ast.ClassDef))
    settings: type[Any] = space[name]
    return settings
