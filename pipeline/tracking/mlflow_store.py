"""MLflow's store as records use it: finds or creates a run, sends points and files, and explains failures.

Only this module imports mlflow (1–3 s, 80–140 MB), and only the recorder process imports this module.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from mlflow.exceptions import MlflowException

from pipeline.core.locks import held
from pipeline.tracking.description import DataInput
from pipeline.tracking.destinations import database_login, public_uri, recorder_env, redact, sqlite_path, sqlite_uri
from pipeline.tracking.points import Point
from pipeline.tracking.store_calls import (
    ANSWER_TIMEOUT_S,
    Bounded,
    StoreError,
    answer_timeout_s,
    explained,
    plain_reason,
)

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a repeated create_run makes a second run; the recorder checks first
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(ANSWER_TIMEOUT_S),
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # saves a request at each end
}
os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
# whatever the user has set: asynchronous logging silently drops points when a server is down
os.environ["MLFLOW_ENABLE_ASYNC_LOGGING"] = "false"
logging.getLogger("alembic").setLevel(logging.ERROR)

# mlflow reads the settings above when it is imported.
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag  # noqa: E402
from mlflow.tracking.client import MlflowClient  # noqa: E402

_DATA_TRIES = 3
_FOLDER_CHARS = 60  # of an experiment's folder: a character has up to four bytes, and a file system takes 255
_PORTS = {"postgresql": 5432, "mysql": 3306}
_MAKE_TIMEOUT_S = 600.0  # creating the tables takes 3–10 s of CPU time, on a busy host minutes
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # opens the training view, not GenAI's
_TOKEN_TAG = "paceline.recorder"
_REJECTIONS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_NOT_WRITABLE = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EROFS}|{errno.EACCES})\]")  # for artifacts
_NO_FOLDER = re.compile(rf"\[Errno (?:{errno.ENOTDIR}|{errno.EEXIST})\] [^:]+: '([^']+)'")
_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")

Item = TypeVar("Item")


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn every failure into a StoreError: mlflow raises those of requests, SQLAlchemy, alembic and the system too."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        code = error.error_code if isinstance(error, MlflowException) else None
        explanation = explained(str(error))
        # the folder of artifacts, or a folder above it, can't be created because a file has its name
        if explanation is None and (no_folder := _NO_FOLDER.search(str(error))):
            path = Path(no_folder[1])
            file = next((candidate for candidate in (path, *path.parents) if candidate.is_file()), None)
            if file is not None:
                explanation = f"{file} is a file, where a folder of artifacts should be: move it away"
        final = code in _REFUSALS or explanation is not None or _NOT_WRITABLE.search(str(error)) is not None
        raise StoreError(explanation or _reason(error), rejected=code in _REJECTIONS, final=final) from error


def _reason(error: Exception) -> str:
    text = redact(str(error))
    if "Read timed out" in text or "ConnectTimeout" in text:
        return f"no answer within {answer_timeout_s():g} s"
    if system := re.search(r"\[Errno -?\d+\] ([^'\"\n)]+)", text):
        return system[1].rstrip(" :")
    return (plain_reason(text.strip()).splitlines() or [type(error).__name__])[0][:300]


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run in the store."""

    run_id: str
    name: str
    status: str
    params: Mapping[str, str]
    data: Sequence[tuple[str, str]]  # name and digest of each data set that is its input
    last_steps: Mapping[str, int]  # metric → step of its last point


class Store:
    """A tracking server or database. Every method raises StoreError.

    MLflow creates the tables of a sqlite database when it first opens it. That is done under a file lock, because
    concurrent processes would corrupt it.
    """

    items_per_call = 1000  # MLflow's limit: points, parameters and tags together

    def __init__(self, uri: str) -> None:
        environment = recorder_env(uri)
        os.environ.update(environment)
        database = sqlite_path(uri)
        self._artifacts = database.parent / "mlartifacts" if database else None
        with store_errors():
            if database:
                _make_tables(database.resolve())
                _refuse_damaged(database)
            address = database_login(environment["MLFLOW_TRACKING_URI"], os.environ, Path.home())
            if not database and not address.startswith("http"):
                _connect(address)
            client = MlflowClient(tracking_uri=address, registry_uri=address)
            self._client = cast(MlflowClient, Bounded(client)) if address.startswith("http") else client
            if database:
                self._client.get_experiment("0")  # the client opens its database on the first call
        self.name = public_uri(uri)

    def experiment_id(self, name: str) -> str:
        """Find or create the experiment; for sqlite, its artifact folder lies next to the database."""
        with store_errors():
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                folder = re.sub(r"[^\w.-]+", "_", name)[:_FOLDER_CHARS]
                location = (self._artifacts / folder).as_uri() if self._artifacts else None
                try:
                    return str(self._client.create_experiment(name, artifact_location=location, tags=_EXPERIMENT_TAGS))
                except MlflowException:
                    experiment = self._client.get_experiment_by_name(name)  # another recorder may have created it
                    if experiment is None:
                        raise
            if experiment.lifecycle_stage != "active":
                raise StoreError(
                    f"its experiment {name!r} is deleted (restore it, or set tracking.experiment)", final=True
                )
            return str(experiment.experiment_id)

    def open_run(
        self, experiment_id: str, key: str, token: str, known_id: str | None, name: str, start_ms: int | None
    ) -> StoredRun:
        """Return the MLflow run of the run ``key``; create it if there is none.

        There may be several, because the answer to a creation may be lost. Then the run with ``known_id`` is chosen,
        else the oldest, and others that this recorder made (they have its ``token``) are deleted.
        """
        with store_errors():
            runs = self._find(experiment_id, key)
            if not runs:
                # by these tags the run is found again, and later known as this recorder's own
                tags = {"paceline.run_key": key, _TOKEN_TAG: token}
                runs = [self._client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=name)]
            chosen = next((run for run in runs if run.info.run_id == known_id), runs[0])
            self._delete_others(runs, chosen, token)
        inputs = chosen.inputs.dataset_inputs if chosen.inputs else []
        return StoredRun(
            run_id=str(chosen.info.run_id),
            name=str(chosen.info.run_name),
            status=str(chosen.info.status),
            params=dict(chosen.data.params),
            data=[(item.dataset.name, item.dataset.digest) for item in inputs],
            last_steps={metric.key: int(metric.step) for metric in chosen.data.to_proto().metrics},
        )

    def steps(self, run_id: str, key: str) -> list[int]:
        """Return the steps of all points of a metric."""
        with store_errors():
            return [int(point.step) for point in self._client.get_metric_history(run_id, key)]

    def _find(self, experiment_id: str, key: str) -> list[Run]:
        quoted = key.replace("'", "")
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`paceline.run_key` = '{quoted}'")
        return sorted(runs, key=lambda run: (run.info.start_time or 0, run.info.run_id))

    def _delete_others(self, runs: Sequence[Run], chosen: Run, token: str) -> None:
        for run in runs:
            if run is not chosen and run.data.tags.get(_TOKEN_TAG) == token:
                self._client.delete_run(run.info.run_id)

    def remove_duplicates(self, experiment_id: str, key: str, token: str, run_id: str) -> None:
        """Delete runs that a slow server created after the call had timed out, all but ``run_id``."""
        with store_errors():
            runs = self._find(experiment_id, key)
            chosen = next((run for run in runs if run.info.run_id == run_id), None)
            if chosen is not None:
                self._delete_others(runs, chosen, token)

    def set_name(self, run_id: str, name: str, status: str | None = None) -> None:
        with store_errors():
            self._client.update_run(run_id, status=status, name=name)

    def set_ended(self, run_id: str, status: str, end_ms: int | None) -> None:
        """Set the final status FINISHED, PRUNED, FAILED or KILLED; ``end_ms`` in unix milliseconds."""
        # MLflow has no status for pruned runs; as FINISHED they would look fully trained
        with store_errors():
            self._client.set_terminated(run_id, "KILLED" if status == "PRUNED" else status, end_time=end_ms)

    def log(self, run_id: str, points: Sequence[Point], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Send everything in one request if it fits, and leave out what MLflow refuses."""

        def send(batch: Sequence[Metric | Param | RunTag]) -> None:
            self._client.log_batch(
                run_id,
                metrics=[item for item in batch if isinstance(item, Metric)],
                params=[item for item in batch if isinstance(item, Param)],
                tags=[item for item in batch if isinstance(item, RunTag)],
            )

        items: list[Metric | Param | RunTag] = [Param(name, value) for name, value in params.items()]
        items += [RunTag(name, value) for name, value in tags.items()]
        items += [Metric(point.key, point.value, point.time_ms, point.step) for point in points]
        _send(send, items, self.items_per_call)

    def log_data(self, run_id: str, data: DataInput) -> None:
        """Log the run's data set as its input; repeating is harmless."""
        item = Dataset(data.name, data.digest, "paceline", data.source, schema=data.schema, profile=data.profile)
        to_send = [DatasetInput(item, [InputTag("mlflow.data.context", data.context)])]
        for _ in range(_DATA_TRIES):  # of two recorders that create it at once, MLflow refuses one
            to_send = _send(lambda batch: self._client.log_inputs(run_id, batch), to_send, 1)

    def fetch(self, run_id: str, names: Sequence[str], target: Path) -> bool:
        """Download those of the run's artifacts that ``names`` lists to the folder ``target``. False: no such run."""
        with store_errors():
            try:
                self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise
            stored = {item.path for item in self._client.list_artifacts(run_id)}
            for name in stored.intersection(names):
                self._client.download_artifacts(run_id, name, str(target))
        return True

    def log_file(self, run_id: str, path: Path, folder: str | None) -> None:
        """Upload a file under its own name into the artifact folder ``folder`` (None: the top)."""
        with store_errors():
            self._client.log_artifact(run_id, str(path), folder)


def _send(send: Callable[[list[Item]], object], items: Sequence[Item], limit: int) -> list[Item]:
    """Send batches of at most ``limit`` items; return the refused items, found by sending halves of a refused batch."""
    refused: list[Item] = []
    for start in range(0, len(items), limit):
        batch = list(items[start : start + limit])
        try:
            with store_errors():
                send(batch)
        except StoreError as error:
            if not error.rejected:
                raise
            refused += batch if len(batch) == 1 else _send(send, batch, (len(batch) + 1) // 2)
    return refused


def _connect(address: str) -> None:
    """Fail fast if a database can't be opened: MLflow itself retries for 101 s, whatever the reason."""
    from sqlalchemy import create_engine, make_url  # late import: not needed for a server

    url = make_url(address)
    port = url.port or _PORTS.get(url.get_backend_name())
    if url.host and port:
        socket.create_connection((url.host, port), timeout=ANSWER_TIMEOUT_S).close()
    engine = create_engine(url)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _refuse_damaged(database: Path) -> None:
    """Fail fast if the path is a folder or a file of another kind: MLflow would retry for 101 s here, too."""
    with contextlib.closing(sqlite3.connect(database, timeout=0.0)) as connection:
        try:
            connection.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            if explained(str(error)) is not None:  # otherwise it is only locked for a moment
                raise


def _make_tables(database: Path) -> None:
    """Create a new database under a temporary name and rename it.

    MLflow creates the tables one by one for seconds, and refuses a database forever that was left half-made.
    """

    def has_tables() -> bool:
        return database.exists() and database.stat().st_size > 0

    if has_tables():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with held(Path(f"{database}.lock"), timeout_s=_MAKE_TIMEOUT_S):
        for leftover in database.parent.glob(f"{glob.escape(database.name)}.*.new*"):  # of a killed process
            leftover.unlink(missing_ok=True)
        if has_tables():  # another process made them while this one waited for the lock
            return
        new_database = database.with_name(f"{database.name}.{os.getpid()}.new")
        with contextlib.chdir("/"):  # MLflow writes the working directory into SQL, which a quote in it would break
            MlflowClient(tracking_uri=sqlite_uri(new_database)).get_experiment("0")
        new_database.replace(database)
