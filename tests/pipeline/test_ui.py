"""The server of `doit ui`; a real one is used in test_tracking_servers.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.tracking import ui
from tests.waiting import HANG_S

pytestmark = pytest.mark.slow


def test_the_server_is_light_and_shows_the_store() -> None:
    argv, env, url = ui.ui_command("sqlite:////proj/mlflow.db")
    assert argv[1:4] == ["-m", "mlflow", "server"]
    assert argv[argv.index("--backend-store-uri") + 1] == "sqlite:////proj/mlflow.db"
    assert argv[argv.index("--artifacts-destination") + 1] == "/proj/mlartifacts"
    assert argv[argv.index("--workers") + 1] == "1"
    assert env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert env["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert url == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"


def test_credentials_of_a_database_stay_out_of_the_process_list() -> None:
    argv, env, _ = ui.ui_command("postgresql://u:hunter2@h/db")
    assert "hunter2" not in " ".join(argv)
    assert env["MLFLOW_BACKEND_STORE_URI"] == "postgresql://u:hunter2@h/db"


def test_a_tracking_server_shows_its_runs_itself() -> None:
    said: list[str] = []
    assert ui.ui_command("http://u:pw@host:5000") == ([], {}, "http://host:5000")
    ui.serve("http://u:pw@127.0.0.1:1", "paceline", say=said.append)
    assert said == ["the tracking server shows the runs itself: http://127.0.0.1:1"]


def test_a_taken_port_is_an_error_and_no_port_means_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PacelineError, match=rf"127\.0\.0\.1, port {port}: Address already in use"):
            ui.ui_command("sqlite:////x.db", port=port)
        assert f":{port}" not in ui.ui_command("sqlite:////x.db")[2]


def test_other_hosts_are_answered_when_the_server_listens_on_one() -> None:
    argv, _, url = ui.ui_command("sqlite:////x.db", host="0.0.0.0")
    names = argv[argv.index("--allowed-hosts") + 1].split(",")
    assert "localhost:*" in names
    assert url.split("//")[1].split(":")[0] in names


def test_a_store_that_cannot_be_opened_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_PREPARE_TIMEOUT_S", HANG_S)
    (tmp_path / "mlflow.db").write_text("this is no database" * 100)
    with pytest.raises(PacelineError, match=r"mlflow\.db cannot be opened"):
        ui.serve(f"sqlite:///{tmp_path}/mlflow.db", "paceline")
