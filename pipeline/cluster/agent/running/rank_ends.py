"""Find out how the ranks of a node ended, for exit.json: their errors, early ends, and out-of-memory kills.

The supervisor asks this when a start has failed. Sources are the error file that torch's @record writes, the last
traceback on a rank's stderr, torchrun's lines about exit codes, and the kernel's counters.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainers.contract.beats import ENDED, RUNNING

from ..node import control_groups, read_text
from ..requests import RankFailure
from ..wire import Json, read_json
from .processes import start_time

LONGEST_MESSAGE, LONGEST_TRACEBACK = 2000, 20_000  # characters; the rank's log has the whole
FIRST_LINES, LAST_LINES = 8, 4  # of a message that is cut in the middle
_LONGEST_LAST_LINE = 300  # characters
_READ_BYTES = 1 << 20  # from the end of a rank's output: a message may show a whole tensor
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")  # escape codes that move the cursor or clear lines
_HEAD = "Traceback (most recent call last):\n"
_MARK = r"\[rank\d+\]: "  # torch puts it before each line of an uncaught exception
_AFTER_EXCEPTION = re.compile(  # lines that torch, Python, wandb and Hydra print after the exception
    r"^(?:\[[WIEF]\d|\[rank\d+\]:|Exception ignored |\S+:\d+: \w*Warning: |terminate called |wandb: "
    r"|Set the environment variable HYDRA_FULL_ERROR)",
    re.MULTILINE,
)

# lines of torchrun: it ends a process after another rank's failure, and with which code a process ended
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
MEMORY_HINT = "fewer ranks, a smaller batch, or a larger limit for the group (docker run --memory=…)"

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
"""The message for a script's rank that ended without an error where another one failed."""


class RankExit(NamedTuple):
    """How a rank's process ended. A negative code is the signal that ended it."""

    code: int
    unix_time: float


def rank_failures(
    state_dir: str, first_rank: int, exits: Mapping[int, RankExit], *, ended_by_agent: bool, script_code: int
) -> list[RankFailure]:
    """Return each rank's own error, the earliest first.

    ``exits``: known ends by local rank. ``script_code``: of a script that ran without torchrun; 0: unknown.
    """
    failures: dict[int, RankFailure] = {}
    folders = os.path.join(glob.escape(state_dir), "ranks/*/attempt_*/*")
    for folder in sorted(glob.glob(os.path.join(folders, ""))):
        local_rank = int(os.path.basename(os.path.dirname(folder)))
        rank, rank_exit = first_rank + local_rank, exits.get(local_rank)
        failure = recorded_error(os.path.join(folder, "error.json"), rank)
        if failure is None and (rank_exit is not None or not ended_by_agent):  # else it prints about being ended
            failure = printed_error(os.path.join(folder, "stderr.log"), rank, rank_exit, script_code=script_code)
        if failure is not None:
            failures[rank] = failure
    # if some rank failed, one that ended with code 0 before may be the cause: the others waited for it
    for path in glob.glob(os.path.join(folders, ENDED)) if failures else ():
        rank = first_rank + int(os.path.basename(os.path.dirname(path)))
        failures.setdefault(rank, RankFailure(rank=rank, unix_time=os.path.getmtime(path), message=ENDED_EARLY))
    return sorted(failures.values(), key=lambda failure: failure.unix_time)


def has_only_exit_code(failure: RankFailure) -> bool:
    """Return whether nothing is known of a failure but the exit code (messages of ``printed_error``)."""
    return failure.message.startswith("ended with ")


def describe(code: int) -> str:
    """Return an exit code in words; the negative code of a signal with the signal's name."""
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


def recorded_error(path: str, rank: int) -> RankFailure | None:
    """Return the error that torch's @record wrote to ``path``; None if the rank has no such file."""
    value = read_json(path)
    if not isinstance(value, dict):
        return None
    message = value.get("message")
    extra: Json = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    # the time of the file tells which rank failed first; that in its content has whole seconds only
    return RankFailure(rank, os.path.getmtime(path), str(text), str(extra.get("py_callstack", "")))


def printed_error(path: str, rank: int, rank_exit: RankExit | None, *, script_code: int = 0) -> RankFailure | None:
    """Return the last traceback on a rank's stderr, or how it ended (if known); None for a rank without an error."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            text = without_bars(file.read().decode("utf-8", "replace"))
        printed_at = os.path.getmtime(path)
    except FileNotFoundError:
        text, printed_at = "", time.time()
    # A script without torchrun has one rank, which therefore ended with the script's exit code. A rank that printed
    # nothing gets no error here, as none would say more than the code, which the supervisor's ``why_ended`` reports.
    if rank_exit is None and script_code and text.strip():
        rank_exit = RankExit(script_code, printed_at)
    by_exception = rank_exit is not None and rank_exit.code == 1
    uncaught = last_traceback(text, by_exception)
    if uncaught is not None:
        message, traceback = uncaught
        return RankFailure(rank, printed_at, message, traceback)
    if rank_exit is None:
        return None
    text = re.sub(f"^{_MARK}", "", text, flags=re.MULTILINE)
    # faulthandler names the signal, which the exit code may not show
    names = "|".join(map(re.escape, FATAL))
    fatal = re.findall(rf"^Fatal Python error: ({names})$", text, flags=re.MULTILINE)
    code = rank_exit.code or (-FATAL[fatal[-1]] if fatal else 0)
    how = describe(code)
    # an uncaught exception of C++ prints its message as "what():  …"
    crash = re.findall(r"^[ \t]*what\(\):[ \t]*(\S.*)$", text, flags=re.MULTILINE)[-1:] if code < 0 else []
    message = f"{crash[0].rstrip()} ({how})" if crash else f"ended with {how}{_last_line(text) if code > 0 else ''}"
    last_lines = crash_stack(text) or "\n".join(text.rstrip().splitlines()[-10:])
    if message.endswith(last_lines.strip()):  # the message has the only line already
        last_lines = ""
    return RankFailure(rank, rank_exit.unix_time, message, last_lines)


def without_bars(text: str) -> str:
    """Return a program's output as a terminal shows it: of a progress bar, only the last state."""
    lines = (_CURSOR.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))
    return "\n".join(line if line.strip() else "" for line in lines)


def _last_line(text: str) -> str:
    """Return ``; it said last: LINE`` (of ``sys.exit("no data")``, or argparse's message); '' without a line."""
    lines = map(str.strip, text.rstrip().splitlines())
    own_lines = [line for line in lines if line and not _AFTER_EXCEPTION.match(line)]
    return f"; it said last: {own_lines[-1][:_LONGEST_LAST_LINE]}" if own_lines else ""


def last_traceback(text: str, by_exception: bool) -> tuple[str, str] | None:
    """Return (message, traceback) of the last exception in a rank's output; None if it has none.

    An exception with output behind it was caught, and doesn't count, unless the rank ended ``by_exception``.
    """
    before, head, rest = text.rpartition(_HEAD)
    # torch marks the lines of an uncaught exception, so where it ends is certain. If a worker process of a DataLoader
    # raised it, the heading there is "Original Traceback (most recent call last):".
    marked = re.fullmatch(f"{_MARK}(?:Original )?", before.rpartition("\n")[2])
    if marked:
        marked_lines = re.match(rf"(?:{_MARK}.*\n?|\n)*", rest)
        rest = re.sub(f"^{_MARK}", "", marked_lines.group(0) if marked_lines else "", flags=re.MULTILINE)
    # indented lines are frames; the first other line is the message
    body = re.match(r"(?:[ \t].*\n|\n)*(?:.*\n?)", rest) if head else None
    is_uncaught = by_exception or marked
    if body is None or not (is_uncaught or not rest[body.end() :].strip()):
        return None
    shown = body.group(0).rstrip()
    last = shown.splitlines()[-1] if shown else " "
    if re.match(r"\s+(?![+|])", last):  # a frame; lines of an exception group begin with + or |
        return "its traceback breaks off: is the disk full, or ulimit -f too low?", head + shown
    # a message may have several lines; what others print behind it doesn't belong to it
    after = rest[body.end() :] if is_uncaught else ""
    more = (after if marked else _AFTER_EXCEPTION.split(after, maxsplit=1)[0]).rstrip()
    return (last, head + shown) if not more else (f"{last}\n{more}", f"{head}{shown}\n{more}")


def crash_stack(text: str) -> str:
    """Return the main thread's frames in faulthandler's last report, innermost last; '' without a report."""
    report = text.rpartition("\nFatal Python error: ")[2] if "\nFatal Python error: " in text else ""
    main_thread = re.split(r"^(?:Current thread|Thread) .*\n", report, flags=re.MULTILINE)[-1]
    return "\n".join(re.findall(r'^  File ".*$', main_thread, flags=re.MULTILINE)[::-1])


def masked_and_cut(failure: RankFailure, hide: Callable[[str], str]) -> RankFailure:
    """Return the error without secrets and broken characters, cut to a readable length."""
    message, trace = (
        hide(text).encode("utf-8", "replace").decode("utf-8").rstrip() for text in (failure.message, failure.traceback)
    )
    short, lines = message, message.split("\n")
    if len(lines) > FIRST_LINES + LAST_LINES + 1:
        omitted = f"… {len(lines) - FIRST_LINES - LAST_LINES:,} lines, see the log"
        short = "\n".join([*lines[:FIRST_LINES], omitted, *lines[-LAST_LINES:]])
    if len(short) > LONGEST_MESSAGE:
        cut = len(short) - LONGEST_MESSAGE
        short = f"{short[:LONGEST_MESSAGE]}… (cut: {cut:,} more characters are in the log)"
    if short != message and trace.endswith(message):  # the message is the traceback's end: cut it there, too
        trace = trace.removesuffix(message) + short
    return failure._replace(message=short, traceback=trace[-LONGEST_TRACEBACK:])


class EarlyExits:
    """Finds ranks that ended by themselves before the run was over, such as by ``os._exit``.

    Such a rank leaves its file ``RUNNING`` behind, and neither torchrun nor the agent has ended its process.
    """

    def __init__(self, state_dir: str) -> None:
        self._pattern = os.path.join(glob.escape(state_dir), f"ranks/*/attempt_*/*/{RUNNING}*")
        self._ended_by_others: set[int] = set()  # process ids
        self._codes: dict[int, int] = {}  # process id → exit code, as torchrun reports it
        # process ids of the ranks that had begun when all were ended (by the agent, or by a signal to torchrun); None:
        # the ranks haven't been ended yet. A rank that begins later is ended, too, and so didn't end by itself.
        self._begun: set[int] | None = None

    def read(self, line: str) -> None:
        """Read in a line of torchrun which process it ends, or with which code a process ended."""
        closing, code = _CLOSING.search(line), _CODE.match(line)
        if closing:
            self._ended_by_others.add(int(closing[1]))
        if code:
            self._codes[int(code[2])] = int(code[1])

    @property
    def torchrun_ends_others(self) -> bool:
        """Return whether torchrun has seen a failure, which it will report after ending the other ranks."""
        return bool(self._ended_by_others)

    def about_to_end_all(self) -> None:
        """Note that ranks which end from now on were ended by the agent."""
        if self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
        self._ended_by_others |= {pid for _, pid in self._unfinished() if start_time(pid) is not None}

    def torchrun_ended(self, code: int) -> None:
        """Note the end of torchrun. A signal that ended it may have ended ranks too, and nothing shows which."""
        if code < 0 and self._begun is None:
            self._begun = {pid for _, pid in self._unfinished()}
            self._ended_by_others |= self._begun

    def ranks(self) -> dict[int, int]:
        """Return local rank → exit code of ranks that have ended by themselves; 0 also if torchrun reported no code."""
        unfinished = [(rank, pid) for rank, pid in self._unfinished() if self._begun is None or pid in self._begun]
        ended = (
            (rank, pid) for rank, pid in unfinished if pid not in self._ended_by_others and start_time(pid) is None
        )
        return {rank: self._codes.get(pid, 0) for rank, pid in ended}

    def _unfinished(self) -> list[tuple[int, int]]:
        """Return (local rank, process id) of the ranks whose run isn't over, by the files that they keep until then."""
        paths = (path.rsplit("/", 2) for path in glob.glob(self._pattern))
        return [(int(rank), int(name.removeprefix(RUNNING))) for _, rank, name in paths]


class OutOfMemory:
    """Counts the kernel's out-of-memory kills from now on, in this process's control group and on the whole host."""

    def __init__(self) -> None:
        self.host, self.group = "/proc/vmstat", memory_events_file()
        self.before = oom_kills(self.group), oom_kills(self.host)

    def explained(self, message: str) -> str:
        """Add to a message that ends with SIGKILL whether the kernel has counted an out-of-memory kill meanwhile."""
        if not message.endswith(("SIGKILL", "(SIGKILL)")):
            return message
        in_group = counter_increase(self.before[0], oom_kills(self.group))
        on_host = counter_increase(self.before[1], oom_kills(self.host))
        if in_group:
            return f"{message}: the kernel ended it, as its control group had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host:
            return f"{message}: the kernel ended a process there, as the host had no memory left; {MEMORY_HINT}"
        if in_group is None and on_host is None:
            return message
        where = "on that host" if in_group is None else "in its control group"
        return f"{message}; the kernel has counted no out-of-memory kill {where}"


def memory_events_file(cgroup_file: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> str:
    """Return the file that counts this control group's out-of-memory kills (version 1 or 2); '': there is none."""
    groups = control_groups(cgroup_file)
    if "memory" in groups:
        return f"{root}/memory{groups['memory']}/memory.oom_control"
    return f"{root}{groups['']}/memory.events" if "" in groups else ""


def oom_kills(path: str) -> int | None:
    """Return the number behind ``oom_kill`` in a table of the kernel; None if it has no such number."""
    found = re.search(r"^oom_kill (\d+)$", read_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def counter_increase(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
