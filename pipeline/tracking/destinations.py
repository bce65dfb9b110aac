"""Where runs are recorded (MLflow's store, other trackers), what each of these has of a run (tracking.json, for another
tracker tracking.NAME.json), and the command lines of recorder processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.config.schema import TrackingConfig
from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_text, write_json_in
from pipeline.core.redact import without_secrets
from pipeline.runs.folder import SWEEPS
from pipeline.tracking.address import absolute_uri, has_credentials, recorder_env, shown, sqlite_path
from trainers.contract import run_folder

TENSORBOARD = "tensorboard"
"""The tracker that ``tracking.tensorboard=true`` adds to any other choice; it has no settings."""
RECORDING, PENDING, DONE = "recording", "pending", "done"

_INPUTS = (
    run_folder.CONFIG, run_folder.CONFIG_YAML, run_folder.KEY, run_folder.PROVENANCE, SWEEPS, "accepted_as.json",
    run_folder.CHANGES, run_folder.PLAN, run_folder.JOURNAL, run_folder.METRICS, run_folder.SYSTEM_METRICS,
    run_folder.SUMMARY, run_folder.FINAL_WEIGHTS_NOTES, run_folder.FINAL_WEIGHTS, "evaluation/*",
)  # fmt: skip


@dataclass(kw_only=True)
class TrackingState:
    """The content of tracking.json; times are not stored."""

    uri: str
    experiment: str
    token: str  # marks the MLflow runs that this record created
    state: str = RECORDING  # done, pending (the store failed) or recording (in progress)
    run_id: str | None = None
    experiment_id: str | None = None
    unsure: bool = False  # the answer to the creation of a run may have been lost, so the store may have one more
    attempt: int = 0
    system_offset_bytes: int = 0
    # metric → lap and step of its last recorded point (``points.Mark``): a resumed attempt repeats earlier steps
    marks: dict[str, list[int]] = field(default_factory=dict)
    nonfinite: dict[str, str] = field(default_factory=dict)  # metric → its first non-finite value, in words
    artifacts: dict[str, list[int]] = field(default_factory=dict)  # name → fingerprint of each uploaded file
    inputs: dict[str, list[int]] = field(default_factory=dict)  # the same of each file that the record was made from
    message: str = ""
    refused: bool = False  # a retry will fail with the same ``message`` until the user fixes the cause
    tracker: str | None = None

    def save(self, folder: int) -> None:
        """Write tracking.json atomically into the folder open at this descriptor, even if another has replaced it.

        Raises OSError.
        """
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
    kinds = {item.name: item.type for item in fields(TrackingState)}
    try:
        state = TrackingState(**{name: value for name, value in raw.items() if name in kinds})
    except TypeError:  # a field is missing
        return None
    for name, value in vars(state).items():
        outermost = [word.strip().partition("[")[0] for word in str(kinds[name]).split("|")]  # dict of dict[str, int]
        if type(value).__name__.removesuffix("Type") not in outermost:
            return None
    return state


def fingerprints(run_dir: Path) -> dict[str, list[int]]:
    """Return name → [bytes, mtime in ns] of every file that a record is made from."""
    paths = (path for pattern in _INPUTS for path in sorted(run_dir.glob(pattern)) if path.is_file())
    return {str(path.relative_to(run_dir)): fingerprint(path) for path in paths}


def fingerprint(path: Path) -> list[int]:
    """Return [bytes, mtime in ns]. Raises OSError."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


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
        """``uri`` and ``experiment`` as tracking.json has them, by which it is known whether it is of this destination.

        Other settings are another destination, another login isn't. The settings themselves stay out of the run folder.
        """
        if self.settings == "{}":
            return shown(self.uri), self.experiment
        plain = json.dumps(without_secrets(json.loads(self.settings)), sort_keys=True)
        return shown(self.uri), f"{self.experiment} {sha256_text(plain)[:12]}"

    def is_recorded(self, run_dir: Path) -> bool:
        """Return True if everything of ``run_dir`` was recorded, by tracking.json and the times of files."""
        if self.database is not None and not self.database.exists():
            return False
        state = load(run_dir, self.tracker)
        if state is None or (state.state, state.uri, state.experiment) != (DONE, *self.identity):
            return False
        return state.inputs == fingerprints(run_dir)


def destinations(section: Mapping[str, Any], root: Path, *, enabled: bool | None = None) -> list[Destination]:
    """Return where runs are recorded, MLflow first. Raises UsageError: an invalid address.

    ``section``: the fields of tracking, with the chosen tracker's own. ``enabled``: in MLflow; None: as configured.
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

    ``follow``: until the run has ended or this process is gone. ``check``: ask the store even if all is recorded. Run
    it with ``Destination.env``, where alone an address with credentials is passed.
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
    store = ["--tracker", tracker] if tracker is not None else [] if has_credentials(uri) else ["--uri", uri]
    return [sys.executable, "-m", "pipeline.tracking", verb, *map(str, words), *store]


def _parent() -> list[str]:
    """Pass the parent's pid explicitly: a recorder without CPU time may only look it up after the parent is gone."""
    return ["--parent", str(os.getpid())]
