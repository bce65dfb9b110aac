"""The records of runs in MLflow and other trackers, made from run folders: live, or later if no server answered.

Only the recorder process (``recorder_command``) imports mlflow, which takes seconds; the names here import little.
"""

from pipeline.tracking.destinations import (
    NO_SUCH_RUN,
    absolute_uri,
    destinations,
    fetch_command,
    prepare_command,
    public_uri,
    recorder_command,
    recorder_env,
    serve_command,
    sqlite_path,
    sqlite_uri,
)

__all__ = [
    "NO_SUCH_RUN", "absolute_uri", "destinations", "fetch_command", "prepare_command", "public_uri",
    "recorder_command", "recorder_env", "serve_command", "sqlite_path", "sqlite_uri",
]  # fmt: skip
