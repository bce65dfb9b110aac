"""The view of one run as a screen draws it: events from its command, the rest from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pipeline.core import program as programs
from pipeline.live.folder_news import FolderNews
from pipeline.live.run_state import RunEvent, RunState, after
from pipeline.runs.contents import what

if TYPE_CHECKING:
    from rich.console import RenderableType

_KNOWN = get_args(RunEvent)


def first_state(key: str, config: Mapping[str, Any]) -> RunState:
    """Of a run that nothing was heard of yet. ``config``: what its config.json holds, or will."""
    trainer = config.get("trainer")
    is_ours = programs.of(config).is_ours
    told: Mapping[str, Any] = trainer if isinstance(trainer, Mapping) and is_ours else {}
    batch, epochs = told.get("global_batch_size"), told.get("epochs")
    return RunState(
        key=key,
        title=what(config),
        first_doing="starting" if is_ours else "running",  # a script needs to tell nothing
        batch=batch if isinstance(batch, int) else 0,
        epochs=epochs if isinstance(epochs, int) else 0,
    )


class RunPicture:
    """The state of a run whose events ``take`` gets; metrics and checkpoints are read from ``run_dir``."""

    def __init__(self, state: RunState, run_dir: Path) -> None:
        self.state = state
        self._news = FolderNews(run_dir)

    def take(self, event: Any, now: float) -> None:
        """One that the view doesn't show changes nothing."""
        if isinstance(event, _KNOWN):
            self.state = after(self.state, event, now)

    def look(self, now: float) -> None:
        for event in self._news.look():
            self.take(event, now)

    def drawn(self, now: float, width: int, height: int) -> RenderableType:
        from pipeline.live.run_view import run_view

        return run_view(self.state, now, width=width, height=height)
