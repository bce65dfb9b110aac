"""Preparation steps of the user: commands or functions with inputs, outputs and a content key, each run once.

``step.py`` reads and checks their definitions, ``graph.py`` knows which are up to date, ``making.py`` runs the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REGISTERED: dict[str, Mapping[str, Any]] = {}
"""The steps declared in dodo.py, by name, with the fields of conf/step/NAME.yaml."""


def declare(name: str, **fields: Any) -> None:
    """Declare a step in Python instead of conf/step/NAME.yaml. Wrong fields are reported when it is used."""
    function = fields.get("function")
    if callable(function):
        called = getattr(function, "__qualname__", f"<{type(function).__name__}>")  # a partial has no name
        fields["function"] = f"{function.__module__}:{called}"
    REGISTERED[name] = fields
