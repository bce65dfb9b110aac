"""How a trial came out: its outcome, the line that says it, and the cause by which it is tried again or not."""

from __future__ import annotations

import errno

from pipeline.cluster import launchers
from pipeline.cluster.failures import FULL_DISK
from pipeline.core.errors import HostError, PacelineError, TrainingError, os_reason
from pipeline.core.files import FULL, room_needed
from pipeline.core.specs import State
from pipeline.execution.run import Run
from pipeline.runs import acceptance, journal
from pipeline.sweep.trial import Outcome

_FULL = (*FULL, errno.EROFS)
_LONGEST = 300  # characters


def finished(run: Run, *, elsewhere: bool = False) -> Outcome:
    """The outcome of a finished run, from its result.json."""
    result, _ = acceptance.standing(run.folder)
    metrics = result.metrics if result is not None else {}
    return Outcome(state=State.FINISHED, metrics=metrics, elsewhere=elsewhere)


def was_pruned(run: Run) -> bool:
    entries = journal.read(run.folder.journal)
    return bool(entries) and entries[-1].state is State.PRUNED


def detail_of(error: PacelineError | OSError) -> str:
    """The first line of an error, as far as a table has room; of a HostError also the second, which names the first
    host. The run's journal has all of it."""
    text = error.what if isinstance(error, PacelineError) else os_reason(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = ": ".join(lines[: 2 if isinstance(error, HostError) else 1])
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]}…"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def cause_of(error: PacelineError | OSError) -> str:
    """``host``, ``memory``, ``disk`` (no other trial would fare better) or ``code``."""
    if isinstance(error, HostError):
        return "host"
    if isinstance(error, TrainingError):
        return error.cause
    reason = error if isinstance(error, OSError) else error.__cause__
    full = FULL_DISK.search(str(error)) or (isinstance(reason, OSError) and reason.errno in _FULL)
    return "disk" if full else "code"


def hint_of(error: PacelineError | OSError, run: Run) -> str:
    """What to do about a cause that stops the sweep: of a full disk here with the folder and what is free there."""
    if isinstance(error, TrainingError) and not launchers.capabilities(run.config.cluster).is_this_computer:
        return "make room there, then the same command"
    if isinstance(error, PacelineError) and error.hint is not None:
        return error.hint
    return room_needed(run.folder.path.parent)
