from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from pipeline import tracking
from pipeline.core.errors import UsageError
from pipeline.tracking.destinations import database_login, public_uri, redact, sqlite_path
from pipeline.tracking.store_calls import explained, plain_reason

ROOT = Path("/proj")


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        (None, "sqlite:////proj/mlflow.db"),
        ("", "sqlite:////proj/mlflow.db"),
        ("sqlite:///mlflow.db", "sqlite:////proj/mlflow.db"),
        ("sqlite:///a/b.db?timeout=9", "sqlite:////proj/a/b.db?timeout=9"),
        ("sqlite:////abs/x.db", "sqlite:////abs/x.db"),
        ("http://host:5000", "http://host:5000"),
        ("https://user:pw@host/prefix", "https://user:pw@host/prefix"),
        ("postgresql+psycopg://u:p@h/db", "postgresql+psycopg://u:p@h/db"),
    ],
)
def test_a_uri_means_the_same_store_from_every_folder(uri: str | None, absolute: str) -> None:
    assert tracking.absolute_uri(uri, ROOT) == absolute


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("http://", "names no host"),
        ("https://u:hunter2@", "names no host"),
        ("http://h:notaport", "has a host or port that is none"),
        ("http://h:70000", "has a host or port that is none"),
        ("http://u:hunter2@[::1", "has a host that is none"),
        ("http://a b", "holds a space or another character that no address has"),
        ("postgresql://u:hunter2@[::1/db", "has a host that is none"),
        ("./mlruns", "is not a store that MLflow can write; valid: sqlite:///FILE, http://HOST:PORT"),
        ("ftp://u:hunter2@host", "is not a store that MLflow can write; valid: sqlite:///FILE"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_an_address_that_is_no_store_is_refused_before_anything_starts(uri: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"^tracking\.uri=\S+ (\S+ )?{why}") as error:
        tracking.absolute_uri(uri, ROOT)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "uri", ["postgresql:///db?host=/run/x", "postgresql://u:a b@h/db", "http://[::1]:5000", "http://h:"]
)
def test_an_odd_address_that_means_a_store_stays(uri: str) -> None:
    assert tracking.absolute_uri(uri, ROOT) == uri


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a%b?c#d", "a b"])
def test_a_database_lies_in_the_project_whatever_its_path_holds(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    for uri in (None, "sqlite:///mlflow.db", "sqlite:///mlflow.db?timeout=9"):
        absolute = tracking.absolute_uri(uri, root)
        assert make_url(absolute).database == str(root / "mlflow.db")  # what MLflow opens
        assert sqlite_path(absolute) == root / "mlflow.db"
    assert sqlite_path("http://host") is None


def test_credentials_go_by_the_environment_only() -> None:
    uri = "http://ann:p%40ss@host:5000/x"
    command = tracking.recorder_command(Path("runs/k"), uri, "paceline", follow=True)
    assert "--uri" not in command
    assert "--follow" in command
    assert tracking.recorder_env(uri) == {
        "MLFLOW_TRACKING_URI": "http://host:5000/x",
        "MLFLOW_TRACKING_USERNAME": "ann",
        "MLFLOW_TRACKING_PASSWORD": "p@ss",
    }
    assert "MLFLOW_TRACKING_PASSWORD" not in tracking.recorder_env("http://ann@host:5000")  # the environment's counts
    plain = tracking.recorder_command(Path("runs/k"), "http://host:5000", "paceline")
    assert plain[plain.index("--uri") + 1] == "http://host:5000"
    assert "--follow" not in plain
    assert "--uri" not in tracking.prepare_command("postgresql://u:secret@h/db")
    assert tracking.recorder_env("postgresql://u:secret@h/db") == {"MLFLOW_TRACKING_URI": "postgresql://u:secret@h/db"}


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("API request to endpoint /api failed with error code 401 != 200.", "set MLFLOW_TRACKING_USERNAME and MLFLOW_"),
        ("401 Client Error:", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        (
            "When an mlflow-artifacts URI was supplied, the tracking URI must be a valid",
            "set tracking.uri to its addre",
        ),
    ],
)
def test_a_known_failure_is_said_with_what_mends_it(text: str, fix: str) -> None:
    assert fix in str(explained(text))


def test_what_is_shown_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    assert redact("401 for t0ken at http://a:b@c@host/x and https://host") == (
        "401 for *** at http://***@host/x and https://host"
    )
    assert public_uri("http://ann:pw@host:5000") == public_uri("http://host:5000") == "http://host:5000"
    assert public_uri("postgresql://u:pw@h/db") == "postgresql://***@h/db"


@pytest.mark.parametrize(
    ("line", "uri", "login"),
    [
        ("db:*:*:ann:p\\:w/x", "postgresql://ann@db/runs", "postgresql+pg8000://ann:p%3Aw%2Fx@db/runs"),
        ("*:5433:runs:ann:pw", "postgresql://ann@db:5433/runs", "postgresql+pg8000://ann:pw@db:5433/runs"),
        ("*:5433:runs:ann:pw", "postgresql://ann@db/runs", "postgresql+pg8000://ann@db/runs"),
        ("", "postgresql+psycopg2://ann:mine@db/runs", "postgresql+psycopg2://ann:mine@db/runs"),
        ("*:*:*:*:pw", "mysql://ann@db/runs", "mysql://ann@db/runs"),
    ],
)
def test_the_password_of_postgresql_comes_from_where_its_own_programs_have_it(
    tmp_path: Path, line: str, uri: str, login: str
) -> None:
    file = tmp_path / ".pgpass"
    file.write_text(f"# mine\n{line}\n")
    file.chmod(0o600)
    assert database_login(uri, {}, tmp_path) == login
    file.chmod(0o644)  # others may read it: libpq takes none of it either
    assert "pw" not in database_login(uri, {}, tmp_path).partition("@")[0]
    if uri == "postgresql://ann@db/runs":
        assert database_login(uri, {"PGPASSWORD": "é"}, tmp_path) == "postgresql+pg8000://ann:%C3%A9@db/runs"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
         "Remote end closed connection without response"),
        ("ProtocolError('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
         "Connection reset by peer"),
        ("ResponseError('too many 502 error responses')", "it answers 502 (Bad Gateway)"),
        ("ProtocolError('Connection aborted.', BadStatusLine('SSH-2.0-OpenSSH_9\\r\\n'))",
         r"it speaks no HTTP: SSH-2.0-OpenSSH_9\r\n"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
         "self-signed certificate (_ssl.c:1006)'))",
         "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
    ],
)  # fmt: skip
def test_a_request_that_failed_is_said_without_the_exceptions_around_it(cause: str, said: str) -> None:
    at = "API request to http://h/api failed with exception HTTPConnectionPool(host='h', port=1): Max retries exceeded"
    assert plain_reason(f"{at} with url: /api (Caused by {cause})") == said
    locked = plain_reason("(sqlite3.OperationalError) database is locked\n[SQL: INSERT INTO tags VALUES (?)]")
    assert locked.startswith("another program holds its database locked (sqlite lets one write at a time)")
    assert plain_reason("(sqlite3.OperationalError) near 'x'") == "(sqlite3.OperationalError) near 'x'"


def test_no_proxy_is_asked_for_a_server_on_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "lab.example")
    monkeypatch.delenv("no_proxy", raising=False)
    assert tracking.recorder_env("http://ann@localhost:5000")["no_proxy"] == "lab.example,localhost"
    assert tracking.recorder_env("http://[::1]:5000")["no_proxy"] == "lab.example,::1"
    assert "no_proxy" not in tracking.recorder_env("http://host:5000")
    assert "no_proxy" not in tracking.recorder_env("sqlite:///mlflow.db")
