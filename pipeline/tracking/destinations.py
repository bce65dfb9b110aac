"""The places that a run is recorded in: MLflow's store, and what other trackers were asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.schema import TrackingConfig
from pipeline.tracking import state
from pipeline.tracking.address import absolute_uri, recorder_env, redact, sqlite_path
from pipeline.tracking.state import Recorded
from pipeline.tracking.trackers import TENSORBOARD, own_settings

SETTINGS_VARIABLE = "PACELINE_TRACKER_SETTINGS"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """One of them.

    Attributes:
        uri: MLflow's address; of another tracker its name.
        experiment: tracking.experiment.
        tracker: the name of another tracker than MLflow.
        settings: the fields that it alone has, as JSON.
    """

    uri: str
    experiment: str
    tracker: str | None = None
    settings: str = "{}"

    @property
    def shown(self) -> str:
        """As messages have it."""
        return redact(self.uri)

    @property
    def title(self) -> str:
        return {None: "MLflow", TENSORBOARD: "TensorBoard's event files"}.get(self.tracker, str(self.tracker))

    @property
    def database(self) -> Path | None:
        """MLflow's sqlite file."""
        return sqlite_path(self.uri) if self.tracker is None else None

    @property
    def env(self) -> dict[str, str]:
        """What to add to the environment of the recorder's process."""
        return recorder_env(self.uri) if self.tracker is None else {SETTINGS_VARIABLE: self.settings}

    def is_recorded(self, run_dir: Path) -> bool:
        """Whether everything of ``run_dir`` stands there already. Cheap: it looks at file times."""
        return state.is_recorded(run_dir, self.uri, marked(self.experiment, self.settings), self.tracker)

    def last_recorded(self, run_dir: Path) -> Recorded | None:
        return state.last_recorded(run_dir, self.tracker)


def marked(experiment: str, settings: str) -> str:
    """What a record's state calls its experiment: with other settings it is another record."""
    return experiment if settings == "{}" else f"{experiment} {settings}"


def destinations(told: TrackingConfig, root: Path, *, enabled: bool | None = None) -> list[Destination]:
    """MLflow first, where ``enabled`` (None: as the configuration says). Raises UsageError: its address is none."""
    found = []
    if told.enabled if enabled is None else enabled:
        found.append(Destination(uri=absolute_uri(told.uri, root), experiment=told.experiment))
    settings = json.dumps(own_settings(told), sort_keys=True)
    others = {told.tracker: settings, TENSORBOARD: "{}" if told.tensorboard else None}
    for name, value in others.items():
        if name is not None and value is not None:
            found.append(Destination(uri=name, experiment=told.experiment, tracker=name, settings=value))
    return found
