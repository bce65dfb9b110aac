"""`doit train --detach` and `doit sweep --detach`: the same command, which goes on without this terminal."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from pipeline.cli import answers, clone
from pipeline.cli.output import note, say
from pipeline.cli.session import relative, session
from pipeline.core import locks
from pipeline.core.errors import PacelineError, os_reason
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import waiting

_FOLDER = ".detached"
_WAIT_S = 120.0  # until it works: imports, the check of hosts
_LOOK_S = 0.1
_SHOWN = 2_000  # characters of what a command said that has ended at once


def start(name: str, lock: Path | None = None) -> None:
    """Start the command that was typed, without ``--detach``, in a session of its own.

    Args:
        name: of the run or sweep; its log is ``runs/.detached/NAME.log``.
        lock: what the command holds while it works. None: it is known to work once it has lived for two seconds.

    Raises:
        PacelineError: it can't be started, or ended badly at once.
    """
    log = session().config.runs_dir / _FOLDER / f"{name}.log"
    env = process.of_this_clone({clone.STARTED_IN: str(clone.started_in())})
    words = [word for word in sys.argv[1:] if not _asks_to_detach(word)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = process.background([sys.executable, "-m", "doit", *words], env=env, log=log)
    except OSError as error:
        what = f"{log} can't be written: {os_reason(error)}"
        raise PacelineError(what, hint="the command without --detach") from error
    with waiting(note, "starting it without this terminal"):
        until = time.monotonic() + (_WAIT_S if lock is not None else 2.0)
        while child.poll() is None and time.monotonic() < until and not (lock is not None and locks.is_held(lock)):
            time.sleep(_LOOK_S)
    if child.poll() is not None:
        ended(child.returncode, log)
        return
    if answers.wanted():
        answers.answer({"name": name, "pid": child.pid, "log": str(log)})
    say(f"{name} goes on without this terminal (process {child.pid}); what it says: {relative(log)}")


def _asks_to_detach(word: str) -> bool:
    name = word.partition("=")[0].removeprefix("train.").removeprefix("sweep.")
    return name == "detach"


def ended(code: int, log: Path) -> None:
    """Raises PacelineError: it ended badly."""
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    if code == 0:
        say(said[-_SHOWN:])
        return
    raise PacelineError(f"it ended at once, with {code}:\n{said[-_SHOWN:]}", hint=f"less {shlex.quote(os.fspath(log))}")
