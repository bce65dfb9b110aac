"""How a command ends with an error: the message for the user, and the exit code.

An error that nobody foresaw becomes one line too; the line names a file with the traceback.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType

from pipeline.core.errors import Killed, PacelineError, UsageError, os_reason, text_of
from pipeline.core.masking import OutputError, shown
from pipeline.core.printable import printable_lines
from pipeline.core.processes import signals
from pipeline.core.processes.signals import CTRL_C, leave_on_ctrl_c

FOLDER = ".errors"
EXIT_FAILED, EXIT_BROKE, EXIT_USAGE, EXIT_UNREAD = 1, 2, 3, 141
"""doit's exit codes (a task failed, a task broke, an error before any task started) and a shell's for SIGPIPE.

A command ended by a signal has a shell's exit code for it: 130 after Ctrl-C.
"""

_STARTERS = ("subprocess.py", "popen_fork.py")  # Python's modules that start processes
_LONGEST = 300  # characters of an error's text that are shown; the file has all of it
_in_runs: list[Path] = []  # where tracebacks go: at most one folder
_numbers = count(1)


def keep_tracebacks_in(runs_dir: Path) -> None:
    """Store tracebacks in ``.errors`` of the runs folder from now on (before that, or if that fails: in /tmp)."""
    _in_runs[:] = [runs_dir / FOLDER]


def install() -> None:
    """Report uncaught exceptions and Ctrl-C of this process on one line from now on, instead of a traceback."""
    sys.excepthook = _hook
    leave_on_ctrl_c()


def is_of_output(error: BaseException) -> bool:
    """Return True if stdout accepts no more: its reader left, the disk is full, or the terminal is gone."""
    return isinstance(error, OutputError) or nobody_reads(error)


def nobody_reads(error: BaseException) -> bool:
    """Return True if ``error`` means that the reader of stdout left, as with ``| head``; that is no failure."""
    if not isinstance(error, BrokenPipeError):
        return False
    stdout = select.poll()
    stdout.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in stdout.poll(0))


def error_message(error: BaseException) -> str:
    """Return the text shown to the user: the error's own, or one line that names the file with the traceback."""
    return printable_lines(_error_message(error))


def _error_message(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, OutputError):
        return f"what this command says can't be written to its stdout: {os_reason(error)}"
    file = keep_traceback(error)
    frames = traceback.extract_tb(error.__traceback__)
    # fork() fails with EAGAIN when a limit of processes is reached
    is_fork = isinstance(error, BlockingIOError) and any(Path(frame.filename).name in _STARTERS for frame in frames)
    if is_fork or "can't start new thread" in text_of(error):
        return (
            f"no further process or thread can be started here ({shown(text_of(error))}): a limit is reached "
            f"(ulimit -u; in a container pids.max; `ps -eLf | wc -l` counts them); end others or raise it ({file})"
        )
    if isinstance(error, OSError):  # usually a disk or a permission, not a defect
        return f"{shown(os_reason(error))} (unexpected here; the traceback: {file})"
    line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = shown(text_of(error))[:_LONGEST]
    kind = type(error).__name__
    return f"unexpected {kind}{': ' if text else ''}{text}{line} (a defect of Paceline, please report it): {file}"


def keep_traceback(error: BaseException) -> str:
    """Write the traceback to a file and return its path."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}.txt"
    content = shown("".join(traceback.format_exception(error)))
    for runs_folder in (*_in_runs, None):
        with suppress(OSError):
            folder = runs_folder or Path(tempfile.gettempdir())
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / (name if folder.name == FOLDER else f"paceline-error-{name}")
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
            return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return "could not be written to any disk"


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ended with ``error``."""
    if isinstance(error, UsageError):
        return EXIT_USAGE
    if isinstance(error, Killed) and signals.first_signal():
        return 128 + signals.first_signal()
    return EXIT_FAILED if isinstance(error, PacelineError | OutputError) else EXIT_BROKE


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with suppress(OSError):  # stderr has no reader
        if issubclass(kind, KeyboardInterrupt):
            print(CTRL_C, file=sys.stderr, flush=True)
        else:
            print(f"ERROR: {error_message(error)}", file=sys.stderr, flush=True)
