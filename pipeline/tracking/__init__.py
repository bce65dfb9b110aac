"""Record runs in MLflow and other trackers from their run folders: live, or later if no server answered.

Only the process of ``recorder_command`` imports mlflow. This package's names are for the controller, and light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.tracking.address import absolute_uri, default_uri, recorder_env, redact, shown, sqlite_path, sqlite_uri
from pipeline.tracking.destinations import Destination, destinations
from pipeline.tracking.launching import (
    NO_SUCH_RUN,
    fetch_command,
    prepare_command,
    publish_command,
    recorder_command,
    serve_command,
)
from pipeline.tracking.state import Recorded

if TYPE_CHECKING:
    from pipeline.tracking.recorder import record

__all__ = [
    "NO_SUCH_RUN",
    "Destination",
    "Recorded",
    "absolute_uri",
    "default_uri",
    "destinations",
    "fetch_command",
    "prepare_command",
    "publish_command",
    "record",
    "recorder_command",
    "recorder_env",
    "redact",
    "serve_command",
    "shown",
    "sqlite_path",
    "sqlite_uri",
]


def __getattr__(name: str) -> Any:
    """Import ``record`` on first use: a finished run only checks whether a record exists."""
    if name != "record":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.tracking.recorder import record  # late import: a finished run doesn't need it

    return record
