"""Descriptions of a user's classes and functions: where they are defined and which arguments they accept.

``own_targets`` runs the text of this file in a child process, which imports them. So it uses the standard library only.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

_ABSENT: Any = object()


class SourcePlace(NamedTuple):
    """Where something is defined. ``file`` is relative to the project if it is there; '' for something defined in C."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Parameter(NamedTuple):
    """A parameter of a class or function; ``kind`` is the name of one of inspect's kinds."""

    name: str
    kind: str
    has_default: bool


class TargetDescription(NamedTuple):
    """What the import of one target has shown: an error, no such name, another kind of value, or its parameters."""

    place: SourcePlace
    error: str = ""  # the last line of a traceback from the user's own code
    siblings: Sequence[str] | None = None  # if there is no such name: the classes and functions of the module
    value: str = ""  # the repr of a target that is neither class nor function
    name: str = ""
    is_class: bool = False
    bases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()

    @property
    def where(self) -> str:
        """Name and place, for messages."""
        return f"{self.name} ({self.place})" if self.place.file else self.name

    @classmethod
    def of_json(cls, fields: list[Any]) -> TargetDescription:
        """Return the description from its JSON form, in which named tuples are lists."""
        description = cls(*fields)
        parameters = tuple(Parameter(*fields) for fields in description.parameters)
        return description._replace(place=SourcePlace(*description.place), parameters=parameters)


def answer(request: dict[str, Any]) -> dict[str, TargetDescription | None]:
    """Return target → description for each of ``request["targets"]`` (``package.module:NAME``).

    None: only a host can tell, for example because an import needs a GPU library that is missing here.
    ``request["folders"]`` have the user's own code; the first is the project.
    """
    importing = _Importing(request["folders"])
    return {target: importing.describe(target) for target in request["targets"]}


class _Importing:
    """Imports targets. ``folders`` are real paths."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def describe(self, target: str) -> TargetDescription | None:
        """Import a target and describe it; None: only a host can tell."""
        module_name, _, name = target.partition(":")
        try:
            module = import_module(module_name)
            item = getattr(module, name, _ABSENT)
        except BaseException as error:  # anything that a module raises, including sys.exit()
            return self._describe_error(error)
        of_module = TargetDescription(place=self._place(module.__file__, 0))
        if item is _ABSENT:  # list the names that the user may have meant, without those imported from elsewhere
            package = module_name.partition(".")[0]
            items = (
                (name, item) for name, item in vars(module).items() if inspect.isclass(item) or inspect.isroutine(item)
            )
            own = tuple(name for name, item in items if str(item.__module__).partition(".")[0] == package)
            return of_module._replace(siblings=own)
        if isinstance(item, ModuleType):
            return of_module._replace(value="a module")
        if not callable(item):
            return of_module._replace(value=repr(item)[:40])
        if not inspect.isclass(item) and not inspect.isroutine(item):  # an object with __call__
            return None
        try:
            parameters = inspect.signature(item).parameters.values()
        except (TypeError, ValueError):  # written in C
            return None
        return TargetDescription(
            place=self._definition(item),
            name=item.__name__,
            is_class=inspect.isclass(item),
            bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in getattr(item, "__mro__", ())),
            parameters=tuple(Parameter(one.name, one.kind.name, one.default is not one.empty) for one in parameters),
        )

    def _describe_error(self, error: BaseException) -> TargetDescription | None:
        """Describe an error in the user's own code, or in an import of a user's module; None for any other error."""
        # other errors may come from this computer's packages, and hosts have packages of their own
        last_line = traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, SyntaxError) and error.filename:
            return TargetDescription(place=self._place(error.filename, error.lineno), error=last_line)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        if not frames:
            return None
        is_own = any(frames[-1].filename.startswith(folder + os.sep) for folder in self._folders)
        if isinstance(error, ModuleNotFoundError) and error.name:
            paths = [os.path.join(folder, error.name.partition(".")[0]) for folder in self._folders]  # noqa: PTH118
            is_own = any(os.path.exists(path + end) for path in paths for end in ("", ".py"))  # noqa: PTH110
        place = self._place(frames[-1].filename, frames[-1].lineno)
        return TargetDescription(place=place, error=last_line) if is_own else None

    def _definition(self, item: Any) -> SourcePlace:
        with suppress(TypeError, OSError):  # defined in C, or in no file
            unwrapped = inspect.unwrap(item)
            return self._place(inspect.getsourcefile(unwrapped), max(1, inspect.getsourcelines(unwrapped)[1]))
        return SourcePlace("", 0)

    def _place(self, file: str | None, line: int | None) -> SourcePlace:
        path, project = os.path.realpath(file) if file else "", f"{self._folders[0]}{os.sep}"
        return SourcePlace(path.removeprefix(project), line or 0)
