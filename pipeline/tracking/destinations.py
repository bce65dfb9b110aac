"""The destinations of a run's record (MLflow's store and other trackers), and the processes that record in them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.schema import TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.core.files import sha256_text
from pipeline.core.redact import without_secrets
from pipeline.tracking import state
from pipeline.tracking.address import absolute_uri, has_credentials, recorder_env, redact, sqlite_path
from pipeline.tracking.state import TENSORBOARD, TrackingState

SETTINGS_VARIABLE = "PACELINE_TRACKER_SETTINGS"
NO_SUCH_RUN = 4
"""Exit code of ``fetch_command``: the store answered, and has no run of that id."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """One destination of records.

    Attributes:
        uri: MLflow's address; for another tracker, its name.
        experiment: tracking.experiment.
        tracker: the name of another tracker than MLflow.
        settings: the tracker's own settings, as JSON.
    """

    uri: str
    experiment: str
    tracker: str | None = None
    settings: str = "{}"

    @property
    def shown(self) -> str:
        """The address for messages."""
        return redact(self.uri)

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

    def is_recorded(self, run_dir: Path) -> bool:
        """Return True if everything of ``run_dir`` is in the store, which is there. Cheap: compares file times."""
        if self.database is not None and not self.database.exists():
            return False
        return state.is_recorded(run_dir, self.uri, marked(self.experiment, self.settings), self.tracker)

    def last_recorded(self, run_dir: Path) -> TrackingState | None:
        return state.load(run_dir, self.tracker)


def marked(experiment: str, settings: str) -> str:
    """Return the experiment's name in a record's state: it changes with the settings, but not with the login.

    The settings themselves stay out of the run folder.
    """
    if settings == "{}":
        return experiment
    plain = json.dumps(without_secrets(json.loads(settings)), sort_keys=True)
    return f"{experiment} {sha256_text(plain)[:12]}"


def destinations(section: Mapping[str, Any], root: Path, *, enabled: bool | None = None) -> list[Destination]:
    """Return MLflow first if ``enabled`` (None: as configured), then other trackers.

    Raises UsageError: an invalid address.

    Args:
        section: the fields of tracking, including the chosen tracker's own.
    """
    places, experiment = [], section["experiment"]
    if section["enabled"] if enabled is None else enabled:
        places.append(Destination(uri=absolute_uri(section["uri"], root), experiment=experiment))
    if name := section["tracker"]:
        shared = TrackingConfig.__dataclass_fields__
        settings = json.dumps({field: section[field] for field in section if field not in shared}, sort_keys=True)
        places.append(Destination(uri=name, experiment=experiment, tracker=name, settings=settings))
    if section["tensorboard"]:
        places.append(Destination(uri=TENSORBOARD, experiment=experiment, tracker=TENSORBOARD))
    return places


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
    """Return the argv that records ``run_dir``.

    ``follow`` continues until the run has ended or this process is gone; ``check`` queries the store even if everything
    is recorded already. Give the process the environment of its Destination, because an address with credentials is
    only passed there. Exit code 0: recorded; 1: pending, with the reason on stderr.
    """
    flags = [*(["--follow", *_parent()] if follow else []), *(["--check"] if check else [])]
    return [*_command("record", run_dir, uri=uri, tracker=tracker), "--experiment", experiment, *flags]


def serve_command(uri: str, experiment: str, *, tracker: str | None = None) -> list[str]:
    """Return the argv that records many runs while this process lives; environment as for ``recorder_command``."""
    return [*_command("serve", uri=uri, tracker=tracker), "--experiment", experiment, *_parent()]


def fetch_command(run_id: str, place: Path, uri: str) -> list[str]:
    """Return the argv that downloads an MLflow run's recipe into ``place``; give it ``recorder_env(uri)``.

    Exit code 0: done; 1: the store failed, with the reason on stderr; or NO_SUCH_RUN.
    """
    return _command("fetch", run_id, place, uri=uri)


def prepare_command(uri: str) -> list[str]:
    """Return the argv that creates a database store's schema before several processes open it at once."""
    return _command("prepare", uri=uri)


def _command(verb: str, *words: str | Path, uri: str, tracker: str | None = None) -> list[str]:
    store = ["--tracker", tracker] if tracker is not None else [] if has_credentials(uri) else ["--uri", uri]
    return [sys.executable, "-m", "pipeline.tracking", verb, *map(str, words), *store]


def _parent() -> list[str]:
    """Pass the parent's pid explicitly: a recorder without CPU time may only look it up after the parent is gone."""
    return ["--parent", str(os.getpid())]
