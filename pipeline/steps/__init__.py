"""The user's own preparation steps: commands or functions with inputs, outputs and a content key, each run once.

``step.py`` reads and checks the definition of a step, ``key.py`` computes its key, ``graph.py`` knows which steps are
up to date, ``making.py`` runs the others, and ``step_folders.py`` has their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REGISTERED: dict[str, Mapping[str, Any]] = {}
"""The steps declared in dodo.py, by name, with the fields of conf/step/NAME.yaml."""


def declare(name: str, **fields: Any) -> None:
    """Declare a step in Python instead of conf/step/NAME.yaml. Wrong fields are reported when the step is used."""
    function = fields.get("function")
    if callable(function):
        function_name = getattr(function, "__qualname__", f"<{type(function).__name__}>")  # a partial has no name
        fields["function"] = f"{function.__module__}:{function_name}"
    REGISTERED[name] = fields
