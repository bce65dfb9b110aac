"""How `doit train` and `doit sweep` show what goes on: a view on a terminal, else lines (-v: how much); and notices."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.cli import answers
from pipeline.cli.invocation import QUIET, VERBOSE, is_wanted, verbosity
from pipeline.cli.output import as_typed
from pipeline.cluster.failures import is_worth_showing
from pipeline.config.build import RunConfig
from pipeline.config.schema import NotifyConfig
from pipeline.core.specs import LogLine
from pipeline.core.tables import counted
from pipeline.execution.attempting import shown as as_line
from pipeline.execution.run import Run
from pipeline.live.pictures import RunPicture, SweepPicture, first_state
from pipeline.live.screen import Picture, Screen, is_live, plain_width
from pipeline.live.sweep_state import SweepState
from pipeline.runs.contents import what

if TYPE_CHECKING:
    from pipeline.live.notices import Notifier

_OF_A_TRIAL = re.compile(r"trial +\d+ \| ")


# ------------------------------------------------------------------------------------------------ the screen
def screen(picture: Callable[[], Picture], *, trials: bool = False) -> Screen:
    """For how the work of one command goes on, on stderr. ``picture`` is called where a view can be drawn.

    ``trials``: of what single trials say warnings and errors alone are shown; doit logs has their lines.
    """
    wanted: Callable[[str], bool] = is_wanted if verbosity() == QUIET else lambda _: True
    if trials and verbosity() != VERBOSE:
        usual, wanted = wanted, lambda text: usual(text) and (not _OF_A_TRIAL.match(text) or is_wanted(text))
    if verbosity() != QUIET and is_live(sys.stderr, os.environ):
        return Screen(picture(), wanted=wanted, named=as_typed)
    return Screen(width=plain_width(sys.stderr, os.environ), wanted=wanted, named=as_typed)


def of_run(run: Run) -> Screen:
    """For one run."""
    return screen(lambda: RunPicture(first_state(run.key.short, run.config.resolved), run.folder.path))


def of_sweep(state: Callable[[], SweepState], runs_dir: Path) -> Screen:
    """For a sweep, of which ``state`` makes the first state."""
    return screen(lambda: SweepPicture(state(), runs_dir), trials=True)


# ------------------------------------------------------------------------------------------------ its events
def subscriber(shown: Screen, hear: Callable[[Any], None]) -> Callable[[Any], None]:
    """Passes the events of an attempt, or of a sweep's trials, on to the screen and to ``hear``."""
    verbose = verbosity() == VERBOSE

    def on_event(event: Any) -> None:
        hear(event)
        shown.tell(event)
        if answers.wanted():
            answers.event(event)
        if verbose and isinstance(event, LogLine) and not is_worth_showing(event):
            shown.say(as_line(event))

    return on_event


def sweep_subscriber(
    shown: Screen, hear: Callable[[Any], None], lines: Callable[[Any, float], str | None]
) -> Callable[[Any], None]:
    """``subscriber`` of a sweep's trials; where no table is drawn, ``lines`` says which of them starts and ends."""
    pass_on = subscriber(shown, hear)

    def on_event(event: Any) -> None:
        pass_on(event)
        if not shown.is_live and (text := lines(event, time.monotonic())) is not None:
            shown.say(text)

    return on_event


# ------------------------------------------------------------------------------------------------ notices
class _Silent(AbstractContextManager["_Silent"]):
    """A ``Notifier`` where nobody wants notices."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Sends nothing."""

    def hear(self, event: Any) -> None:
        """Sends nothing."""

    def ended(self, metrics: object, error: str = "") -> None:
        """Sends nothing."""


def notices_of_run(run: Run, say: Callable[[str], None]) -> Notifier | _Silent:
    """Notices of one run. ``say`` takes a warning where one can't be sent."""
    return _notifier(run.config.notify, say, kind="run", key=run.key.short, name=what(run.config.resolved))


def notices_of_sweep(first: RunConfig, key: str, trials: int, say: Callable[[str], None]) -> Notifier | _Silent:
    """Notices of a sweep, whose trials send none of their ends. ``first``: the configuration of one of them."""
    name = f"{counted(trials, 'trial')} of {what(first.resolved)}"
    return _notifier(first.notify, say, kind="sweep", key=key, name=name)


def _notifier(config: NotifyConfig, say: Callable[[str], None], **about: str) -> Notifier | _Silent:
    if config.command is None and config.url is None:
        return _Silent()
    from pipeline.live import notices  # HTTP: 30 ms before the start, for who wants notices

    return notices.Notifier(notices.Notices(config, say), **about)
