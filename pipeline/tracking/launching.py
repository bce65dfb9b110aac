"""Command lines of the recorder process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.tracking.address import has_credentials

NO_SUCH_RUN = 4
"""Exit code of ``fetch_command``: the store answered, and has no run of that id."""


def recorder_command(
    run_dir: Path, uri: str, experiment: str, *, tracker: str | None = None, follow: bool = False, check: bool = False
) -> list[str]:
    """Return the argv that records ``run_dir``.

    ``follow`` continues until the run has ended or this process is gone; ``check`` queries the store even if everything
    is recorded already. Give the process the environment of its Destination, because an address with credentials is
    only passed there. Exit code 0: recorded; 1: pending, with the reason on stderr.
    """
    flags = [*(["--follow", *_parent()] if follow else []), *(["--check"] if check else [])]
    argv = [sys.executable, "-m", "pipeline.tracking", "record", str(run_dir), "--experiment", experiment]
    return [*argv, *_tracker_arguments(uri, tracker), *flags]


def serve_command(uri: str, experiment: str, *, tracker: str | None = None) -> list[str]:
    """Return the argv that records many runs while this process lives; environment as for ``recorder_command``."""
    argv = [sys.executable, "-m", "pipeline.tracking", "serve", "--experiment", experiment]
    return [*argv, *_tracker_arguments(uri, tracker), *_parent()]


def fetch_command(run_id: str, place: Path, uri: str) -> list[str]:
    """Return the argv that downloads an MLflow run's recipe into ``place``; give it ``recorder_env(uri)``.

    Exit code 0: done; 1: the store failed, with the reason on stderr; or NO_SUCH_RUN.
    """
    return [sys.executable, "-m", "pipeline.tracking", "fetch", run_id, str(place), *_uri_arguments(uri)]


def publish_command(run_dir: Path, uri: str) -> list[str]:
    """Return the argv that publishes the model of a run; give it ``recorder_env(uri)``.

    Stdin holds the arguments (publishing.py). Exit code 0: done, and stdout is a line of JSON; 1: failed, with the
    reason on stderr.
    """
    return [sys.executable, "-m", "pipeline.tracking", "publish", str(run_dir), *_uri_arguments(uri)]


def prepare_command(uri: str) -> list[str]:
    """Return the argv that creates a database store's schema before several processes open it at once."""
    return [sys.executable, "-m", "pipeline.tracking", "prepare", *_uri_arguments(uri)]


def _parent() -> list[str]:
    """Pass the parent's pid explicitly: a recorder without CPU time may only look it up after the parent is gone."""
    return ["--parent", str(os.getpid())]


def _tracker_arguments(uri: str, tracker: str | None) -> list[str]:
    return _uri_arguments(uri) if tracker is None else ["--tracker", tracker]


def _uri_arguments(uri: str) -> list[str]:
    return [] if has_credentials(uri) else ["--uri", uri]
