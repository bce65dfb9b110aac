"""Explain a failed attempt by the first error that isn't a consequence of another, with its shortened traceback. Pure.

``Tracebacks`` keeps those of the other ranks off the screen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.events import LogLine, NodeExit, NodeLost, RankError
from pipeline.core.specs import LaunchPlan

_CONSEQUENCE = re.compile(
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
_CONFIG = re.compile(r"(?:ConfigError|SyntaxError|IndentationError|ModuleNotFoundError): ")
_MEMORY = re.compile(  # SIGKILL may come from the kernel's out-of-memory killer
    r"out of memory|OutOfMemoryError|MemoryError|can(?:no|')t allocate memory|\bSIGKILL\b|warm parent of the ranks",
    re.IGNORECASE,
)
_AGENT_REASON = re.compile(  # an agent's reasons to end its ranks, whose errors are then consequences
    r"\A(?:the controller has not been heard of|isolated: |torchrun of the first node has ended, and the controller|"
    r"cannot write to |the node agent could not go on).*"
)
FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_TRACEBACK_HEAD = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")
STARTER_LINES = ("paceline: WARNING: ", "paceline: note: ")
"""How the lines of trainers.script.start begin, which starts the ranks of a script."""
_ERROR_LINE = "paceline: error: "  # printed by trainers.entry as a rank's last line
_CHAIN = re.compile(r"During handling of the above|The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line ')
_OUR_FILES = (
    "trainers/training/", "trainers/classifier.py", "trainers/entry.py", "trainers/core/options.py",
    "trainers/models/__init__.py", "trainers/models/own.py", "trainers/optimizers/__init__.py",
    "trainers/optimizers/own.py", "trainers/optimizers/torch_classes.py",
)  # fmt: skip


def is_consequence(error: RankError) -> bool:
    """True if the error is a consequence: a peer closed its connection, or the rank was told to stop."""
    return _CONSEQUENCE.search(error.message) is not None


def first_error(ends: Mapping[str, NodeExit | NodeLost]) -> tuple[str, RankError] | None:
    """Return host and error of the first rank that failed by itself; if none did, of the first consequence.

    A rank that only ended too early with exit code 0 comes after ranks with errors. All times are the controller's.
    """
    errors = [(host, error) for host, end in ends.items() if isinstance(end, NodeExit) for error in end.errors]

    def order(pair: tuple[str, RankError]) -> tuple[bool, bool, float]:
        error = pair[1]
        return is_consequence(error), error.message.startswith("ended with exit code 0 "), error.unix_time

    return min(errors, key=order, default=None)


def port_was_taken(plan: LaunchPlan, ends: Mapping[str, NodeExit | NodeLost]) -> bool:
    """True if node 0 could not listen on the master port, which another program took after the probe."""
    end = ends.get(plan.nodes[0].host)
    return isinstance(end, NodeExit) and not end.errors and _PORT_TAKEN.search(end.reason) is not None


@dataclass(frozen=True)
class Blamed:
    """What explains a failure: a host that was lost, a node's own reason (such as a full disk), or a rank's error."""

    host: str
    lost: NodeLost | None = None
    reason: str = ""
    error: RankError | None = None


def blamed(ends: Mapping[str, NodeExit | NodeLost]) -> Blamed | None:
    """Return what explains a failure; None if nothing does. ``ends`` are in the order in which the nodes ended.

    What a rank says counts only if it isn't the consequence of something else. A full disk may keep ranks from telling
    more than an exit code.
    """
    first = first_error(ends)
    if first is None or is_consequence(first[1]):
        lost = next((end for end in ends.values() if isinstance(end, NodeLost)), None)
        if lost is not None:
            return Blamed(lost.host, lost=lost)
        if (by_agent := _first_exit(_AGENT_REASON, ends)) is not None:
            return Blamed(by_agent.host, reason=by_agent.reason.partition("\n")[0])
    full = _first_exit(FULL_DISK, ends)
    if full is not None and (first is None or not _is_informative(first[1])):
        return Blamed(full.host, reason=full.reason)
    return Blamed(first[0], error=first[1]) if first is not None else None


def cause(ends: Mapping[str, NodeExit | NodeLost]) -> str:
    """Return ``host``, ``memory``, ``disk``, ``config`` or ``code``, as TrainingError defines them."""
    match blamed(ends):
        case Blamed(lost=NodeLost()):
            return "host"
        case Blamed(error=RankError(message=text)):
            if _CONFIG.match(text):
                return "config"
        case Blamed(reason=text):
            pass
        case None:
            text = " ".join(end.reason for end in ends.values())
    return "memory" if _MEMORY.search(text) else "disk" if FULL_DISK.search(text) else "code"


def _is_informative(error: RankError) -> bool:
    """True if the error tells more than the loss of a peer, an exit code or a signal."""
    return not is_consequence(error) and not error.message.startswith("ended with ")


def _first_exit(pattern: re.Pattern[str], ends: Mapping[str, NodeExit | NodeLost]) -> NodeExit | None:
    """Return the first node whose own reason matches ``pattern``, if any."""
    return next((end for end in ends.values() if isinstance(end, NodeExit) and pattern.search(end.reason)), None)


def failure_text(plan: LaunchPlan, ends: Mapping[str, NodeExit | NodeLost], log_dir: Path | None) -> str:
    """Return the message for users: what is blamed, with the traceback of an error, and the path of the logs.

    Args:
        plan: what was started.
        ends: in the order in which the nodes have ended.
        log_dir: None: the logs were removed.
    """
    match found := blamed(ends):
        case Blamed(lost=NodeLost() as lost):
            what = f"training failed on {lost.host}: " if lost.answers else f"training failed: {lost.host} "
            what += lost.reason
        case Blamed(error=RankError() as error):
            what = _error_text(plan, found.host, error, ends)
        case Blamed():
            what = f"training failed on {found.host}: {found.reason}"
        case None:
            found = Blamed(next(iter(ends), plan.nodes[0].host))
            what = f"training failed on {found.host}: {_unexplained(ends.get(found.host))}"
    others = [name for name in ends if name != found.host]
    gone = [name for name in others if isinstance(end := ends[name], NodeLost) and not end.answers]
    ended = [name for name in others if name not in gone]
    what += f"\nno longer answers either: {', '.join(gone)}" if gone else ""
    what += f"\nended with it: {', '.join(ended)}" if ended else ""
    return what if log_dir is None else f"{what}\nlogs: {log_dir}"


def _error_text(plan: LaunchPlan, host: str, error: RankError, ends: Mapping[str, NodeExit | NodeLost]) -> str:
    """Return a rank's error with its traceback, a hint, and the other ranks that ended with the same.

    An error that the trainer explains gets no traceback, which would only push the explanation off the screen.
    """
    explained = _NEEDS_NO_TRACEBACK.match(error.message)
    what = f"training failed on {host}, rank {error.rank}: {error.message[explained.end() if explained else 0 :]}"
    folder = next((Path(node.run_dir).name for node in plan.nodes if node.host == host), "")
    if error.traceback.strip() and not explained:
        trace = shortened(without_message(error.traceback, error.message), folder)
        what += "".join(f"\n  {line}" for line in trace.rstrip().splitlines())
    what += f"\n{_MISMATCH_HINT}" if _MISMATCH in error.message else ""
    also = ranks_with_same_error(error, ends)
    return f"{what}\nthe same on {also}" if also else what


def _unexplained(end: NodeExit | NodeLost | None) -> str:
    """Return the last lines of a node that gave no error: what trainers.script.start said, else all but its remarks."""
    if end is None:
        return "no node answered"
    notes = [line for line in end.reason.split("\n") if not line.startswith(STARTER_LINES)]
    return explained_by_script(end.reason) or "\n".join(notes)


def explained_by_script(reason: str) -> str:
    """Return the error line of trainers.script.start among the last lines of a node; '' if there is none."""
    return next(iter(_SCRIPT_ERROR.findall(reason)[-1:]), "")


def ranks_with_same_error(error: RankError, ends: Mapping[str, NodeExit | NodeLost]) -> str:
    """Return ``ranks 1–7``: the other ranks that ended with an exception of this kind at the same place."""
    errors = [item for end in ends.values() if isinstance(end, NodeExit) for item in end.errors]
    ranks = sorted(item.rank for item in errors if item != error and _kind(item) == _kind(error))
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = [str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}" if ranks else ""


def _kind(error: RankError) -> tuple[str, str]:
    """Return type and place of an error, to compare ranks: its message may name a device or shape of its rank."""
    places = re.findall(r'^ *File "[^"]*/([^/"]+)", line (\d+)', error.traceback, flags=re.MULTILINE)
    return (error.message.partition(":")[0], str(places)) if places else (error.message, "")


def is_worth_showing(line: LogLine) -> bool:
    """True for a rank's line, and for messages of trainers.script.start; torchrun's own lines stay in the log file."""
    return line.rank is not None or line.text.startswith(STARTER_LINES)


class Tracebacks:
    """Passes on the lines of ranks, but holds back a traceback at the end of a rank's output.

    Otherwise each of eight ranks would print its own, and the attempt's error shows the first one anyway. If a rank
    prints more lines, it has caught the exception, and the held lines are shown.

    Args:
        show: takes each line for the user.
    """

    def __init__(self, show: Callable[[LogLine], None]) -> None:
        self._show = show
        self._held: dict[tuple[str, int | None], list[LogLine]] = {}

    def add(self, line: LogLine) -> None:
        """Take the next line of a rank."""
        who = (line.host, line.rank)
        held = self._held.get(who, [])
        begins = _TRACEBACK_HEAD.match(line.text) or line.text.startswith(_ERROR_LINE)
        if begins or (held and _belongs_to(held, line.text)):
            self._held[who] = [*held, line]
            return
        if held and not _is_uncaught(held):
            self._release(who)
        self._show(line)

    def release(self) -> None:
        """Show the lines that are held back, after the attempt has succeeded."""
        for who in [*self._held]:
            self._release(who)

    def _release(self, who: tuple[str, int | None]) -> None:
        for line in self._held.pop(who):
            self._show(line)


def _is_uncaught(held: list[LogLine]) -> bool:
    """True if no code can have caught it: torch puts the rank before such a one, trainers.entry says an error last."""
    return held[0].text.startswith(("[rank", _ERROR_LINE))


def _belongs_to(held: list[LogLine], text: str) -> bool:
    """True if ``text`` belongs to the traceback or the error whose lines are ``held``."""
    if held[0].text.startswith(_ERROR_LINE):
        return True
    if _is_uncaught(held):
        return text.startswith(f"{held[0].text.partition(':')[0]}:")
    return text.startswith(" ") or not text or bool(_CHAIN.match(text)) or held[-1].text.startswith(" ")


def without_message(traceback: str, message: str) -> str:
    """Return a traceback without its last lines, which repeat the error's message."""
    frames = traceback.rstrip().removesuffix(message.rstrip())
    return re.sub(r"(?:^|(?<=\n))[\w.<>]+\.\Z", "", frames)


def shortened(traceback: str, folder: str) -> str:
    """Return a traceback with only the frames of the user's code and the frame that raised the error.

    ``folder``: name of the run's folder on the node; paths below its code snapshot become relative to the project.
    """
    code = rf'(?<=  File ")[^"\n]*/{re.escape(folder)}/(?:work/node\d+/above/above/)?code/'
    text = re.sub(code, "", traceback.rstrip()) if folder else traceback
    blocks = list(_blocks(text))
    in_snapshot = [path for path, _ in blocks if path and not path.startswith("/")]
    of_user = [path for path in in_snapshot if not path.startswith(_OUR_FILES)] or in_snapshot
    kept = [
        lines
        for (path, lines), (after, _) in zip(blocks, [*blocks[1:], ("", "")], strict=True)  # the last frame raised it
        if not path or path in of_user or (not after and not path.startswith(_OUR_FILES))
    ]
    return "\n".join(kept)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each frame with its path, and the text between frames with ''."""
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
