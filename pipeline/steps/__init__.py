"""User-defined preparation steps: commands or functions with inputs, outputs and a content key, run once.

Results lie below ``runs/steps/``. ``declared`` reads the steps, ``key`` computes their keys, ``graph`` holds their
dependencies and states, ``making`` makes them, ``step_program`` runs their programs, ``source`` passes their outputs
to a run as its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REGISTERED: dict[str, Mapping[str, Any]] = {}
"""The steps declared in dodo.py, by name, with the fields of conf/step/NAME.yaml."""


def declare(name: str, **fields: Any) -> None:
    """Declare a step in Python instead of conf/step/NAME.yaml; ``function`` may be the function object.

    Errors in the fields are reported when the step is used.
    """
    function = fields.get("function")
    if callable(function):
        called = getattr(function, "__qualname__", f"<{type(function).__name__}>")  # a partial has no name
        fields["function"] = f"{function.__module__}:{called}"
    REGISTERED[name] = fields
