"""The view of a sweep as a screen draws it: events of its trials, and what their folders tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pipeline.live.folder_news import FolderNews
from pipeline.live.run_state import RunEvent
from pipeline.live.sweep_state import SweepState, after_run_event, after_trial_event
from pipeline.sweep.trial import TrialBegan, TrialEnded

if TYPE_CHECKING:
    from rich.console import RenderableType

_KNOWN = get_args(RunEvent)


class SweepPicture:
    """The state of a sweep. ``take`` gets events of the sweep, and pairs of a trial's number and an event of its."""

    def __init__(self, state: SweepState, runs_dir: Path) -> None:
        self.state = state
        self._runs_dir = runs_dir
        self._news = {number: FolderNews(runs_dir / trial.run.key) for number, trial in state.running.items()}

    def take(self, event: Any, now: float) -> None:
        """One that the view doesn't show changes nothing."""
        if isinstance(event, TrialBegan):
            self._news[event.number] = FolderNews(self._runs_dir / event.key)
        if isinstance(event, TrialEnded):
            self._news.pop(event.number, None)
        if isinstance(event, TrialBegan | TrialEnded):
            self.state = after_trial_event(self.state, event, now)
        elif type(event) is tuple and isinstance(event[1], _KNOWN):
            self.state = after_run_event(self.state, event[0], event[1], now)

    def look(self, now: float) -> None:
        for number, news in self._news.items():
            for event in news.look():
                self.state = after_run_event(self.state, number, event, now)

    def drawn(self, now: float, width: int, height: int) -> RenderableType:
        from pipeline.live.sweep_view import sweep_view

        return sweep_view(self.state, now, width=width, height=height)
