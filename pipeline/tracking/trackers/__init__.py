"""Other trackers than MLflow: one module each, found by its name; docs/tracking.md shows how to add one.

A tracker's module has its settings, a dataclass derived from TrackingConfig, and a class derived from ``base.Tracker``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.schema import OPTIONS, TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.tracking.state import TENSORBOARD
from pipeline.tracking.trackers.base import Tracker

TRACKERS = OPTIONS["tracking"]


def create(name: str, experiment: str, settings: str, run_dir: Path) -> Tracker:
    """The tracker of a run. ``settings`` are the fields that it alone has, as JSON. Raises UsageError, ImportError."""
    if name == TENSORBOARD:
        plain = TrackingConfig(experiment=experiment, tensorboard=True)
        refuse_missing(plain)
        from pipeline.tracking.tensorboard import TensorBoard  # it imports tensorboard, which may be missing

        return TensorBoard(plain, run_dir)
    module = TRACKERS.module(name)
    made_settings = TRACKERS.imported_settings(name)(experiment=experiment, tracker=name, **json.loads(settings))
    refuse_missing(made_settings)
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Tracker) and kind.__module__ == module.__name__:
            made: Tracker = kind(made_settings, run_dir)
            return made
    raise UsageError(f"tracking.tracker={name}: {module.__name__} has no class that derives from Tracker")


def own_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields of tracking those that a tracker alone has."""
    shared = TrackingConfig.__dataclass_fields__
    return {name: value for name, value in section.items() if name not in shared}


def refuse_missing(settings: TrackingConfig) -> None:
    """Raises UsageError: a package that a tracker needs isn't installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tracking.tensorboard=true needs tensorboard, which is not installed",
            hint="pip install 'paceline[tensorboard]'",
        )
    needed = settings.package
    if settings.tracker is not None and needed and importlib.util.find_spec(needed) is None:
        raise UsageError(
            f"tracking={settings.tracker} needs {needed}, which is not installed", hint=f"pip install {needed}"
        )
