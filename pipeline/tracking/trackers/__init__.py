"""Other trackers than MLflow: one module each, found by its name; docs/tracking.md shows how to add one.

A tracker's module has its settings, a dataclass derived from TrackingConfig, and a class derived from ``base.Tracker``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.schema import OPTIONS, TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.tracking.destinations import TENSORBOARD

if TYPE_CHECKING:
    from pipeline.tracking.trackers.base import Tracker

TRACKERS = OPTIONS["tracking"]


def create(name: str, experiment: str, settings: str, run_dir: Path) -> Tracker:
    """The tracker of a run. ``settings`` are the fields that it alone has, as JSON. Raises UsageError, ImportError."""
    if name == TENSORBOARD:
        plain = TrackingConfig(experiment=experiment, tensorboard=True)
        refuse_missing(plain)
        from pipeline.tracking.tensorboard import TensorBoard

        return TensorBoard(plain, run_dir)
    from pipeline.tracking.trackers.base import Tracker

    module = TRACKERS.module(name)
    told = TRACKERS.imported_settings(name)(experiment=experiment, tracker=name, **json.loads(settings))
    refuse_missing(told)
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Tracker) and kind.__module__ == module.__name__:
            made: Tracker = kind(told, run_dir)
            return made
    raise UsageError(f"tracking.tracker={name}: {module.__name__} has no class that derives from Tracker")


def own_settings(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields of tracking those that a tracker alone has."""
    shared = TrackingConfig.__dataclass_fields__
    return {name: value for name, value in told.items() if name not in shared}


def refuse_missing(told: TrackingConfig) -> None:
    """Raises UsageError: a package that a tracker needs isn't installed."""
    if told.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tracking.tensorboard=true needs tensorboard, which is not installed",
            hint="pip install 'paceline[tensorboard]'",
        )
    needed = told.package
    if told.tracker is not None and needed and importlib.util.find_spec(needed) is None:
        raise UsageError(
            f"tracking={told.tracker} needs {needed}, which is not installed", hint=f"pip install {needed}"
        )
