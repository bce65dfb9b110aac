"""Where runs are recorded: MLflow's store, and other trackers.

First the state of a record in the run folder (tracking.json; tracking.NAME.json for another tracker), then addresses
and credentials of MLflow's store, the destinations that are configured, and the recorder's command lines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from pipeline.config.schema import TrackingConfig
from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_text, write_json_in
from pipeline.core.redact import hide, secrets_of_environment, without_secrets
from pipeline.runs.folder import SWEEPS
from trainers.contract import run_folder

TENSORBOARD = "tensorboard"
"""The tracker that ``tracking.tensorboard=true`` adds to any other choice; it has no settings."""
RECORDING, PENDING, DONE = "recording", "pending", "done"

# the files of a run folder that a record is made from: if one changes, the record is incomplete
_INPUTS = (
    run_folder.CONFIG, run_folder.CONFIG_YAML, run_folder.KEY, run_folder.PROVENANCE, SWEEPS, "accepted_as.json",
    run_folder.CHANGES, run_folder.PLAN, run_folder.JOURNAL, run_folder.METRICS, run_folder.SYSTEM_METRICS,
    run_folder.SUMMARY, run_folder.FINAL_WEIGHTS_NOTES, run_folder.FINAL_WEIGHTS, "evaluation/*",
)  # fmt: skip


@dataclass(kw_only=True)
class TrackingState:
    """The content of tracking.json: what a destination has of the run. The field names are those in the file."""

    uri: str  # this and ``experiment``: as ``Destination.identity`` has them
    experiment: str
    token: str  # marks the MLflow runs that this record created
    state: str = RECORDING  # done, pending (the store failed) or recording (in progress)
    run_id: str | None = None
    experiment_id: str | None = None
    unsure: bool = False  # the answer to the creation of a run may have been lost, so the store may have one more
    attempt: int = 0
    system_offset_bytes: int = 0
    # Metric → [lap, step] of its last recorded point (``points.Mark``), as a resumed attempt repeats earlier steps.
    # The lap counts how often the metric's steps have begun anew, as in a script that counts from 0 in each epoch.
    marks: dict[str, list[int]] = field(default_factory=dict)
    nonfinite: dict[str, str] = field(default_factory=dict)  # metric → its first non-finite value, in words
    artifacts: dict[str, list[int]] = field(default_factory=dict)  # name of each uploaded file → its stamp
    inputs: dict[str, list[int]] = field(default_factory=dict)  # stamps of what the record was made from
    message: str = ""
    refused: bool = False  # a retry will fail with the same ``message`` until the user fixes the cause
    tracker: str | None = None

    def save(self, folder: int) -> None:
        """Write tracking.json atomically into the folder open at this descriptor. Raises OSError."""
        write_json_in(folder, file_of(self.tracker), asdict(self))

    def finish(self, inputs: dict[str, list[int]], folder: int) -> None:
        """Note that everything of ``inputs`` is recorded. Raises OSError."""
        self.inputs, self.state, self.message = inputs, DONE, ""
        self.save(folder)


def file_of(tracker: str | None) -> str:
    return run_folder.TRACKING if tracker is None else f"tracking.{tracker}.json"


def trackers_of(run_dir: Path) -> list[str]:
    """Return the trackers besides MLflow in which the run was to be recorded."""
    return sorted(path.name[len("tracking.") : -len(".json")] for path in run_dir.glob("tracking.*.json"))


def load(run_dir: Path, tracker: str | None = None) -> TrackingState | None:
    """Return the state; None if it is missing or damaged. Then all is recorded again, which adds nothing twice."""
    raw = documents.read_or_empty(run_dir / file_of(tracker))
    annotations = {item.name: item.type for item in fields(TrackingState)}  # as text: "str | None"
    try:
        state = TrackingState(**{name: value for name, value in raw.items() if name in annotations})
    except TypeError:  # a field is missing
        return None
    # compare each value with its annotation, of dict[str, int] only with dict
    for name, value in vars(state).items():
        allowed_types = [word.strip().partition("[")[0] for word in str(annotations[name]).split("|")]
        if type(value).__name__.removesuffix("Type") not in allowed_types:  # NoneType
            return None
    return state


def input_stamps(run_dir: Path) -> dict[str, list[int]]:
    """Return name → [bytes, mtime in ns] of every file that a record is made from."""
    paths = (path for pattern in _INPUTS for path in sorted(run_dir.glob(pattern)) if path.is_file())
    return {str(path.relative_to(run_dir)): stamp_of(path) for path in paths}


def stamp_of(path: Path) -> list[int]:
    """Return [bytes, mtime in ns]. Raises OSError."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


# ---------------------------- addresses of MLflow's store, whose credentials stay out of messages and process lists
URI_VARIABLE = "MLFLOW_TRACKING_URI"
_USER_VARIABLE = "MLFLOW_TRACKING_USERNAME"
_PASSWORD_VARIABLE = "MLFLOW_TRACKING_PASSWORD"
_SECRET_VARIABLES = (_PASSWORD_VARIABLE, "MLFLOW_TRACKING_TOKEN")
_NAMES_OF_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_NO_PROXY = "no_proxy"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def sqlite_uri(database: Path) -> str:
    """Return the address of a database file in SQLAlchemy's syntax, where ? ends the path and %20 is a space."""
    return f"sqlite:///{_quoted(database)}"


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3F")


def absolute_uri(uri: str | None, root: Path) -> str:
    """Return ``uri`` in a form that means the same store from every working directory; for None, mlflow.db in ``root``.

    Raises UsageError: a file store, which MLflow no longer writes, an unknown scheme, or a missing host.
    """
    if not uri:
        return sqlite_uri(root.resolve() / "mlflow.db")
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme.startswith("sqlite"):
        path, mark, query = uri.removeprefix(f"{scheme}://").removeprefix("/").partition("?")
        if path in ("", ":memory:"):
            raise UsageError(f"tracking.uri={uri} names no file", hint="tracking.uri=sqlite:///mlflow.db")
        return f"{scheme}:///{Path(_quoted(root.resolve())) / path}{mark}{query}"
    if scheme in ("http", "https") or scheme.partition("+")[0] in _DATABASES:
        try:
            urlsplit(uri)
        except ValueError:
            fault: str | None = "has a host that is none"
        else:  # the address of a database is left to its driver, which may need no host
            fault = _address_fault(uri) if scheme in ("http", "https") else None
        if fault is not None:
            raise UsageError(f"tracking.uri={redact(uri)} {fault}", hint="tracking.uri=http://HOST:5000")
        return uri
    raise UsageError(
        f"tracking.uri={redact(uri)} is not a store that MLflow can write; valid: sqlite:///FILE, "
        "http://HOST:PORT, https://HOST, postgresql://…, mysql://…, mssql://…",
        hint="tracking.uri=sqlite:///mlflow.db",
    )


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of an absolute sqlite URI; None for other stores."""
    if not uri.startswith("sqlite"):
        return None
    return Path("/" + unquote(uri.partition("://")[2].partition("?")[0]).lstrip("/"))


def redact(text: str) -> str:
    """Return ``text`` without credentials in addresses, and without the values of the environment's secrets."""
    mlflow_secrets = {value for name in _SECRET_VARIABLES if (value := os.environ.get(name))}
    return hide(text, mlflow_secrets | secrets_of_environment(os.environ))


def public_uri(uri: str) -> str:
    """Return ``uri`` without a login, for files and messages. The result identifies the store."""
    return redact(recorder_env(uri)[URI_VARIABLE])


def has_credentials(uri: str) -> bool:
    """Return True if ``uri`` must not appear in a process list."""
    return hide(uri) != uri


def recorder_env(uri: str) -> dict[str, str]:
    """Return the recorder's additional environment: address, user and password in MLflow's variables.

    The login is taken out of an http address, so that no error message can show it. A database's address keeps its
    login, which can't be passed otherwise. A server on this host is excepted from proxies.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return {URI_VARIABLE: uri}
    no_proxy = {}
    if is_here(uri):
        hosts = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY.upper(), "")
        no_proxy[_NO_PROXY] = ",".join(filter(None, (hosts, parts.hostname)))
    if "@" not in parts.netloc:
        return {URI_VARIABLE: uri, **no_proxy}
    login, _, host = parts.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    without_login = urlunsplit(SplitResult(parts.scheme, host, parts.path, parts.query, parts.fragment))
    # an address with a user alone leaves the password to the variable that the user may have set
    password_variable = {_PASSWORD_VARIABLE: unquote(password)} if colon else {}
    return {URI_VARIABLE: without_login, _USER_VARIABLE: unquote(user), **password_variable, **no_proxy}


def is_here(url: str) -> bool:
    """Return True if the address names this host, where no proxy may be used."""
    return urlsplit(url).hostname in (*_NAMES_OF_THIS_HOST, os.uname().nodename.lower())


def _address_fault(url: str) -> str | None:
    """Return why no request can go to ``url``, in words that don't contain its login; None if a request can."""
    if not url.isprintable() or " " in url:
        return "holds a space or another character that no address has"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (reading the attribute parses the port)
    except ValueError:
        return "has a host or port that is none"
    return None if parts.hostname else "names no host"


def database_login(uri: str, environ: Mapping[str, str], home: Path) -> str:
    """Return a PostgreSQL ``uri`` with the password of PGPASSWORD, PGPASSFILE or ~/.pgpass, as libpq would add it.

    The driver is pg8000 unless the address names one. Other addresses are returned unchanged. The result is only for
    the environment of the process that opens the database.
    """
    parts = urlsplit(uri)
    if parts.scheme.partition("+")[0] != "postgresql":
        return uri
    login, at, host = parts.netloc.rpartition("@")
    if at and ":" not in login:
        password = environ.get("PGPASSWORD") or _pgpass(parts, environ.get("PGPASSFILE") or str(home / ".pgpass"))
        login += f":{quote(password, safe='')}" if password else ""
    scheme = "postgresql+pg8000" if parts.scheme == "postgresql" else parts.scheme
    return urlunsplit(SplitResult(scheme, f"{login}{at}{host}", parts.path, parts.query, parts.fragment))


def _pgpass(parts: SplitResult, file: str) -> str:
    """Return the password of the first matching line ``host:port:database:user:password``; '' if there is none."""
    path = Path(file)
    # as in libpq, a file that others may read isn't used (PostgreSQL documentation, "The Password File")
    if not path.is_file() or path.stat().st_mode & 0o077:
        return ""
    login = (parts.hostname or "", str(parts.port or 5432), parts.path.lstrip("/"), unquote(parts.username or ""))
    for line in path.read_text(encoding="utf-8").splitlines():
        # a backslash escapes a colon or a backslash; a field * matches everything
        fields = [re.sub(r"\\(.)", r"\1", item) for item in re.split(r"(?<!\\):", line, maxsplit=4)]
        if len(fields) == 5 and all(field in ("*", value) for field, value in zip(fields, login, strict=False)):
            return fields[4]
    return ""


# ---------------------------------------------------------------------------------------- destinations
SETTINGS_VARIABLE = "PACELINE_TRACKER_SETTINGS"
NO_SUCH_RUN = 4
"""Exit code of ``fetch_command``: the store answered, and has no run of that id."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where runs are recorded: a store of MLflow, or another tracker."""

    uri: str  # MLflow's address; the name of another tracker
    experiment: str  # tracking.experiment
    tracker: str | None = None  # the name of a tracker other than MLflow
    settings: str = "{}"  # its own settings, as JSON

    @property
    def title(self) -> str:
        return {None: "MLflow", TENSORBOARD: "TensorBoard's event files"}.get(self.tracker, str(self.tracker))

    @property
    def database(self) -> Path | None:
        """MLflow's sqlite file, if it is one."""
        return sqlite_path(self.uri) if self.tracker is None else None

    @property
    def env(self) -> dict[str, str]:
        """Additional environment of the recorder process."""
        return recorder_env(self.uri) if self.tracker is None else {SETTINGS_VARIABLE: self.settings}

    @property
    def identity(self) -> tuple[str, str]:
        """``uri`` and ``experiment`` as tracking.json has them, to tell whether that file belongs to this destination.

        With other settings it is another destination, so ``experiment`` has a digest of them. Logins don't count.
        """
        if self.settings == "{}":
            return public_uri(self.uri), self.experiment
        plain = json.dumps(without_secrets(json.loads(self.settings)), sort_keys=True)
        return public_uri(self.uri), f"{self.experiment} {sha256_text(plain)[:12]}"

    def is_recorded(self, run_dir: Path) -> bool:
        """Return True if tracking.json says that everything was recorded, and no file has changed since."""
        if self.database is not None and not self.database.exists():
            return False
        state = load(run_dir, self.tracker)
        if state is None or (state.state, state.uri, state.experiment) != (DONE, *self.identity):
            return False
        return state.inputs == input_stamps(run_dir)


def destinations(section: Mapping[str, Any], root: Path, *, enabled: bool | None = None) -> list[Destination]:
    """Return where runs are recorded, MLflow first. Raises UsageError: an invalid address.

    ``section``: the fields of ``tracking``. ``enabled``: record in MLflow; None: as configured.
    """
    chosen, experiment = [], section["experiment"]
    if section["enabled"] if enabled is None else enabled:
        chosen.append(Destination(uri=absolute_uri(section["uri"], root), experiment=experiment))
    if name := section["tracker"]:
        shared = TrackingConfig.__dataclass_fields__
        settings = json.dumps({field: section[field] for field in section if field not in shared}, sort_keys=True)
        chosen.append(Destination(uri=name, experiment=experiment, tracker=name, settings=settings))
    if section["tensorboard"]:
        chosen.append(Destination(uri=TENSORBOARD, experiment=experiment, tracker=TENSORBOARD))
    return chosen


def refuse_missing(settings: TrackingConfig) -> None:
    """Check that a tracker's package is installed. Raises UsageError."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tracking.tensorboard=true needs tensorboard, which is not installed",
            hint="pip install 'paceline[tensorboard]'",
        )
    needed = settings.package
    if settings.tracker is not None and needed and importlib.util.find_spec(needed) is None:
        raise UsageError(
            f"tracking={settings.tracker} needs {needed}, which is not installed", hint=f"pip install {needed}"
        )


# ------------------------------------------------------- command lines of ``pipeline.tracking.__main__``
def recorder_command(
    run_dir: Path, uri: str, experiment: str, *, tracker: str | None = None, follow: bool = False, check: bool = False
) -> list[str]:
    """Return the argv that records ``run_dir``; exit code 0: recorded, 1: pending, with the reason on stderr.

    ``follow``: until the run has ended or this process is gone. ``check``: ask the store even if all is recorded. Start
    it with ``Destination.env``: an address with credentials is passed only there.
    """
    flags = [*(["--follow", *_parent()] if follow else []), *(["--check"] if check else [])]
    return [*_command("record", run_dir, uri=uri, tracker=tracker), "--experiment", experiment, *flags]


def serve_command(uri: str, experiment: str, *, tracker: str | None = None) -> list[str]:
    """Return the argv that records many runs while this process lives; environment as for ``recorder_command``."""
    return [*_command("serve", uri=uri, tracker=tracker), "--experiment", experiment, *_parent()]


def fetch_command(run_id: str, folder: Path, uri: str) -> list[str]:
    """Return the argv that downloads an MLflow run's recipe into ``folder``; give it ``recorder_env(uri)``.

    Exit code 0: done; 1: the store failed, with the reason on stderr; or NO_SUCH_RUN.
    """
    return _command("fetch", run_id, folder, uri=uri)


def prepare_command(uri: str) -> list[str]:
    """Return the argv that creates a database store's schema before several processes open it at once."""
    return _command("prepare", uri=uri)


def _command(verb: str, *words: str | Path, uri: str, tracker: str | None = None) -> list[str]:
    store = [] if has_credentials(uri) else ["--uri", uri]
    if tracker is not None:
        store = ["--tracker", tracker]
    return [sys.executable, "-m", "pipeline.tracking", verb, *map(str, words), *store]


def _parent() -> list[str]:
    """Pass the parent's pid explicitly: a recorder without CPU time may only look it up after the parent is gone."""
    return ["--parent", str(os.getpid())]
