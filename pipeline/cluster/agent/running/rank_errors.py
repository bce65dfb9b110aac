"""The error of a rank, from the files that it left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable

from ..wire import Json, read_json

LONGEST_MESSAGE, LONGEST_TRACEBACK = 2000, 20_000  # characters; the rank's log has the whole
FIRST_LINES, LAST_LINES = 8, 4  # of a message
_LONGEST_LAST_LINE = 300  # characters
_READ_BYTES = 1 << 20  # from the end of a rank's output: a message may show a whole tensor
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_HEAD = "Traceback (most recent call last):\n"
_MARK = r"\[rank\d+\]: "  # torch's, before every line of an uncaught exception that isn't empty
_AFTER_EXCEPTION = re.compile(  # output of torch, Python and wandb after the exception
    r"^(?:\[[WIEF]\d|\[rank\d+\]:|Exception ignored |\S+:\d+: \w*Warning: |terminate called |wandb: )", re.MULTILINE
)

FATAL = {
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
}
"""faulthandler's names of signals."""


ENDED_EARLY = (
    "ended with exit code 0 while others went on; every rank has to come to the same end (a sys.exit, or fewer batches)"
)
"""Of a script's rank that left no error, where another one failed."""


def has_only_exit_code(error: Json) -> bool:
    """Whether a rank left nothing but its exit code."""
    return str(error["message"]).startswith("ended with ")


def describe(code: int) -> str:
    if code == 0:
        return (
            "exit code 0 before the run was over; take out what ends the process (os._exit, exit in a library) in the "
            "model or in what it imports"
        )
    if code > 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def recorded_error(path: str) -> Json | None:
    """Return the error that torch's @record wrote, with the file's time, because the one inside is in whole seconds."""
    value = read_json(path)
    if not isinstance(value, dict):
        return None
    message = value.get("message")
    extra: Json = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    return {"unix_time": os.path.getmtime(path), "message": text, "traceback": extra.get("py_callstack", "")}


def printed_error(path: str, failed: Json | None, *, code: int = 0) -> Json | None:
    """Return the last traceback on a rank's stderr, or how it ended; None for a rank without an error.

    ``code``: its exit code, if torchrun wasn't there to report it in ``failed``.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            text = without_bars(file.read().decode("utf-8", "replace"))
        printed = os.path.getmtime(path)
    except FileNotFoundError:
        text, printed = "", time.time()
    if failed is None and code and text.strip():  # without output nothing explains the exit code
        failed = {"code": code, "unix_time": printed}
    by_exception = failed is not None and failed["code"] == 1
    uncaught = last_traceback(text, by_exception)
    if uncaught is not None:
        return {"unix_time": printed, "message": uncaught[0], "traceback": uncaught[1]}
    text = re.sub(f"^{_MARK}", "", text, flags=re.MULTILINE)
    if failed is None:
        return None
    code = failed["code"] or fatal_signal(text)
    how = describe(code)
    crash = re.findall(r"^[ \t]*what\(\):[ \t]*(\S.*)$", text, flags=re.MULTILINE)[-1:] if code < 0 else []
    message = f"{crash[0].rstrip()} ({how})" if crash else f"ended with {how}{_last_line(text) if code > 0 else ''}"
    last = crash_stack(text) or "\n".join(text.rstrip().splitlines()[-10:])
    more = "" if message.endswith(last.strip()) else last  # its only line stands in the message already
    return {"unix_time": failed["unix_time"], "message": message, "traceback": more}


def without_bars(text: str) -> str:
    """Return a program's output without what its progress bars have overwritten and without moves of the cursor."""
    lines = (_CURSOR.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))
    return "\n".join(line if line.strip() else "" for line in lines)


def _last_line(text: str) -> str:
    """Return a program's last line: of ``sys.exit("no data")``, or argparse's message about a wrong argument."""
    lines = map(str.strip, text.rstrip().splitlines())
    own = [line for line in lines if line and not _AFTER_EXCEPTION.match(line)]
    return f"; it said last: {own[-1][:_LONGEST_LAST_LINE]}" if own else ""


def last_traceback(text: str, by_exception: bool) -> tuple[str, str] | None:
    """Return message and traceback; all lines of the message if the process ended by it (``by_exception``).

    A traceback in the middle of the output was handled by the program, unless the rank ended by an exception.
    """
    before, head, rest = text.rpartition(_HEAD)
    if marked := re.fullmatch(f"{_MARK}(?:Original )?", before.rpartition("\n")[2]):  # torch's, of a loader's worker
        whole = re.match(rf"(?:{_MARK}.*\n?|\n)*", rest)
        rest = re.sub(f"^{_MARK}", "", whole.group(0) if whole else "", flags=re.MULTILINE)
    body = re.match(r"(?:[ \t].*\n|\n)*(?:.*\n?)", rest) if head else None
    ended_by_it = by_exception or marked
    if body is None or not (ended_by_it or not rest[body.end() :].strip()):
        return None
    shown = body.group(0).rstrip()
    last = shown.splitlines()[-1] if shown else " "
    if re.match(r"\s+(?![+|])", last):  # of a frame; those marks are of an exception group
        return "its traceback breaks off: is the disk full, or ulimit -f too low?", head + shown
    after = rest[body.end() :] if ended_by_it else ""
    more = (after if marked else _AFTER_EXCEPTION.split(after, maxsplit=1)[0]).rstrip()
    return (last, head + shown) if not more else (f"{last}\n{more}", f"{head}{shown}\n{more}")


def fatal_signal(text: str) -> int:
    """Return the signal that faulthandler reported on stderr, as a negative exit code; 0 without one."""
    names = "|".join(map(re.escape, FATAL))
    signals = re.findall(rf"^Fatal Python error: ({names})$", text, flags=re.MULTILINE)
    return -FATAL[signals[-1]] if signals else 0


def crash_stack(text: str) -> str:
    """Return the main thread's frames in faulthandler's last report, innermost last; '' without one."""
    dump = text.rpartition("\nFatal Python error: ")[2] if "\nFatal Python error: " in text else ""
    thread = re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.MULTILINE)[-1]
    return "\n".join(re.findall(r'^  File ".*$', thread, flags=re.MULTILINE)[::-1])


def masked_and_cut(error: Json, hide: Callable[[str], str]) -> Json:
    """Return the error without secrets and broken characters, cut to a readable length."""
    message, trace = (
        hide(error[name]).encode("utf-8", "replace").decode("utf-8").rstrip() for name in ("message", "traceback")
    )
    short, lines = message, message.split("\n")
    if len(lines) > FIRST_LINES + LAST_LINES + 1:
        left = f"… {len(lines) - FIRST_LINES - LAST_LINES:,} lines, see the log"
        short = "\n".join([*lines[:FIRST_LINES], left, *lines[-LAST_LINES:]])
    if len(short) > LONGEST_MESSAGE:
        cut = len(short) - LONGEST_MESSAGE
        short = f"{short[:LONGEST_MESSAGE]}… (cut: {cut:,} more characters are in the log)"
    if short != message and trace.endswith(message):
        trace = trace.removesuffix(message) + short
    return {**error, "message": short, "traceback": trace[-LONGEST_TRACEBACK:]}
