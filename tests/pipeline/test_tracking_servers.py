"""Tracking servers that are down, silent, unwilling, or away for a while."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.core.errors import PacelineError
from pipeline.tracking import mlflow_ui as ui
from pipeline.tracking import recorder, store_calls
from pipeline.tracking.client import DestinationRecorder
from pipeline.tracking.description import DataInput
from pipeline.tracking.destinations import DONE, PENDING, Destination
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


class _Endless(socketserver.StreamRequestHandler):
    """Answers without end: as fast as it is read, or a byte now and then. ``left``: how many have been hung up on."""

    pause_s: float
    left: list[int]

    def handle(self) -> None:
        self.request.recv(1 << 16)
        part, until = b" " if self.pause_s else bytes(1 << 20), time.monotonic() + HANG_S
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
            while time.monotonic() < until:
                self.wfile.write(part)
                time.sleep(self.pause_s)
        self.left.append(1)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(("pause_s", "limit"), [(0.0, "32 MiB"), (0.2, "3 s")])
def test_a_server_that_answers_without_end_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float, limit: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(store_calls, "GROWTH_BYTES", 32 << 20)
    left: list[int] = []
    handler = type("Handler", (_Endless,), {"pause_s": pause_s, "left": left})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        recorded = recorder.record(run, f"http://127.0.0.1:{server.server_address[1]}", EXPERIMENT, give_up_s=0.5)
        wait_until(lambda: bool(left))
        server.shutdown()
    assert (recorded.state, f"its answer has no end: given up after {limit}" in recorded.message) == (PENDING, True)
    assert not [thread for thread in threading.enumerate() if thread.name == store_calls._THREAD]


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


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}", "postgresql://team@127.0.0.1:{}/mlflow"])
def test_a_server_that_is_down_leaves_the_record_pending(run: Path, address: str) -> None:
    port = free_port()
    uri = address.format(port)
    recorded = recorder.record(run, uri, EXPERIMENT, give_up_s=0.5)
    assert (recorded.state, recorded.run_id) == (PENDING, None)
    assert f"127.0.0.1:{port}" in recorded.message
    assert "Connection refused" in recorded.message
    assert json.loads((run / "tracking.json").read_text())["state"] == PENDING
    assert not Destination(uri=uri, experiment=EXPERIMENT).is_recorded(run)


def test_a_server_that_never_answers_is_given_up(
    run: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    recorded = recorder.record(run, silent_server, EXPERIMENT, give_up_s=0.5)
    assert recorded.state == PENDING
    assert "no answer within 1 s" in recorded.message


@pytest.mark.ci
@pytest.mark.long
def test_a_pending_record_can_go_to_another_store(run: Path, uri: str) -> None:
    recorder.record(run, f"http://127.0.0.1:{free_port()}", EXPERIMENT, give_up_s=0.1)
    assert recorder.record(run, uri, EXPERIMENT).state == DONE
    assert len(store.history(uri, store.runs(uri)[0].info.run_id)) == 20


@pytest.mark.ci
@pytest.mark.long
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
    assert f"try: doit record {folder.KEY}, once that is fixed" in err
    waits = DestinationRecorder(run, Destination(uri=uri, experiment=EXPERIMENT))
    assert waits.hint() == f"doit record {folder.KEY}, once that is fixed"
    assert "Traceback" not in err
    assert not [path for path in run.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert "hunter2" not in out + err


@contextlib.contextmanager
def page(database: Path) -> Iterator[int]:
    """`doit ui` for a database, as long as that is wanted: the port of its server."""
    code = (
        f"from pipeline.tracking import mlflow_ui as ui; ui.serve('sqlite:///{database}', 'paceline', port=0, "
        "say=lambda text: print(text, flush=True), note=lambda text: print(text, file=sys.stderr))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", f"import sys; {code}"],
        cwd=store.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout
    try:
        ready = re.fullmatch(r"ready: (http://127\.0\.0\.1:(\d+))", command.stdout.readline().strip())
        assert ready
        with urllib.request.urlopen(ready[1], timeout=HANG_S) as shown:
            assert b"MLflow" in shown.read()
        yield int(ready[2])
        command.send_signal(signal.SIGTERM)  # Ctrl-C takes the same way out
        out, noted = command.communicate(timeout=HANG_S)
    finally:
        command.kill()
    told = [line for line in noted.splitlines() if not line.startswith("still ")]  # where the machine is busy
    assert told[:1] == ["starting the MLflow UI; Ctrl-C ends it"]
    assert told[-1:] == ["the MLflow UI has ended"]
    assert out == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(ready[2])), timeout=HANG_S).close()


class _Forwarding(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int, to: int) -> None:
        super().__init__(("127.0.0.1", port), _Forward)
        self.to = to
        self.open: list[socket.socket] = []
        self.asked: list[bytes] = []  # the first line of each request


class _Forward(socketserver.BaseRequestHandler):
    server: _Forwarding

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.to)) as there:
            self.server.open += [self.request, there]
            back = threading.Thread(target=_pump, args=(there, self.request), daemon=True)
            back.start()
            _pump(self.request, there, self.server.asked)
            back.join()


def _pump(source: socket.socket, sink: socket.socket, asked: list[bytes] | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if asked is not None:
                asked += re.findall(rb"[A-Z]+ \S+ HTTP/1\.1\r\n", data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forwarded(port: int, to: int) -> Iterator[list[bytes]]:
    """Connections to ``port`` go on to the server at ``to``; afterwards they are cut and nobody listens there. What is
    asked meanwhile."""
    with _Forwarding(port, to) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.asked
        server.shutdown()
    for connection in server.open:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.ci
@pytest.mark.long
def test_the_page_is_a_server_that_goes_and_comes_back_and_has_everything_once(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # a busy machine's answer isn't asked for again
    run = folder.started(tmp_path)
    folder.metrics(run, range(5))
    shutil.copy(database, tmp_path)
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    place = tmp_path / "mlartifacts"
    place.write_text("no folder")
    with page(tmp_path / "mlflow.db") as served, ThreadPoolExecutor() as threads:
        full = recorder.record(folder.started(tmp_path, key="f" * 12), f"http://127.0.0.1:{served}", "other")
        assert (full.state, "its folder of artifacts may be full or read-only" in full.message) == (PENDING, True)
        place.unlink()
        with forwarded(port, served):
            assert recorder.record(run, uri, EXPERIMENT).state == "recording"
            follower = threads.submit(recorder.record, run, uri, EXPERIMENT, follow=True)
            folder.metrics(run, range(5, 10))
            wait_until(lambda: json.loads((run / "tracking.json").read_text())["marks"].get("train/loss") == [0, 9])
        folder.metrics(run, range(10, 20))
        folder.end(run)
        left = follower.result(HANG_S)
        assert left.state == PENDING
        assert "Connection refused" in left.message

        long = folder.started(tmp_path, key="1" * 12)
        folder.logged(
            long, *((step, {f"train/m{number}": float(step) for number in range(10)}) for step in range(1000))
        )
        folder.end(long)
        with forwarded(port, served) as asked:
            assert recorder.record(long, uri, EXPERIMENT).state == DONE
        assert 10 <= len([line for line in asked if b"mlflow-artifacts" not in line]) <= 20
        with forwarded(port, served):
            recorded = recorder.record(run, uri, EXPERIMENT)
            assert recorded.state == DONE
            (only,) = (found for found in store.runs(uri) if found.data.tags["paceline.run_key"] == folder.KEY)
            assert (only.info.run_id, only.info.status) == (recorded.run_id, "FINISHED")
            assert len(store.history(uri, only.info.run_id)) == 20
            assert "checkpoints/final.pt" in store.artifacts(uri, only.info.run_id, "checkpoints")
            (run / "tracking.json").unlink()
            assert recorder.record(run, uri, EXPERIMENT).run_id == recorded.run_id
            assert len(store.runs(uri)) == 2
            assert len(store.history(uri, only.info.run_id)) == 20
            lines = ui.addresses(uri, EXPERIMENT, ui.PageSelection(keys=(folder.KEY[:6],)))
            assert (len(lines), f"/runs/{recorded.run_id}?" in lines[-1]) == (3, True)
            with pytest.raises(PacelineError, match="no run 0%' in the MLflow experiment 'paceline'"):
                ui.addresses(uri, EXPERIMENT, ui.PageSelection(keys=("0%'",)))
            assert both_have_their_data(uri, f"sqlite:///{tmp_path}/mlflow.db", rounds=5)


def both_have_their_data(uri: str, other: str, rounds: int) -> bool:
    """Whether two runs have their data set as an input when both are the first to tell of it, at once."""
    from pipeline.tracking.mlflow_store import Store  # imports mlflow

    client, number = store.client(uri), store.client(uri).create_experiment("data")
    stores, at_once = [Store(uri), Store(other)], threading.Barrier(2)

    def log(store: Store, run_id: str, data: DataInput) -> None:
        at_once.wait(HANG_S)
        store.log_data(run_id, data)

    for name in map(str, range(rounds)):
        data = DataInput(name=name, digest=name, source="{}", schema="{}", profile="{}", context="train")
        runs = [client.create_run(number).info.run_id for _ in stores]
        with ThreadPoolExecutor() as threads:
            list(threads.map(log, stores, runs, [data] * 2))
        inputs = [client.get_run(run_id).inputs.dataset_inputs for run_id in runs]
        if [len(found) for found in inputs] != [1, 1]:
            return False
    return True
