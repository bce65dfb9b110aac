"""The views of a run and of a sweep on a screen: events from the command, the rest from run folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pipeline.core import program as programs
from pipeline.live.run_state import RunEvent, RunState, Saved, after
from pipeline.live.sweep_state import SweepState, after_run_event, after_trial_event
from pipeline.runs import checkpoints, metrics_file
from pipeline.runs.contents import what
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.trial import TrialBegan, TrialEnded
from trainers.contract import run_folder

_KNOWN = get_args(RunEvent)


def first_state(key: str, config: Mapping[str, Any]) -> RunState:
    """Return the state of a run before any event; ``config`` is the content of its config.json."""
    trainer = config.get("trainer")
    is_ours = programs.of(config).is_ours
    settings: Mapping[str, Any] = trainer if isinstance(trainer, Mapping) and is_ours else {}
    batch, epochs = settings.get("global_batch_size"), settings.get("epochs")
    return RunState(
        key=key,
        title=what(config),
        first_doing="starting" if is_ours else "running",  # a script needs to report nothing
        batch=batch if isinstance(batch, int) else 0,
        epochs=epochs if isinstance(epochs, int) else 0,
    )


class GrowingFile:
    """Read lines that are added to a file. Of a file above ``most_bytes``, only the end is read at first."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._at: int | None = None

    def lines(self) -> list[bytes]:
        """Return the lines since the last call; none if the file can't be read now. Follows a file that was cut."""
        with suppress(OSError), self._path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - self._most_bytes) if self._most_bytes else 0
            cut = self._at is None and start > 0  # in the middle of a line
            self._at = file.seek(start if self._at is None else min(self._at, size))
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            return whole.splitlines()[1 if cut else 0 :]
        return []


class FolderNews:
    """Read new lines of a run's metrics.jsonl and new checkpoints, each once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._metrics = run_dir, GrowingFile(run_dir / run_folder.METRICS)
        self._saved = 0

    def look(self) -> Iterator[MetricsRow | Saved]:
        """Take what has arrived since the last call."""
        yield from filter(None, map(metrics_file.parse, self._metrics.lines()))
        with suppress(OSError):
            newest = checkpoints.newest_step(self._run_dir)
            if newest != self._saved:
                self._saved = newest
                yield Saved(step=newest)


class RunPicture:
    """The state of a run from events (``take``), and from metrics and checkpoints in ``run_dir``."""

    def __init__(self, state: RunState, run_dir: Path) -> None:
        self.state = state
        self._news = FolderNews(run_dir)

    def take(self, event: Any, now: float) -> None:
        """Take an event; events without effect on the view are ignored."""
        if isinstance(event, _KNOWN):
            self.state = after(self.state, event, now)

    def look(self, now: float) -> None:
        for event in self._news.look():
            self.take(event, now)


class SweepPicture:
    """The state of a sweep from events (``take``): the sweep's, and pairs of a trial's number and its event."""

    def __init__(self, state: SweepState, runs_dir: Path) -> None:
        self.state = state
        self._runs_dir = runs_dir
        self._news = {number: FolderNews(runs_dir / trial.run.key) for number, trial in state.running.items()}

    def take(self, event: Any, now: float) -> None:
        """Take an event; events without effect on the view are ignored."""
        if isinstance(event, TrialBegan | TrialEnded):
            self.state = after_trial_event(self.state, event, now)
            self._news.pop(event.number, None)
            if isinstance(event, TrialBegan):
                self._news[event.number] = FolderNews(self._runs_dir / event.key)
        elif type(event) is tuple and isinstance(event[1], _KNOWN):
            self.state = after_run_event(self.state, event[0], event[1], now)

    def look(self, now: float) -> None:
        for number, news in self._news.items():
            for event in news.look():
                self.state = after_run_event(self.state, number, event, now)
