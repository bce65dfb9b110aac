"""The progress of `doit train` and `doit sweep`: a view on a terminal, else lines (-v: how many); and notices."""

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
    """Return the screen for one command's progress on stderr. ``picture`` is called if a view can be drawn.

    ``trials``: of single trials only warnings and errors are shown; doit logs has their lines.
    """
    wanted: Callable[[str], bool] = is_wanted if verbosity() == QUIET else lambda _: True
    if trials and verbosity() != VERBOSE:
        usual, wanted = wanted, lambda text: usual(text) and (not _OF_A_TRIAL.match(text) or is_wanted(text))
    if verbosity() != QUIET and is_live(sys.stderr, os.environ):
        return Screen(picture(), wanted=wanted, named=as_typed)
    return Screen(width=plain_width(sys.stderr, os.environ), wanted=wanted, named=as_typed)


def of_run(run: Run) -> Screen:
    """Return the screen of one run."""
    return screen(lambda: RunPicture(first_state(run.key.short, run.config.resolved), run.folder.path))


def of_sweep(state: Callable[[], SweepState], runs_dir: Path) -> Screen:
    """Return the screen of a sweep; ``state`` makes its first state."""
    return screen(lambda: SweepPicture(state(), runs_dir), trials=True)


# ------------------------------------------------------------------------------------------------ its events
def subscriber(shown: Screen, hear: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that passes events of an attempt, or of a sweep's trials, to the screen and to ``hear``."""
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
    """Return ``subscriber`` for a sweep's trials; without a table, ``lines`` reports their starts and ends."""
    pass_on = subscriber(shown, hear)

    def on_event(event: Any) -> None:
        pass_on(event)
        if not shown.is_live and (text := lines(event, time.monotonic())) is not None:
            shown.say(text)

    return on_event


# ------------------------------------------------------------------------------------------------ notices
class _Silent(AbstractContextManager["_Silent"]):
    """A ``Notifier`` without notices."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Send nothing."""

    def hear(self, event: Any) -> None:
        """Send nothing."""

    def ended(self, metrics: object, error: str = "") -> None:
        """Send nothing."""


def notices_of_run(run: Run, say: Callable[[str], None]) -> Notifier | _Silent:
    """Return the notices of one run. ``say`` takes a warning if one can't be sent."""
    return _notifier(run.config.notify, say, kind="run", key=run.key.short, name=what(run.config.resolved))


def notices_of_sweep(first: RunConfig, key: str, trials: int, say: Callable[[str], None]) -> Notifier | _Silent:
    """Return the notices of a sweep; its trials' ends send none. ``first``: the configuration of one trial."""
    name = f"{counted(trials, 'trial')} of {what(first.resolved)}"
    return _notifier(first.notify, say, kind="sweep", key=key, name=name)


def _notifier(config: NotifyConfig, say: Callable[[str], None], **about: str) -> Notifier | _Silent:
    if config.command is None and config.url is None:
        return _Silent()
    from pipeline.live import notices  # HTTP: 30 ms before the start, for who wants notices

    return notices.Notifier(notices.Notices(config, say), **about)
