"""Settings of trackers other than MLflow, checked without importing the trackers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import TrackingConfig
from pipeline.core.errors import UsageError


def own_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of tracking that belong to the chosen tracker alone."""
    shared = TrackingConfig.__dataclass_fields__
    return {name: value for name, value in section.items() if name not in shared}


def refuse_missing(settings: TrackingConfig) -> None:
    """Check that a tracker's package is installed. Raises UsageError."""
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
