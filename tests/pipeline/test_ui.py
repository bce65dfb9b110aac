"""The server of `doit ui`; a real one is used in test_tracking_servers.py."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.tracking import mlflow_ui as ui
from pipeline.tracking.mlflow_ui import RecordedRun, shared_view
from tests.pipeline import tracking_store as store
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_the_server_is_light_and_shows_the_store() -> None:
    argv, env, url = ui.server_command("sqlite:////proj/mlflow.db", None)
    assert argv[1:4] == ["-m", "mlflow", "server"]
    assert argv[argv.index("--backend-store-uri") + 1] == "sqlite:////proj/mlflow.db"
    assert argv[argv.index("--artifacts-destination") + 1] == "/proj/mlartifacts"
    assert argv[argv.index("--workers") + 1] == "1"
    assert env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert env["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert url == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
    argv, env, _ = ui.server_command("postgresql://u:hunter2@h/db", None)
    assert "hunter2" not in " ".join(argv)  # the process list
    assert env["MLFLOW_BACKEND_STORE_URI"] == "postgresql+pg8000://u:hunter2@h/db"


def test_a_tracking_server_shows_its_runs_itself() -> None:
    said: list[str] = []
    ui.serve("http://u:pw@127.0.0.1:1", "paceline", say=said.append, note=said.append)
    assert said == ["the tracking server shows the runs itself: http://127.0.0.1:1"]


def test_a_taken_port_is_an_error_and_no_port_means_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PacelineError, match=rf"127\.0\.0\.1, port {port}: Address already in use\n"):
            ui.server_command("sqlite:////x.db", port)
        assert f":{port}" not in ui.server_command("sqlite:////x.db", None)[2]


@pytest.mark.ci
@pytest.mark.long
def test_a_store_that_cannot_be_opened_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database" * 100)
    with pytest.raises(PacelineError, match=r"mlflow\.db cannot be opened: its database is damaged: .* back$"):
        ui.serve(f"sqlite:///{tmp_path}/mlflow.db", "paceline", say=print, note=print)


RUNS = [
    RecordedRun(run_id="a" * 32, key="cf0848", metrics=["val/accuracy", "lr", "images_per_s"],
     params={"optimizer.lr": "0.1", "seed": "1"}, data=["digits 9cf2"], name="lr=0.1 of a name that is longer"),
    RecordedRun(run_id="b" * 32, key="495e1d", metrics=["val/accuracy"], params={"optimizer.lr": "0.2", "seed": "1"},
     data=["digits 9cf2"]),
]  # fmt: skip


def test_the_table_shows_the_metrics_that_matter_and_the_parameters_and_data_that_differ() -> None:
    state = json.loads(shared_view(RUNS))
    columns = ["metrics.`val/accuracy`", "params.`optimizer.lr`"]
    assert state["selectedColumns"] == ["attributes.`Duration`", *columns]
    assert state["columnOrder"] == [*columns, "attributes.`Run Name`"]
    assert state["columnWidths"] == dict(zip(state["columnOrder"], [116, 116, 277], strict=True))
    state = json.loads(shared_view(RUNS, ["lr"]))
    assert state["chartsSearchFilter"] == "lr"
    assert state["selectedColumns"][1:3] == ["metrics.`lr`", "metrics.`val/accuracy`"]
    others = shared_view([RUNS[0], replace(RUNS[1], data=["cifar10 0b1c"])])
    assert json.loads(others)["selectedColumns"][:2] == ["attributes.`Dataset`", "attributes.`Duration`"]


def test_charts_of_accuracy_and_loss_come_first() -> None:
    names = ["network/sent_bytes", "system/node0/cpu", "test/loss", "train/lr", "train/loss", "mine/x", "train_s"]
    state = json.loads(shared_view([replace(RUNS[0], metrics=[*names, "val/loss", "val/accuracy"])]))
    assert [chart["metricKey"] for chart in state["compareRunCharts"]] == ["val/accuracy", "train/loss", "val/loss"]
    assert [section["name"] for section in state["compareRunSections"]] == ["curves"]
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {"curves"}


def test_addresses_open_on_the_chosen_runs() -> None:
    state = json.loads(shared_view(RUNS, only=True))
    assert state["searchFilter"] == f"attributes.run_id IN ('{'a' * 32}', '{'b' * 32}')"
    pages = ui.pages("http://h:1", "7", "v", ["aa", "bb"])
    start, kind = "http://h:1/#/experiments/7/runs", "workflowType=machine_learning"
    assert pages[:2] == [
        f"charts: {start}?viewStateShareKey=v&compareRunsMode=CHART&{kind}",
        f"table: {start}?viewStateShareKey=v&{kind}",
    ]
    both = f"compare-runs?runs=%5B%22aa%22%2C%20%22bb%22%5D&experiments=%5B%227%22%5D&{kind}"  # runs must come first
    assert pages[2:] == [f"side by side: http://h:1/#/{both}"]
    one = ui.pages("http://h:1", "7", "", ["aa"])
    assert one[1:] == [f"table: {start}?{kind}", f"run: {start}/aa?{kind}"]


_HEALTHY = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", sys.argv[1]])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_the_server_and_its_workers_end_with_a_command_that_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-c", _HEALTHY, str(port)]
    code = (
        "from pathlib import Path; from pipeline.tracking import mlflow_ui as ui; ui.run_server("
        f"{argv!r}, {{}}, 'http://127.0.0.1:{port}', list, say=lambda text: print(text, flush=True), note=print)"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=store.ROOT, stdout=subprocess.PIPE, text=True)
    assert command.stdout
    try:
        next(line for line in command.stdout if line.startswith("ready: "))
        assert len(_mentioned(str(port))) == 3  # the guard, the server and its worker
    finally:
        command.kill()
        command.communicate()
    wait_until(lambda: not _is_listening(port) and not _mentioned(str(port)))


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _mentioned(word: str) -> list[str]:
    """The command lines that have it."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if word in line.split()]
