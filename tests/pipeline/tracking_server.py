"""A real `mlflow server`, as a team starts it (docs/mlflow-server.md)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.postgres_fixture import free_port
from tests.waiting import wait_until


@contextlib.contextmanager
def served(
    folder: Path, *options: str, store: str, artifacts: str, env: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """The address of a server, and its process id; ``store`` is passed in the environment, as it may hold a login."""
    port = free_port()
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    argv += ["--artifacts-destination", artifacts, *options]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **env, "MLFLOW_BACKEND_STORE_URI": store}
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: _answers(url))
        yield url, server.pid
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5.0):
        return True
    return False
