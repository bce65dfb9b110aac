"""`doit server`: run one tracking server for a team until Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_atomic
from pipeline.core.locks import FileLock
from pipeline.core.web_address import LOOPBACK
from pipeline.tracking.address import shown, sqlite_path, sqlite_uri
from pipeline.tracking.mlflow import ui

_USER, _PASSWORD = "MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """tracking.server_*, with absolute addresses and folders."""

    store: str
    artifacts: str
    host: str
    port: int
    allowed_hosts: tuple[str, ...]
    auth: bool


def serve(settings: Settings, experiment: str, *, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Run the server until Ctrl-C or SIGTERM.

    ``say`` receives the places of records and files and the server's addresses, ``note`` progress and warnings. Raises
    UsageError: an invalid setting; PacelineError: the store can't be opened, another server uses it, or it ends.
    """
    check(settings, os.environ)
    with _only_server(settings.store):
        argv, env, url = ui.server_command(
            settings.store, settings.host, settings.port, artifacts=settings.artifacts, auth=settings.auth,
            allowed_hosts=settings.allowed_hosts,
        )  # fmt: skip
        ui.prepare(settings.store, note)
        env |= _login(settings) if settings.auth else {}
        say(f"records: {shown(settings.store)}\nfiles: {settings.artifacts}")
        if settings.host not in LOOPBACK and not settings.auth:
            note("WARNING: whoever reaches this address can read and change everything; tracking.server_auth=true asks")

        def links() -> list[str]:
            return [f"use it: doit train tracking.uri={url}", *ui.addresses(url, experiment)]

        ui.keep_up(argv, env, url, "the tracking server", links, say=say, note=note)


def check(settings: Settings, environ: Mapping[str, str]) -> None:
    """Validate the settings before anything is written. Raises UsageError."""
    if settings.store.startswith(("http://", "https://")):
        raise UsageError(
            f"tracking.server_store={shown(settings.store)} is a server already; a server's own store is a database",
            hint="tracking.server_store=sqlite:///mlflow.db, or postgresql://USER@HOST/NAME",
        )
    if not 0 < settings.port < 65536:
        raise UsageError(f"tracking.server_port={settings.port} must be a whole number from 1 to 65535")
    if settings.store.partition(":")[0] == "postgresql" and importlib.util.find_spec("pg8000") is None:
        raise UsageError("a PostgreSQL store needs pg8000, which is not installed", hint="pip install paceline[server]")
    if settings.artifacts.startswith("s3://") and importlib.util.find_spec("boto3") is None:
        raise UsageError(f"{settings.artifacts} needs boto3, which is not installed", hint="pip install paceline[s3]")
    if settings.auth and importlib.util.find_spec("flask_wtf") is None:
        raise UsageError("tracking.server_auth=true needs flask-wtf", hint="pip install paceline[server]")
    if settings.auth and not (environ.get(_USER) and environ.get(_PASSWORD)):
        raise UsageError(
            f"tracking.server_auth=true: the first login is taken from the environment, and {_USER} and {_PASSWORD} "
            "are not both set"
        )


@contextlib.contextmanager
def _only_server(store: str) -> Iterator[None]:
    """Lock a sqlite file: two servers would write to it with separate caches. Raises PacelineError."""
    database = sqlite_path(store)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(f"{database}.server.lock"))
    if not lock.take():
        raise PacelineError(
            f"another doit server on this computer has {database}", hint="use that one, or tracking.server_store=…"
        )
    try:
        yield
    finally:
        lock.release()


def _login(settings: Settings) -> dict[str, str]:
    """Write the configuration of MLflow's basic-auth app (database of hashed logins); return its variables."""
    database, artifacts = sqlite_path(settings.store), settings.artifacts
    beside = Path.cwd() if "://" in artifacts else Path(artifacts).parent
    folder = beside if database is None else database.parent
    config, address = folder / "mlflow-auth.ini", sqlite_uri(folder / "mlflow-auth.db")
    text = (
        "[mlflow]\ndefault_permission = READ\n"
        f"database_uri = {address.replace('%', '%%')}\n"  # % is special in ini files
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    write_atomic(config, text.encode())
    return {"MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32)}
