"""The message about a failed attempt. Pure.

It names the first error that isn't a consequence of another, and what a lost host looks like to the other hosts.
Tracebacks in the ranks' output are held back and shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.core.specs import LaunchPlan, LogLine, NodeExit, NodeLost, RankError

_ECHO = re.compile(
    r"closed by peer|connection (?:was )?(?:closed|reset|refused)|broken pipe|SIGTERM|SignalException|signal 15\b"
    r"|recvValue failed|sendBytes failed|DistNetworkError|DistStoreError|remote process exited|ncclRemoteError"
    r"|connectFullMesh failed|socket timeout|timed out|ncclSystemError",
    re.IGNORECASE,
)
_MISMATCH = "collective mismatch"  # gloo's words in the rank that received something else
_DIFFERENT = (
    "ranks were in different collectives: one of them has left one out, or made one of its own; every rank must join "
    "every collective"
)
_EXPLAINED = re.compile(r"(?:TrainerError|ConfigError): ")  # of trainers: the text explains everything
_OWN = re.compile(r"^paceline: error: (.*)", re.MULTILINE)  # of trainers.script.start: the line explains everything
_CONFIG = re.compile(r"(?:ConfigError|SyntaxError|IndentationError|ModuleNotFoundError): ")
_MEMORY = re.compile(  # or killed by an unknown process, which may be the kernel's
    r"out of memory|OutOfMemoryError|MemoryError|can(?:no|')t allocate memory|\bSIGKILL\b|warm parent of the ranks",
    re.IGNORECASE,
)
_OF_AGENT = re.compile(  # reasons for ending its ranks, whose errors are consequences
    r"(?:the controller has not been heard of|isolated: |torchrun of the first node has ended, and the controller|"
    r"cannot write to |the node agent could not go on).*"
)
FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


def is_echo(error: RankError) -> bool:
    """True if the error is a consequence: a peer closed its connection, or the rank was told to stop."""
    return _ECHO.search(error.message) is not None


def _is_early(error: RankError) -> bool:
    return error.message.startswith("ended with exit code 0 ")


def first_error(ends: Mapping[str, NodeExit | NodeLost]) -> tuple[str, RankError] | None:
    """Return host and error of the earliest rank that failed by itself, or the earliest consequence if all are that.

    An exit code of 0 ranks after every error that a rank has reported. Times are on the controller's clock already.
    """
    errors = [(host, error) for host, end in ends.items() if isinstance(end, NodeExit) for error in end.errors]
    return min(errors, key=lambda pair: (is_echo(pair[1]), _is_early(pair[1]), pair[1].unix_time), default=None)


def port_was_taken(plan: LaunchPlan, ends: Mapping[str, NodeExit | NodeLost]) -> bool:
    """True if node 0 could not listen on the master port, which another program took after the probe."""
    end = ends.get(plan.nodes[0].host)
    return isinstance(end, NodeExit) and not end.errors and _PORT.search(end.reason) is not None


def cause(ends: Mapping[str, NodeExit | NodeLost]) -> str:
    """Return ``host``, ``memory``, ``disk``, ``config`` or ``code``, as TrainingError defines them."""
    first = first_error(ends)
    lost = any(isinstance(end, NodeLost) for end in ends.values())
    if lost and (first is None or is_echo(first[1])):
        return "host"
    if _full_disk(ends) is not None and (first is None or not _says_more(first[1])):
        return "disk"
    if first is not None and _CONFIG.match(first[1].message):
        return "config"
    text = first[1].message if first is not None else " ".join(e.reason for e in ends.values())
    return "memory" if _MEMORY.search(text) else "disk" if FULL_DISK.search(text) else "code"


def _says_more(error: RankError) -> bool:
    """True if the error says more than that a peer went away, or the rank's exit code or signal."""
    return not is_echo(error) and not error.message.startswith("ended with ")


def _full_disk(ends: Mapping[str, NodeExit | NodeLost]) -> NodeExit | None:
    """Return the host whose agent reports a full disk, on which its ranks could not even write their error."""
    return next((end for end in ends.values() if isinstance(end, NodeExit) and FULL_DISK.search(end.reason)), None)


def _ended_by_agent(ends: Mapping[str, NodeExit | NodeLost]) -> NodeExit | None:
    """Return the host whose agent ended its ranks for a reason of its own."""
    return next((end for end in ends.values() if isinstance(end, NodeExit) and _OF_AGENT.match(end.reason)), None)


def failure_text(plan: LaunchPlan, ends: Mapping[str, NodeExit | NodeLost], order: Sequence[str], log_dir: Path) -> str:
    """Return the message for the user: host, rank, message and traceback of the first error, and the logs.

    An error that the trainer explains needs no traceback, which would only push the explanation off the screen.
    """
    first, full = first_error(ends), _full_disk(ends)
    lost = next((end for host in order if isinstance(end := ends[host], NodeLost)), None)
    if lost is not None and (first is None or is_echo(first[1])):
        what = f"training failed: {lost.host} {lost.reason}"
        host = lost.host
    elif (ended_by := _ended_by_agent(ends)) is not None and (first is None or is_echo(first[1])):
        host = ended_by.host
        what = f"training failed on {host}: {ended_by.reason.partition(chr(10))[0]}"
    elif first is not None and (full is None or _says_more(first[1])):
        host, error = first
        explained = _EXPLAINED.match(error.message)
        message = error.message[explained.end() :] if explained else error.message
        what = f"training failed on {host}, rank {error.rank}: {message}"
        folder = next((Path(node.run_dir).name for node in plan.nodes if node.host == host), "")
        if error.traceback.strip() and not explained:
            what += "\n" + _indented(shortened(without_message(error.traceback, error.message), folder))
        what += f"\n{_DIFFERENT}" if _MISMATCH in error.message else ""
        also = same_on(error, ends)
        what += f"\nthe same on {also}" if also else ""
    elif full is not None:
        what, host = f"training failed on {full.host}: {full.reason}", full.host
    else:
        host = order[0] if order else plan.nodes[0].host
        last = ends.get(host)
        reason = last.reason if last is not None else "no node answered"
        notes = [line for line in reason.split("\n") if not line.startswith(_SAID)]
        what = f"training failed on {host}: {explained_by_script(reason) or chr(10).join(notes)}"
    others = [name for name in order if name != host]
    gone = [name for name in others if isinstance(ends.get(name), NodeLost)]
    ended = [name for name in others if name not in gone]
    what += f"\nno longer answers either: {', '.join(gone)}" if gone else ""
    what += f"\nended with it: {', '.join(ended)}" if ended else ""
    return f"{what}\nlogs: {log_dir}"


def explained_by_script(reason: str) -> str:
    """Return what trainers.script.start said of its end, among the last lines of a node; '' where it said nothing."""
    return next(iter(_OWN.findall(reason)[-1:]), "")


def same_on(error: RankError, ends: Mapping[str, NodeExit | NodeLost]) -> str:
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
    """Return type and place of an error; the message may name a device or a shape that no other rank has."""
    places = re.findall(r'^ *File "[^"]*/([^/"]+)", line (\d+)', error.traceback, flags=re.MULTILINE)
    return (error.message.partition(":")[0], str(places)) if places else (error.message, "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())


_SEEN = {
    "answers": "its ssh server answers {who}: the host is alive, but can't be reached from here",
    "silent": "the host is alive, as {who} sees, but its ssh server says nothing: frozen, or overloaded",
    "refuses": "the host is alive, as {who} sees, but no ssh server listens there any more",
    "unreachable": "{who} can't reach it either: the host, or its link, is down",
}

_DEAD = ("unreachable", "silent")


def ssh_server(plan: LaunchPlan, host: str) -> tuple[str, int] | None:
    """Return address and port of a node's ssh server from its identity; None without ssh."""
    identity = next((node.identity for node in plan.nodes if node.host == host), "")
    address, _, port = [*identity.split(" "), "", ""][1].rpartition(":")
    return (address, int(port)) if port.isdecimal() and port != "0" else None


def is_dead(host: str, unanswered: Sequence[str], seen: Mapping[str, Sequence[str]], others: Sequence[str]) -> bool:
    """True if all ``others`` were asked to reach a host and got no answer, so that its ranks are cut off."""
    if host not in unanswered or not others or not set(others) <= seen.keys():
        return False
    at = unanswered.index(host)
    return all(at < len(seen[other]) and seen[other][at] in _DEAD for other in others)


def seen_of_lost(lost: Sequence[str], seen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each lost host that others were asked to reach.

    Args:
        seen: other host → its answers for ``lost``, in their order.
    """
    lines = []
    for number, host in enumerate(lost):
        answer_of = {who: answers[number] for who, answers in seen.items() if number < len(answers)}
        best = next((kind for kind in _SEEN if kind in answer_of.values()), None)
        if best is not None:
            who = " and ".join(name for name, kind in answer_of.items() if kind == best)
            lines.append(f"{host}: {_SEEN[best].format(who=who)}")
    return lines


_BEGIN = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")
_SAID = ("paceline: WARNING: ", "paceline: note: ")
_ERROR_LINE = "paceline: error: "  # of trainers.entry, a rank's last line
_LINK = re.compile(r"During handling of the above|The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line ')
_PLUMBING = (
    "trainers/training/", "trainers/classifier.py", "trainers/entry.py", "trainers/core/targets.py",
    "trainers/models/__init__.py", "trainers/models/own.py", "trainers/optimizers/__init__.py",
    "trainers/optimizers/own.py", "trainers/optimizers/torch_classes.py",
)  # fmt: skip


def is_worth_showing(line: LogLine) -> bool:
    """True for a rank's line, and for messages of trainers.script.start; torchrun's own lines stay in the log file."""
    return line.rank is not None or line.text.startswith(_SAID)


class Tracebacks:
    """Passes on the lines of ranks, except for the tracebacks that end a rank.

    Each of eight ranks prints its own, and the attempt's error shows the first of them. A rank that prints something
    after
    its traceback has caught the exception, so the traceback is then shown.

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
        begins = _BEGIN.match(line.text) or line.text.startswith(_ERROR_LINE)
        if begins or (held and _goes_on(held, line.text)):
            self._held[who] = [*held, line]
            return
        if held and not _is_uncaught(held):
            self._release(who)
        self._show(line)

    def release(self) -> None:
        """Show what is held back, after the attempt has ended well."""
        for who in [*self._held]:
            self._release(who)

    def _release(self, who: tuple[str, int | None]) -> None:
        for line in self._held.pop(who):
            self._show(line)


def _is_uncaught(held: list[LogLine]) -> bool:
    """True if the rank stands in the line, as torch marks each line of an uncaught exception."""
    return held[0].text.startswith(("[rank", _ERROR_LINE))


def _goes_on(held: list[LogLine], text: str) -> bool:
    """True if ``text`` belongs to the traceback or the error whose lines are ``held``."""
    if held[0].text.startswith(_ERROR_LINE):
        return True
    if _is_uncaught(held):
        return text.startswith(f"{held[0].text.partition(':')[0]}:")
    return text.startswith(" ") or not text or bool(_LINK.match(text)) or held[-1].text.startswith(" ")


def without_message(traceback: str, message: str) -> str:
    """Return a traceback without its last lines, which repeat the message."""
    frames = traceback.rstrip().removesuffix(message.rstrip())
    return re.sub(r"(?:^|(?<=\n))[\w.<>]+\.\Z", "", frames)


def shortened(traceback: str, folder: str) -> str:
    """Return a traceback with only the frames of the user's code and the one in which it was raised.

    Args:
        folder: name of the run's folder on the node. Paths of its code snapshot, or of a script's copy of that, become
            relative to the project.
    """
    code = rf'(?<=  File ")[^"\n]*/{re.escape(folder)}/(?:work/node\d+/above/above/)?code/'
    text = re.sub(code, "", traceback.rstrip()) if folder else traceback
    blocks = list(_blocks(text))
    own = [path for path, _ in blocks if path and not path.startswith("/")]
    of_user = [path for path in own if not path.startswith(_PLUMBING)] or own
    kept = [
        lines
        for (path, lines), (after, _) in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if not path or path in of_user or (not after and not path.startswith(_PLUMBING))
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
