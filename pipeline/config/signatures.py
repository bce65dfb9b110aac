"""Describe which arguments a user's classes and functions accept, by importing them.

``own_targets`` runs the text of this file in a separate process with the import path of the ranks, so it may import
the standard library only.
"""

from __future__ import annotations

import inspect
import os
import traceback
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Describe each of ``request["targets"]`` (``package.module:NAME``).

    A description has one of these fields:

    - ``parameters``: [name, kind, has a default] each; with ``name``, ``file``, ``line``, ``is_class`` and ``bases``.
    - ``names``: the target is missing; the classes and functions of its module, each with file and line.
    - ``value``: the target is neither a class nor a function; its text.
    - ``failed``: the import failed in the user's own code, below ``request["folders"]``; the error's last line.
    - no field at all: only a host can describe it, for example if a package needs a GPU library that is missing here.
    """
    return {target: _described(target, request["folders"]) for target in request["targets"]}


def _described(target: str, folders: list[str]) -> dict[str, Any]:
    place, _, name = target.partition(":")
    try:
        module = import_module(place)
        item = getattr(module, name, _ABSENT)
    except BaseException as error:  # anything that a module raises, including sys.exit()
        return _failed(error, folders)
    if item is _ABSENT:
        return {"file": module.__file__, "names": _names(module)}
    if isinstance(item, ModuleType):
        return {"file": module.__file__, "value": "a module"}
    if not callable(item):
        return {"file": module.__file__, "value": repr(item)[:40]}
    if not inspect.isclass(item) and not inspect.isroutine(item):
        return {}
    try:
        parameters = inspect.signature(item).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    return {
        "name": item.__name__,
        **_place(item),
        "is_class": inspect.isclass(item),
        "bases": [f"{base.__module__}.{base.__qualname__}" for base in getattr(item, "__mro__", ())],
        "parameters": [[one.name, one.kind.name, one.default is not one.empty] for one in parameters],
    }


_ABSENT: Any = object()


def _failed(error: BaseException, folders: list[str]) -> dict[str, Any]:
    """Describe an error in the user's own code, or in an import of a user's module; {} for any other error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return {"failed": last, "file": error.filename, "line": error.lineno}
    is_own = bool(frames) and any(frames[-1].filename.startswith(folder + os.sep) for folder in folders)
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        is_own = any(os.path.exists(os.path.join(folder, top + end)) for folder in folders for end in ("", ".py"))  # noqa: PTH110, PTH118
    return {"failed": last, "file": frames[-1].filename, "line": frames[-1].lineno} if is_own and frames else {}


def _names(module: ModuleType) -> dict[str, dict[str, Any]]:
    """Return the classes and functions of a module that its own package defines."""
    top = module.__name__.partition(".")[0]
    return {
        name: _place(item)
        for name, item in vars(module).items()
        if (inspect.isclass(item) or inspect.isroutine(item)) and str(item.__module__).partition(".")[0] == top
    }


def _place(item: Any) -> dict[str, Any]:
    with suppress(TypeError, OSError):  # defined in C, or in no file
        own = inspect.unwrap(item)
        return {"file": inspect.getsourcefile(own), "line": max(1, inspect.getsourcelines(own)[1])}
    return {"file": None, "line": 0}
