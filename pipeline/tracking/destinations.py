"""The destinations of a run's record: MLflow's store and the other configured trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_text
from pipeline.core.redact import without_secrets
from pipeline.tracking import state
from pipeline.tracking.address import absolute_uri, recorder_env, redact, sqlite_path
from pipeline.tracking.state import TENSORBOARD, Recorded
from pipeline.tracking.tracker_settings import own_settings

SETTINGS_VARIABLE = "PACELINE_TRACKER_SETTINGS"


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
        """Return True if everything of ``run_dir`` is recorded already. Cheap: compares file times."""
        return state.is_recorded(run_dir, self.uri, marked(self.experiment, self.settings), self.tracker)

    def last_recorded(self, run_dir: Path) -> Recorded | None:
        return state.last_recorded(run_dir, self.tracker)


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
        settings = json.dumps(own_settings(section), sort_keys=True)
        places.append(Destination(uri=name, experiment=experiment, tracker=name, settings=settings))
    if section["tensorboard"]:
        places.append(Destination(uri=TENSORBOARD, experiment=experiment, tracker=TENSORBOARD))
    return places
