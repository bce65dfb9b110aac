"""MLflow's web page for the recorded runs: the command of its server, and keeping it up until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from pipeline import tracking
from pipeline.core import leftovers, process
from pipeline.core.errors import PacelineError
from pipeline.core.heartbeat import waiting
from pipeline.tracking.address import has_credentials, recorder_env, shown, sqlite_path

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_PREPARE_TIMEOUT_S = 120.0
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_USUAL_PORT = 5000
_ANYWHERE = ("0.0.0.0", "::")
_LOG_LINES = 15
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # starts in a third of the time
}


def ui_command(uri: str, host: str = "127.0.0.1", port: int | None = None) -> tuple[list[str], dict[str, str], str]:
    """The argv of the server, what to add to its environment, and its URL. ``port`` None: a free one.

    For an http(s) tracking server the argv is empty: it shows its runs itself.

    Raises:
        PacelineError: the port is taken, or the host is no address of this computer.
    """
    if uri.startswith(("http://", "https://")):
        return [], {}, shown(uri)
    chosen = _free_port(host, port)
    argv = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(chosen), "--workers", "1"]
    env = dict(_SETTINGS)
    database = sqlite_path(uri)
    if database:
        argv += ["--artifacts-destination", str(database.parent / "mlartifacts")]
    if has_credentials(uri):
        env["MLFLOW_BACKEND_STORE_URI"] = uri
    else:
        argv += ["--backend-store-uri", uri]
    if host not in ("127.0.0.1", "localhost", "::1"):  # the server answers only to names that it was told
        names = ["localhost", "127.0.0.1", platform.node(), *([] if host in _ANYWHERE else [host])]
        argv += ["--allowed-hosts", ",".join(part for name in names for part in (name, f"{name}:*"))]
    reached = platform.node() if host in _ANYWHERE else f"[{host}]" if ":" in host else host
    return argv, env, f"http://{reached}:{chosen}"


def serve(
    uri: str,
    experiment: str,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Show the address of the runs' charts once the page answers, and keep the server up until Ctrl-C or SIGTERM.

    Raises:
        PacelineError: the store can't be opened, or the server ends or doesn't answer.
    """
    argv, env, url = ui_command(uri, host, port)
    if not argv:
        say(f"the tracking server shows the runs itself: {charts_url(url, experiment)}")
        return
    with waiting(say, f"opening {shown(uri)}"):
        _prepare(uri)
    with tempfile.TemporaryDirectory(prefix=leftovers.of_system("ui")) as folder, _terminate_as_interrupt():
        log = Path(folder) / "server.log"
        server = process.background(argv, env={**os.environ, **env}, log=log)
        try:
            say(f"starting the MLflow UI on {shown(uri)}; Ctrl-C ends it")
            with waiting(say, "starting the MLflow UI"):
                _wait_until_up(url, server, log)
            say(f"ready: {charts_url(url, experiment)}")
            _keep_up(server, log)
        except KeyboardInterrupt:
            say("the MLflow UI has ended")
        finally:
            stop(server)


def charts_url(url: str, experiment: str) -> str:
    """The address that opens the training charts of ``experiment``; plain ``url`` while nothing is recorded there."""
    query = urllib.parse.urlencode({"experiment_name": experiment})
    try:
        answer = _get(f"{url}/api/2.0/mlflow/experiments/get-by-name?{query}")
        number = json.loads(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a server that asks for a login
        return url
    return f"{url}/#/experiments/{number}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S) as answer:  # http(s) only: built above
        content: bytes = answer.read()
    return content


def _prepare(uri: str) -> None:
    """Create the schema before the server's processes open the store."""
    env = process.of_this_clone(recorder_env(uri))
    done = process.run(tracking.prepare_command(uri), timeout_s=_PREPARE_TIMEOUT_S, env=env)
    if done.code != 0:
        raise PacelineError(f"the store {shown(uri)} cannot be opened: {done.stderr.strip()}")


def _free_port(host: str, port: int | None) -> int:
    """``port`` itself, or MLflow's usual one, or any that is free."""
    for wanted in (_USUAL_PORT, 0) if port is None else (port,):
        try:
            with socket.create_server((host, wanted)) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            reason = error.strerror or str(error)
    raise PacelineError(f"the MLflow UI can't listen on {host}, port {port}: {reason}", hint="doit ui port=5001")


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise PacelineError(f"the MLflow server ended with exit code {server.returncode}:\n{_tail(log)}")
        with contextlib.suppress(OSError):
            _get(f"{url}/health")
            return
        time.sleep(_POLL_S)
    raise PacelineError(f"{url} did not answer within {_START_TIMEOUT_S:g} s:\n{_tail(log)}")


def _keep_up(server: subprocess.Popen[bytes], log: Path) -> None:
    code = server.wait()
    raise PacelineError(f"the MLflow server ended with exit code {code}:\n{_tail(log)}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """The server and its workers: they share a session that holds nothing else."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=_STOP_TIMEOUT_S)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return tracking.redact("\n".join(lines[-_LOG_LINES:]))


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the server as Ctrl-C does; without this it would outlive the command."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
