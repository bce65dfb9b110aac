"""Tracking servers that are down, silent, unwilling, or away for a while."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.core import process
from pipeline.tracking import ui
from pipeline.tracking.state import DONE, PENDING
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_store import EXPERIMENT
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = folder.started(tmp_path)
    folder.metrics(run, range(20))
    folder.end(run)
    return run


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class _Refusing(BaseHTTPRequestHandler):
    seen: list[str]  # the Authorization headers

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization", ""))
        body = json.dumps({"error_code": "PERMISSION_DENIED", "message": "hunter2 is not welcome"}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@contextlib.contextmanager
def refusing_server(seen: list[str]) -> Iterator[int]:
    handler = type("Handler", (_Refusing,), {"seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_server_that_is_down_leaves_the_record_pending(run: Path) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    recorded = tracking.record(run, uri, EXPERIMENT, give_up_s=0.5)
    assert (recorded.state, recorded.run_id) == (PENDING, None)
    assert uri in recorded.message
    assert "Connection refused" in recorded.message
    assert json.loads((run / "tracking.json").read_text())["state"] == PENDING
    assert not tracking.is_recorded(run, uri, EXPERIMENT)


def test_a_server_that_never_answers_is_given_up(
    run: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    recorded = tracking.record(run, silent_server, EXPERIMENT, give_up_s=0.5)
    assert recorded.state == PENDING
    assert "no answer within 1 s" in recorded.message


def test_a_pending_record_can_go_to_another_store(run: Path, tmp_path: Path) -> None:
    tracking.record(run, f"http://127.0.0.1:{free_port()}", EXPERIMENT, give_up_s=0.1)
    uri = tracking.absolute_uri(None, tmp_path)
    assert tracking.record(run, uri, EXPERIMENT).state == DONE
    assert len(store.history(uri, store.runs(uri)[0].info.run_id)) == 20


def test_user_and_password_reach_the_server_and_nothing_else_and_a_refusal_says_what_to_do(run: Path) -> None:
    seen: list[str] = []
    with refusing_server(seen) as port:
        uri = f"http://ann:hunter2@127.0.0.1:{port}"
        environment = {**os.environ, **tracking.recorder_env(uri), "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
        recorder = store.spawn(run, uri, follow=True, env=environment)
        assert "hunter2" not in Path(f"/proc/{recorder.pid}/cmdline").read_text()
        out, err = recorder.communicate(timeout=HANG_S)
    assert recorder.returncode == 1
    assert set(seen) == {"Basic " + base64.b64encode(b"ann:hunter2").decode()}
    assert "*** is not welcome" in err
    assert f"try: doit record run={folder.KEY}, once it answers" in err
    assert "Traceback" not in err
    assert not [path for path in run.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert "hunter2" not in out + err


@contextlib.contextmanager
def mlflow_server(database: Path, port: int) -> Iterator[str]:
    argv, env, url = ui.ui_command(f"sqlite:///{database}", port=port)
    server = process.background(argv, env={**os.environ, **env}, log=database.parent / "server.log")
    try:
        until = time.monotonic() + HANG_S
        while server.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60):
                break
            time.sleep(0.2)
        yield url
    finally:
        ui.stop(server)


def test_a_server_that_goes_and_comes_back_has_everything_once(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(5))
    store.prepare(tmp_path / "mlflow.db")
    port = free_port()
    with mlflow_server(tmp_path / "mlflow.db", port) as uri:
        assert tracking.record(run, uri, EXPERIMENT).state == "recording"
        follower = store.spawn(run, uri, follow=True, env=dict(os.environ))
        folder.metrics(run, range(5, 10))
        wait_until(lambda: '"train/loss": 9' in (run / "tracking.json").read_text(), follower)
    folder.metrics(run, range(10, 20))
    folder.end(run)
    _, err = follower.communicate(timeout=HANG_S)
    assert follower.returncode == 1
    assert "Connection refused" in err

    with mlflow_server(tmp_path / "mlflow.db", port):
        recorded = tracking.record(run, uri, EXPERIMENT)
        assert recorded.state == DONE
        (only,) = store.runs(uri)
        assert (only.info.run_id, only.info.status) == (recorded.run_id, "FINISHED")
        assert len(store.history(uri, only.info.run_id)) == 20
        assert "checkpoints/final.pt" in store.artifacts(uri, only.info.run_id, "checkpoints")
        (run / "tracking.json").unlink()
        assert tracking.record(run, uri, EXPERIMENT).run_id == recorded.run_id
        assert len(store.runs(uri)) == 1
        assert len(store.history(uri, only.info.run_id)) == 20
