"""How `doit train` and `doit sweep` show what goes on: a view on a terminal, else lines; -v says how much."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.invocation import QUIET, VERBOSE, is_wanted, verbosity
from pipeline.cli.loader import leave_if_interrupted
from pipeline.cli.output import as_typed, note
from pipeline.live.screen import Picture, Screen, is_live, plain_width
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.execution.run import Run
    from pipeline.execution.work import RunServices
    from pipeline.live.sweep_state import SweepState
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep.folder import SweepFolder


_OF_A_TRIAL = re.compile(r"trial +\d+ \| ")


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

    def picture() -> Picture:
        from pipeline.live.pictures import RunPicture, first_state

        return RunPicture(first_state(run.key.short, run.config.resolved), run.folder.path)

    return screen(picture)


def watch(folder: RunFolder) -> None:
    """Follow a run that another command trains, to its end."""
    from pipeline.live.pictures import RunPicture, first_state
    from pipeline.live.watching import follow_run, is_under_way

    if not is_under_way(folder):
        return

    def picture() -> Picture:
        return RunPicture(first_state(folder.key, folder.read_json(run_folder.CONFIG) or {}), folder.path)

    try:
        with screen(picture) as shown:
            follow_run(folder, shown)
    except KeyboardInterrupt:
        note(f"no longer watched; the run goes on: doit status {folder.key} watch=1")
        leave_if_interrupted()


def watch_sweep(folder: SweepFolder) -> None:
    """Follow a sweep that another command runs, to its end."""
    from pipeline.live.pictures import SweepPicture
    from pipeline.live.watching import SweepFiles, follow_sweep

    files = SweepFiles(folder)
    state = files.so_far(time.time(), time.monotonic())
    try:
        with screen(lambda: SweepPicture(state, folder.path.parent.parent), trials=True) as shown:
            follow_sweep(folder, files, shown)
    except KeyboardInterrupt:
        note("no longer watched; the sweep goes on: doit status watch=1")
        leave_if_interrupted()


def services_shown(services: RunServices, shown: Screen, hear: Callable[[Any], None]) -> RunServices:
    """The same, telling the screen and ``hear`` what goes on."""
    return replace(services, on_event=teller(shown, hear), on_wait=shown.tell if shown.is_live else None)


def of_sweep(state: Callable[[], SweepState], runs_dir: Path) -> Screen:
    """For a sweep, of which ``state`` makes the first state."""

    def picture() -> Picture:
        from pipeline.live.pictures import SweepPicture

        return SweepPicture(state(), runs_dir)

    return screen(picture, trials=True)


def sweep_teller(
    shown: Screen, hear: Callable[[Any], None], lines: Callable[[Any, float], str | None]
) -> Callable[[Any], None]:
    """``teller`` of a sweep's trials; where no table is drawn, ``lines`` says which of them starts and ends."""
    tell = teller(shown, hear)

    def told(event: Any) -> None:
        tell(event)
        if not shown.is_live and (text := lines(event, time.monotonic())) is not None:
            shown.say(text)

    return told


def teller(shown: Screen, hear: Callable[[Any], None]) -> Callable[[Any], None]:
    """What passes the events of an attempt, or of a sweep's trials, on to the screen and to ``hear``."""
    from pipeline.cluster.tracebacks import is_for_a_person
    from pipeline.core.specs import LogLine
    from pipeline.execution.attempting import shown as as_line

    verbose = verbosity() == VERBOSE

    def tell(event: Any) -> None:
        hear(event)
        shown.tell(event)
        if verbose and isinstance(event, LogLine) and not is_for_a_person(event):
            shown.say(as_line(event))

    return tell
