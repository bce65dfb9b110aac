"""Steps declared in dodo.py, by name, with the same fields as conf/step/NAME.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REGISTERED: dict[str, Mapping[str, Any]] = {}


def declare(name: str, **fields: Any) -> None:
    """Declare a step in Python instead of conf/step/NAME.yaml; ``function`` may be the function object.

    Errors in the fields are reported when the step is used.
    """
    function = fields.get("function")
    if callable(function):
        called = getattr(function, "__qualname__", f"<{type(function).__name__}>")  # a partial has no name
        fields["function"] = f"{function.__module__}:{called}"
    REGISTERED[name] = fields
