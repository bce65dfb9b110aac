"""Steps that dodo.py declares, by name: fields as in conf/step/NAME.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REGISTERED: dict[str, Mapping[str, Any]] = {}


def declare(name: str, **fields: Any) -> None:
    """A step told in Python, in place of conf/step/NAME.yaml; a ``function`` may be the function itself.

    What is wrong with it is said when the step is used.
    """
    function = fields.get("function")
    if callable(function):
        called = getattr(function, "__qualname__", f"<{type(function).__name__}>")  # a partial has none
        fields["function"] = f"{function.__module__}:{called}"
    REGISTERED[name] = fields
