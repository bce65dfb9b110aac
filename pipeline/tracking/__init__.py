"""Record runs in MLflow and other trackers from their run folders: live, or later if no server answered. Only the
process of ``recorder_command`` imports mlflow; this package's names are for the controller, and light.
"""

from pipeline.tracking.destinations import (
    NO_SUCH_RUN,
    absolute_uri,
    destinations,
    fetch_command,
    prepare_command,
    recorder_command,
    recorder_env,
    serve_command,
    shown,
    sqlite_path,
    sqlite_uri,
)

__all__ = [
    "NO_SUCH_RUN", "absolute_uri", "destinations", "fetch_command", "prepare_command",
    "recorder_command", "recorder_env", "serve_command", "shown", "sqlite_path", "sqlite_uri",
]  # fmt: skip
