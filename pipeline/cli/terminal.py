"""The terminal of a command that trains: its progress on stderr, and ``--detach``, which starts it without one."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cli import invocation
from pipeline.cli.invocation import QUIET, VERBOSE, verbosity
from pipeline.cli.output import answer, answer_event, as_typed, is_warning, note, say, wants_json
from pipeline.cli.session import relative
from pipeline.cluster.attempt.failures import is_worth_showing
from pipeline.cluster.events import LogLine
from pipeline.core import locks
from pipeline.core.errors import PacelineError, os_reason
from pipeline.core.processes import process
from pipeline.core.processes.threads import waiting
from pipeline.live.screen import Picture, Screen, is_live, plain_width

_OF_A_TRIAL = re.compile(r"trial +\d+ \| ")


def screen(picture: Callable[[], Picture], *, of_trials: bool = False) -> Screen:
    """Return the screen for one command's progress on stderr.

    Args:
        picture: makes the live view; called only if stderr is a terminal that can show one.
        of_trials: the command is a sweep. Of the lines of its trials, without -v 2, only warnings and errors are shown.
    """
    level = verbosity()

    def is_shown(text: str) -> bool:
        hidden = level == QUIET or (of_trials and level != VERBOSE and _OF_A_TRIAL.match(text))
        return not hidden or is_warning(text)

    if level != QUIET and is_live(sys.stderr, os.environ):
        return Screen(picture(), is_shown=is_shown, as_typed=as_typed)
    return Screen(width=plain_width(sys.stderr, os.environ), is_shown=is_shown, as_typed=as_typed)


def subscriber(
    screen: Screen, on_view: Callable[[Any], None], trial_line: Callable[[Any, float], str | None] = lambda *_: None
) -> Callable[[Any], None]:
    """Return a function that shows each event of an attempt or a sweep.

    With --json it also prints the event, with -v 2 also torchrun's own lines.

    Args:
        on_view: updates the state that the live view draws.
        trial_line: maps an event and the time (``time.monotonic``) to the line about the start or end of a trial, or
            None. The line is printed if no live view shows the trials as a table.
    """
    is_verbose = verbosity() == VERBOSE

    def on_event(event: Any) -> None:
        on_view(event)
        screen.show_event(event)
        if wants_json():
            answer_event(event)
        if is_verbose and isinstance(event, LogLine) and not is_worth_showing(event):
            screen.say(event.shown)
        if not screen.is_live and (text := trial_line(event, time.monotonic())) is not None:
            screen.say(text)

    return on_event


# ------------------------------------------------------------------------------------------------ --detach
_LOGS = ".detached"  # folder below runs/
_MAX_START_S = 120.0  # after this time a detached command counts as started, also without its lock
_LIFE_SIGN_S = 2.0  # a command without a lock counts as started if it is alive after this time
_POLL_S = 0.1
# the flag in sys.argv: the loader has rewritten `--detach` as `detach=1` (``invocation.flags_as_words``)
_DETACH = re.compile(r"(?:(?:train|sweep)\.)?detach(?:=.*)?")
_MAX_OUTPUT = 2_000  # characters that are shown of the output of a detached command that ended at once


def start_detached(runs_dir: Path, name: str, lock: Path | None = None) -> None:
    """Start the typed command again, without ``--detach``, in a session of its own; log to runs/.detached/NAME.log.

    Returns when that command holds ``lock``, the lock of its run or sweep; if there is none, after two seconds. Raises
    PacelineError: it can't be started, or failed at once.
    """
    log = runs_dir / _LOGS / f"{name}.log"
    env = process.child_environment({invocation.STARTED_IN: str(invocation.typed_in())})
    words = [word for word in sys.argv[1:] if not _DETACH.fullmatch(word)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = process.background([sys.executable, "-m", "doit", *words], env=env, log=log)
    except OSError as error:
        message = f"{log} can't be written: {os_reason(error)}"
        raise PacelineError(message, hint="the command without --detach") from error
    # a wrong word or a busy host ends the command within this time, and the user still sees why
    with waiting(note, "starting it without this terminal"):
        deadline = time.monotonic() + (_LIFE_SIGN_S if lock is None else _MAX_START_S)
        while child.poll() is None and time.monotonic() < deadline and not (lock is not None and locks.is_held(lock)):
            time.sleep(_POLL_S)
    if child.poll() is not None:
        report_early_end(child.returncode, log)
        return
    if wants_json():
        answer({"name": name, "pid": child.pid, "log": str(log)})
    say(f"{name} goes on without this terminal (process {child.pid}); what it says: {relative(log)}")


def report_early_end(exit_code: int, log: Path) -> None:
    """Print the output of a detached command that has ended. Raises PacelineError: it failed."""
    output = log.read_text(encoding="utf-8", errors="replace").strip()[-_MAX_OUTPUT:]
    if exit_code != 0:
        hint = f"less {shlex.quote(os.fspath(log))}"
        raise PacelineError(f"it ended at once, with {exit_code}:\n{output}", hint=hint)
    say(output)
