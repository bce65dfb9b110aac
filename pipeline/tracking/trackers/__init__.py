"""Trackers other than MLflow: one module each, found by name; docs/trackers.md shows how to add one.

A tracker's module contains its settings, a dataclass derived from TrackingConfig, and a class derived from
``base.Tracker``.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config.schema import OPTIONS, TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.tracking.destinations import TENSORBOARD, refuse_missing
from pipeline.tracking.trackers.base import Tracker

TRACKERS = OPTIONS["tracking"]


def create(name: str, experiment: str, settings: str, run_dir: Path) -> Tracker:
    """Create the tracker of a run. ``settings``: its own fields as JSON. Raises UsageError, ImportError."""
    if name == TENSORBOARD:
        plain = TrackingConfig(experiment=experiment, tensorboard=True)
        refuse_missing(plain)
        from pipeline.tracking.tensorboard import TensorBoard  # late import: tensorboard may be missing

        return TensorBoard(plain, run_dir)
    module = TRACKERS.module(name)
    tracker_settings = TRACKERS.settings(name)(experiment=experiment, tracker=name, **json.loads(settings))
    refuse_missing(tracker_settings)
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Tracker) and kind.__module__ == module.__name__:
            return kind(tracker_settings, run_dir)
    raise UsageError(f"tracking.tracker={name}: {module.__name__} has no class that derives from Tracker")
