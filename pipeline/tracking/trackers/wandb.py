"""The tracker for Weights & Biases in offline mode: it writes a folder in the run folder, which `wandb sync` uploads.

wandb can't continue an offline log. So the log is written in one go when the attempt has ended, and renamed last.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline.config.schema import TrackingConfig
from pipeline.tracking.description import Description
from pipeline.tracking.points import Mark, Point
from pipeline.tracking.trackers.base import Tracker

FOLDER = "wandb"
_MAKING = ".making"
_STEP = "paceline/step"  # the x-axis of all charts


@dataclass(kw_only=True)
class WandbConfig(TrackingConfig):
    """Nothing more to set: the project is tracking.experiment, and the entity is chosen with `wandb sync`."""

    package: ClassVar[str] = "wandb"

    enabled: bool = False
    tracker: str | None = "wandb"


class Wandb(Tracker):
    """The record of a run. Its id is the run's key, so syncing twice gives one run."""

    live = False

    def __init__(self, settings: WandbConfig, run_dir: Path) -> None:
        super().__init__(settings, run_dir)
        self._folder = run_dir / FOLDER
        self._run: Any = None

    def begin(self, run: Description) -> Mapping[str, Mark]:
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # no error reports to its vendor
        import wandb  # late import: may be missing, and reads the variables above

        making = self._folder / _MAKING
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        self._run = wandb.init(
            mode="offline",
            id=run.key,
            name=run.name,
            project=self.settings.experiment,
            notes=run.tags.get("mlflow.note.content", ""),
            config=dict(run.params),
            dir=making,
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,  # hosts, commit and command would be the recorder's, not the run's
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)
        return {}

    def log(self, points: Sequence[Point]) -> None:
        """Log one row per step. wandb drops rows with an earlier step, so wandb's own step is the number of the row."""
        for (step, _), row in itertools.groupby(points, key=lambda point: (point.step, point.time_ms)):
            same_step = list(row)
            values = {point.key: point.value for point in same_step}
            self._run.log({**values, _STEP: step, "_timestamp": same_step[0].time_ms / 1000})

    def end(self, run: Description, state: str, end_ms: int | None) -> None:
        self._run.config.update({name: run.tags[name] for name in run.tags if name.startswith("paceline.")})
        self._run.finish(exit_code=0 if state in ("FINISHED", "PRUNED") else 1)
        self._run = None
        (new_log,) = (self._folder / _MAKING / "wandb").glob("offline-run-*")  # wandb.init makes the folder "wandb"
        for earlier in self._folder.glob("offline-run-*"):
            shutil.rmtree(earlier)
        new_log.rename(self._folder / new_log.name)
        shutil.rmtree(self._folder / _MAKING)

    def close(self) -> None:
        """End a record that failed halfway; an ended one is closed already."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
