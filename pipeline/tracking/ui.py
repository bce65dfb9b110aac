"""MLflow's web page for the recorded runs: the command of its server, and keeping it up until Ctrl-C."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline import tracking
from pipeline.core.errors import PacelineError
from pipeline.core.files import system_temporary_prefix
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.web_address import LOOPBACK, opener
from pipeline.tracking import pages
from pipeline.tracking.address import database_login, has_credentials, recorder_env, shown, sqlite_path
from pipeline.tracking.pages import Server

_START_TIMEOUT_S = 600.0
_PREPARE_TIMEOUT_S = 600.0  # as for the tables in store.py
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_USUAL_PORT = 5000
_HOST = "127.0.0.1"
_ANYWHERE = ("0.0.0.0", "::")
_LOG_LINES = 15
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # starts in a third of the time
}


def ui_command(uri: str, port: int | None = None) -> tuple[list[str], dict[str, str], str]:
    """The argv of a server for this computer alone, what to add to its environment, and its URL. ``port`` None: a free
    one.

    For an http(s) tracking server the argv is empty: it shows its runs itself.

    Raises:
        PacelineError: the port is taken.
    """
    if uri.startswith(("http://", "https://")):
        return [], {}, shown(uri)
    return server_command(uri, _HOST, port)


def server_command(
    uri: str,
    host: str,
    port: int | None,
    *,
    artifacts: str | None = None,
    allowed_hosts: Sequence[str] = (),
    auth: bool = False,
) -> tuple[list[str], dict[str, str], str]:
    """The same for a server that others may use too. A database's login stands in the environment alone."""
    chosen = _free_port(host, port, for_team=artifacts is not None)
    argv = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(chosen), "--workers", "1"]
    env = dict(_SETTINGS)
    database = sqlite_path(uri)
    place = artifacts or (str(database.parent / "mlartifacts") if database else None)
    argv += ["--artifacts-destination", place] if place else []
    address = database_login(uri, os.environ, Path.home())
    if has_credentials(address):
        env["MLFLOW_BACKEND_STORE_URI"] = address
    else:
        argv += ["--backend-store-uri", address]
    if host not in LOOPBACK or allowed_hosts:  # it answers only to names that it was told
        own = [] if host in _ANYWHERE else [host]
        names = dict.fromkeys(["localhost", "127.0.0.1", platform.node(), *own, *allowed_hosts])
        argv += ["--allowed-hosts", ",".join(part for name in names for part in (name, f"{name}:*"))]
    if auth:
        argv += ["--app-name", "basic-auth"]
    reached = platform.node() if host in _ANYWHERE else f"[{host}]" if ":" in host else host
    return argv, env, f"http://{reached}:{chosen}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the page shall open on: runs by their keys (none: all), charts by the names of metrics (none: all)."""

    keys: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()


def serve(
    uri: str,
    experiment: str,
    *,
    port: int | None = None,
    wanted: Wanted | None = None,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Show the addresses of the runs' pages once they answer, and keep the server up until Ctrl-C or SIGTERM.

    Args:
        say: takes the addresses.
        note: takes the progress.

    Raises:
        PacelineError: the store can't be opened, the server ends or doesn't answer, or has no run of a key.
    """
    argv, env, url = ui_command(uri, port)
    if not argv:
        say(
            "\n  ".join([f"the tracking server shows the runs itself: {url}", *addresses(url, experiment, wanted, uri)])
        )
        return
    prepare(uri, note)
    keep_up(argv, env, url, "the MLflow UI", lambda: addresses(url, experiment, wanted), say=say, note=note)


def keep_up(
    argv: list[str],
    env: dict[str, str],
    url: str,
    what: str,
    links: Callable[[], list[str]],
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Start a server, say ``links`` once it answers, and keep it up until Ctrl-C or SIGTERM. Raises PacelineError."""
    with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("ui")) as folder, _terminate_as_interrupt():
        log = Path(folder) / "server.log"
        server = process.guarded(argv, env={**os.environ, **env}, log=log)  # kill -9 of this process ends it, too
        try:
            note(f"starting {what}; Ctrl-C ends it")
            with waiting(note, f"starting {what}"):
                _wait_until_up(url, server, log)
            say("\n  ".join([f"ready: {url}", *links()]))
            _keep_up(server, log)
        except KeyboardInterrupt:
            note(f"{what} has ended")
        finally:
            stop(server)


def addresses(url: str, experiment: str, wanted: Wanted | None = None, uri: str = "") -> list[str]:
    """Lines with the addresses of charts and table, and of the comparison of the runs that were asked for; none while
    nothing is recorded. Raises PacelineError: a key that the server has no run of."""
    wanted, server = wanted or Wanted(), Server(url, uri)
    try:
        number = server.experiment_id(experiment)
        found = {run.run_id: run for key in wanted.keys or ("",) for run in server.runs(number, key)}
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a server that asks for a login
        return []
    chosen = [run for run in found.values() if not wanted.keys or any(run.key.startswith(key) for key in wanted.keys)]
    missing = [key for key in wanted.keys if not any(run.key.startswith(key) for run in chosen)]
    if missing:
        hint = f"doit record run={missing[0]}"
        raise PacelineError(f"no run {missing[0]} in the MLflow experiment {experiment!r}", hint=hint)
    state = pages.view(chosen, wanted.charts, only=bool(wanted.keys))
    name = f"paceline-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    try:
        server.set_view(number, name, state)
    except (OSError, ValueError):  # a login that may only read
        name = ""
    ids = [run.run_id for run in chosen] if wanted.keys else []
    lines = [
        f"charts: {pages.runs_page(url, number, name)}",
        f"table: {pages.runs_page(url, number, name, charts=False)}",
    ]
    if len(ids) == 1:
        lines.append(f"run: {pages.run_page(url, number, ids[0])}")
    return lines if len(ids) < 2 else [*lines, f"side by side: {pages.compare_page(url, number, ids)}"]


def prepare(uri: str, note: Callable[[str], None]) -> None:
    """Create the schema before the server's processes open the store. Raises PacelineError."""
    with waiting(note, f"opening {shown(uri)}"):
        _prepare(uri)


def _prepare(uri: str) -> None:
    env = process.of_this_clone(recorder_env(uri))
    done = process.run(tracking.prepare_command(uri), timeout_s=_PREPARE_TIMEOUT_S, env=env)
    if done.code != 0:
        why = done.stderr.strip().splitlines() or [
            f"exit code {done.code}"
        ]  # above the last one MLflow's own traceback
        raise PacelineError(f"the store {shown(uri)} cannot be opened: {why[-1]}")


def _free_port(host: str, port: int | None, *, for_team: bool) -> int:
    """``port`` itself, or MLflow's usual one, or any that is free. Raises PacelineError."""
    for wanted in (_USUAL_PORT, 0) if port is None else (port,):
        try:
            with socket.create_server((host, wanted)) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]  # create_server adds the address
    what, hint = "the MLflow UI", "doit ui port=5001"
    if for_team:
        what, hint = "the tracking server", f"doit server tracking.server_port={5001 if port != 5001 else 5002}"
    raise PacelineError(f"{what} can't listen on {host}, port {port}: {reason}", hint=hint)


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise PacelineError(f"the MLflow server ended with exit code {server.returncode}:\n{_tail(log)}")
        with contextlib.suppress(OSError):
            opener(url).open(f"{url}/health", timeout=_ANSWER_TIMEOUT_S).close()
            return
        time.sleep(_POLL_S)
    raise PacelineError(f"{url} did not answer within {_START_TIMEOUT_S:g} s:\n{_tail(log)}")


def _keep_up(server: subprocess.Popen[bytes], log: Path) -> None:
    code = server.wait()
    raise PacelineError(f"the MLflow server ended with exit code {code}:\n{_tail(log)}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """The server and its workers, which its guard ends."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


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
