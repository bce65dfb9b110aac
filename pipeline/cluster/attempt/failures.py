"""Explain a failed attempt: which host, node agent or rank failed first by itself, and the message for the user. Pure.

When one rank fails, the others fail as a consequence ("connection closed by peer"), and often earlier by the clock.
Consequences are recognised by their texts. Tracebacks are held back from the screen, and shortened to the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.cluster.events import LogLine, NodeExit, NodeLost, RankError
from pipeline.core.specs import LaunchPlan

_CONSEQUENCE = re.compile(  # messages of ranks that lost a peer or were told to stop
    r"closed by peer|connection (?:was )?(?:closed|reset|refused)|broken pipe|SIGTERM|SignalException|signal 15\b"
    r"|recvValue failed|sendBytes failed|DistNetworkError|DistStoreError|remote process exited|ncclRemoteError"
    r"|connectFullMesh failed|socket timeout|timed out|ncclSystemError",
    re.IGNORECASE,
)
_MISMATCH = "collective mismatch"  # gloo's message in the rank that received something else
_MISMATCH_HINT = (
    "ranks were in different collectives: one of them has left one out, or made one of its own; every rank must join "
    "every collective"
)
_NEEDS_NO_TRACEBACK = re.compile(r"(?:TrainerError|ConfigError): ")  # raised by trainers; its text explains everything
_SCRIPT_ERROR = re.compile(r"^paceline: error: (.*)", re.MULTILINE)  # printed by trainers.script.start
_CONFIG = re.compile(r"(?:ConfigError|SyntaxError|IndentationError|ModuleNotFoundError): ")  # a retry fails again
# SIGKILL may come from the kernel's out-of-memory killer. The warm parent, from which the ranks were forked, only waits
# while they run: if it ends then, most likely this killer ended it.
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can(?:no|')t allocate memory|\bSIGKILL\b|warm parent of the ranks",
    re.IGNORECASE,
)
_AGENT_REASON = re.compile(  # an agent's reasons to end its ranks, whose errors are then consequences
    r"\A(?:the controller has not been heard of|isolated: |torchrun of the first node has ended, and the controller|"
    r"cannot write to |the node agent could not go on).*"
)
FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

Ends = Mapping[str, NodeExit | NodeLost]
"""Host → how its node ended, in the order in which they have ended."""


class FailedRank(NamedTuple):
    """A rank's error, and its host."""

    host: str
    error: RankError


class FailedNode(NamedTuple):
    """A node that ended its ranks for a reason of its own, such as a full disk."""

    host: str
    reason: str


def is_consequence(error: RankError) -> bool:
    """Return whether the error is a consequence: a peer closed its connection, or the rank was told to stop."""
    return _CONSEQUENCE.search(error.message) is not None


def first_error(ends: Ends) -> FailedRank | None:
    """Return the failed rank that explains most; None if no rank has an error."""
    failed = [
        FailedRank(host, error) for host, end in ends.items() if isinstance(end, NodeExit) for error in end.errors
    ]

    def order(rank: FailedRank) -> tuple[bool, bool, float]:
        # an error of the rank's own comes before an exit with code 0 that was too early, and before a consequence
        error = rank.error
        return is_consequence(error), error.message.startswith("ended with exit code 0 "), error.unix_time

    return min(failed, key=order, default=None)


def port_was_taken(plan: LaunchPlan, ends: Ends) -> bool:
    """Return whether node 0 could not listen on the master port, as another program took it after the probe."""
    end = ends.get(plan.nodes[0].host)
    return isinstance(end, NodeExit) and not end.errors and _PORT_TAKEN.search(end.reason) is not None


def blamed(ends: Ends) -> NodeLost | FailedNode | FailedRank | None:
    """Return the lost host, node or rank that explains a failure; None if nothing does."""
    first = first_error(ends)
    # ranks have only consequences to report: of a lost host, or because an agent ended its ranks
    if first is None or is_consequence(first.error):
        lost = next((end for end in ends.values() if isinstance(end, NodeLost)), None)
        if lost is not None:
            return lost
        if (by_agent := _first_exit(_AGENT_REASON, ends)) is not None:
            return FailedNode(by_agent.host, by_agent.reason.partition("\n")[0])
    full_disk = _first_exit(FULL_DISK, ends)
    # a full disk explains more than the loss of a peer, an exit code or a signal
    if full_disk is not None and (
        first is None or is_consequence(first.error) or first.error.message.startswith("ended with ")
    ):
        return FailedNode(full_disk.host, full_disk.reason)
    return first


def _first_exit(pattern: re.Pattern[str], ends: Ends) -> NodeExit | None:
    return next((end for end in ends.values() if isinstance(end, NodeExit) and pattern.search(end.reason)), None)


def cause(ends: Ends) -> str:
    """Return ``host``, ``memory``, ``disk``, ``config`` or ``code``, as TrainingError defines them."""
    match blamed(ends):
        case NodeLost():
            return "host"
        case FailedRank(error=RankError(message=text)):
            if _CONFIG.match(text):
                return "config"
        case FailedNode(reason=text):
            pass
        case None:
            text = " ".join(end.reason for end in ends.values())
    return "memory" if _MEMORY.search(text) else "disk" if FULL_DISK.search(text) else "code"


def failure_text(plan: LaunchPlan, ends: Ends, log_dir: Path | None) -> str:
    """Return the message for users: what is blamed, with a traceback. ``log_dir``: None if the logs were removed."""
    match blamed(ends):
        case NodeLost(host=host, reason=reason, is_explained=False):
            text = f"training failed: {host} {reason}"
        case FailedRank(host=host, error=error):
            text = _error_text(plan, host, error)
        case NodeLost(host=host, reason=reason) | FailedNode(host=host, reason=reason):
            text = f"training failed on {host}: {reason}"
        case None:  # no rank has an error: show that of the script's starter, else the node's lines without its notes
            host = next(iter(ends), plan.nodes[0].host)
            reason = ends[host].reason if host in ends else "no node answered"
            lines = [line for line in reason.split("\n") if not line.startswith(STARTER_LINES)]
            shown = explained_by_script(reason) or "\n".join(lines)
            text = f"training failed on {host}: {shown}"
    others = [name for name in ends if name != host]
    gone = [name for name in others if isinstance(end := ends[name], NodeLost) and not end.is_explained]
    ended = [name for name in others if name not in gone]
    text += f"\nno longer answers either: {', '.join(gone)}" if gone else ""
    text += f"\nended with it: {', '.join(ended)}" if ended else ""
    return text if log_dir is None else f"{text}\nlogs: {log_dir}"


def _error_text(plan: LaunchPlan, host: str, error: RankError) -> str:
    """Return a rank's error with a hint, and its traceback unless the trainer explains it."""
    explained = _NEEDS_NO_TRACEBACK.match(error.message)
    text = f"training failed on {host}, rank {error.rank}: {error.message[explained.end() if explained else 0 :]}"
    folder = next((Path(node.run_dir).name for node in plan.nodes if node.host == host), "")
    if error.traceback.strip() and not explained:
        trace = shortened(without_message(error.traceback, error.message), folder)
        text += "".join(f"\n  {line}" for line in trace.rstrip().splitlines())
    return f"{text}\n{_MISMATCH_HINT}" if _MISMATCH in error.message else text


def explained_by_script(reason: str) -> str:
    """Return the error line of trainers.script.start among the last lines of a node; '' if there is none."""
    return next(iter(_SCRIPT_ERROR.findall(reason)[-1:]), "")


STARTER_LINES = ("paceline: WARNING: ", "paceline: note: ")
"""Beginnings of the lines of trainers.script.start, which starts the ranks of a script."""
_ERROR_LINE = "paceline: error: "  # printed by trainers.entry as a rank's last line
_TRACEBACK_HEAD = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")
_CHAIN = re.compile(r"During handling of the above|The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line ')
_OUR_FILES = (  # of the built-in trainer: frames that tell users nothing about their own code
    "trainers/training/", "trainers/classifier.py", "trainers/entry.py", "trainers/core/options.py",
    "trainers/models/__init__.py", "trainers/models/own.py", "trainers/optimizers/__init__.py",
    "trainers/optimizers/own.py", "trainers/optimizers/torch.py",
)  # fmt: skip


def is_worth_showing(line: LogLine) -> bool:
    """Return whether a line goes to the screen: those of ranks and of a script's starter do, torchrun's own don't."""
    return line.rank is not None or line.text.startswith(STARTER_LINES)


class HeldTracebacks:
    """Passes on the lines of ranks, but holds back a traceback until a further line shows that it was caught."""

    def __init__(self, show: Callable[[LogLine], None]) -> None:
        self._show = show
        self._held: dict[tuple[str, int | None], list[LogLine]] = {}  # by host and rank

    def add(self, line: LogLine) -> None:
        source = (line.host, line.rank)
        held = self._held.get(source, [])
        begins = _TRACEBACK_HEAD.match(line.text) or line.text.startswith(_ERROR_LINE)
        if begins or (held and _belongs_to(held, line.text)):
            self._held[source] = [*held, line]
            return
        # a traceback that ended its rank stays held: ``failure_text`` shows the one that explains why an attempt failed
        if held and not _ends_the_rank(held):
            self._show_held(source)
        self._show(line)

    def release(self) -> None:
        """Show all lines that are still held: after an attempt that ended well, no message at the end shows them."""
        for source in [*self._held]:
            self._show_held(source)

    def _show_held(self, source: tuple[str, int | None]) -> None:
        for line in self._held.pop(source):
            self._show(line)


def _ends_the_rank(held: list[LogLine]) -> bool:
    """Return whether nothing has caught the exception: torch marks its traceback, or trainers.entry printed it."""
    return held[0].text.startswith(("[rank", _ERROR_LINE))


def _belongs_to(held: list[LogLine], text: str) -> bool:
    """Return whether a line continues the traceback or the error whose lines are ``held``."""
    if held[0].text.startswith(_ERROR_LINE):
        return True
    if _ends_the_rank(held):
        return text.startswith(f"{held[0].text.partition(':')[0]}:")
    return text.startswith(" ") or not text or bool(_CHAIN.match(text)) or held[-1].text.startswith(" ")


def without_message(traceback: str, message: str) -> str:
    """Return a traceback without the message at its end, and without the module in front of the error's name."""
    frames = traceback.rstrip().removesuffix(message.rstrip())
    return re.sub(r"(?:^|(?<=\n))[\w.<>]+\.\Z", "", frames)


def shortened(traceback: str, folder: str) -> str:
    """Return a traceback with only the user's frames and the one that raised. ``folder``: the run folder's name."""
    # make paths of the run's copy of the code relative: all others are those of installed packages. A script runs in a
    # second copy (run_folder.WORK_COPY). The two folders ``above`` around it receive what the script writes to ../..
    snapshot = rf'(?<=  File ")[^"\n]*/{re.escape(folder)}/(?:work/node\d+/above/above/)?code/'
    blocks = list(_blocks(re.sub(snapshot, "", traceback.rstrip()) if folder else traceback))
    in_snapshot = [path for path, _ in blocks if path and not path.startswith("/")]
    of_user = [path for path in in_snapshot if not path.startswith(_OUR_FILES)] or in_snapshot
    kept = []
    for number, (path, lines) in enumerate(blocks):
        # the last frame before a line that is no frame: the message, or the head of a chained exception
        raised_the_error = number + 1 == len(blocks) or not blocks[number + 1][0]
        if not path or path in of_user or (raised_the_error and not path.startswith(_OUR_FILES)):
            kept.append(lines)
    return "\n".join(kept)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (path, lines) of each frame of a traceback; '' as path for what isn't a frame."""
    path, lines = "", list[str]()
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame or not line.startswith("    "):
            if lines:
                yield path, "\n".join(lines)
            path, lines = frame["path"] if frame else "", []
        lines.append(line)
    if lines:
        yield path, "\n".join(lines)
