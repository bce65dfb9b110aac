"""Recording to a team's server: a real one, with logins, on a real PostgreSQL; and to an older database."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import sqlite3
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pipeline import tracking
from pipeline.tracking import recorder
from pipeline.tracking.destinations import DONE, PENDING, database_login
from pipeline.tracking.store_calls import explained
from tests import postgres_fixture
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_server import served
from tests.pipeline.tracking_store import EXPERIMENT
from tests.postgres_fixture import PASSWORD
from tests.waiting import HANG_S

pytestmark = pytest.mark.slow
ADMIN_PASSWORD = "correct-horse-42"


def get(url: str, host: str) -> tuple[int, str]:
    try:
        asked = urllib.request.Request(url, headers={"Host": host})
        with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all requests from here on."""
    import requests

    asked: list[str] = []
    send = requests.Session.request

    def counting(self: requests.Session, method: str, url: str, *rest: Any, **more: Any) -> requests.Response:
        asked.append(urlsplit(url).path)
        return send(self, method, url, *rest, **more)

    monkeypatch.setattr(requests.Session, "request", counting)
    return asked


def command_lines(pid: int) -> str:
    """Of a process and all below it."""
    below = subprocess.run(["ps", "-eo", "ppid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in below.splitlines()]
    found, known = "", {str(pid)}
    for parent, mine, words in rows:
        if parent in known or mine in known:
            known.add(mine)
            found += words + "\n"
    return found


@pytest.mark.ci
@pytest.mark.long  # one without logins on a file: test_tracking_servers.py
def test_a_server_with_logins_on_postgresql_keeps_a_run_and_no_password_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder.started(tmp_path)
    values = {f"train/m{number}": 0.5 for number in range(9)}
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 1001):
            odd = {"train/m3": math.nan} if step == 500 else {}
            row = {"t": folder.T0 + step, "step": step, "epoch": 1}
            file.write(json.dumps({**row, "metrics": {"train/loss": 1 / step, **values, **odd}}) + "\n")
    folder.end(run, steps=1000)
    (tmp_path / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path}/auth.db"
    )
    login = {
        "MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": "lead",
        "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN_PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(),
    }
    with postgres_fixture.running() as database, contextlib.ExitStack() as stack:
        monkeypatch.setenv("PGPASSWORD", "not-this-one")
        refused = recorder.record(run, database.uri, EXPERIMENT, give_up_s=HANG_S)
        assert refused.state == PENDING
        assert 'its database refuses the login (password authentication failed for user "team")' in refused.message
        address = database_login(database.uri, {"PGPASSWORD": PASSWORD}, tmp_path)
        server = served(tmp_path, "--app-name", "basic-auth", store=address, artifacts=f"{tmp_path}/files", env=login)
        url, pid = stack.enter_context(server)
        lines = command_lines(pid)
        assert "mlflow server" in lines
        assert ADMIN_PASSWORD not in lines
        assert PASSWORD not in lines
        assert get(f"{url}/health", "evil.example")[0] == 200  # tells nothing
        code, text = get(f"{url}/api/2.0/mlflow/experiments/search?max_results=1", "evil.example")
        assert code == 403
        assert "mlflow server --allowed-hosts NAME,NAME:*" in str(explained(text))
        refused = recorder.record(run, url, EXPERIMENT, give_up_s=HANG_S)
        assert refused.state == PENDING
        assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in refused.message
        for name, value in tracking.recorder_env(f"{url.replace('//', f'//lead:{ADMIN_PASSWORD}@')}").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{HANG_S:.0f}")  # on a busy machine no request is sent again
        asked = counted(monkeypatch)
        recorded = recorder.record(run, url, EXPERIMENT)
        assert recorded.state == DONE, recorded.message
        assert len([path for path in asked if "artifacts" not in path]) <= 20, asked
        (only,) = store.runs(url)
        assert only.data.tags["paceline.nonfinite"] == "train/m3: NaN at step 500"
        assert len(store.history(url, str(recorded.run_id))) == 1000
        assert "checkpoints/final.pt" in store.artifacts(url, str(recorded.run_id), "checkpoints")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written if path.name == "final.pt" and "files" in path.parts]
    assert not [path for path in written if ADMIN_PASSWORD.encode() in path.read_bytes()]
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]


@pytest.mark.ci
@pytest.mark.long
def test_a_database_of_an_older_mlflow_is_left_as_it_is_and_the_command_that_mends_it_is_named(
    tmp_path: Path, database: Path
) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(database.read_bytes())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    before = path.read_bytes()
    recorded = recorder.record(folder.started(tmp_path), f"sqlite:///{path}", EXPERIMENT, give_up_s=60)
    assert recorded.state == PENDING
    assert "its database is of another MLflow (schema 451aebb31d03" in recorded.message
    assert "mlflow db upgrade" in recorded.message
    assert path.read_bytes() == before
