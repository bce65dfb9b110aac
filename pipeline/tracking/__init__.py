"""Recording runs in MLflow, and in other trackers, from their run folders: live, and later where no server answered.

Only the process of ``recorder_command`` imports mlflow; what stands here is for the controller, and light.
"""

from __future__ import annotations

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
from pipeline.tracking.recorder import record
from pipeline.tracking.state import Recorded

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
