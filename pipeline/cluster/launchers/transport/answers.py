"""The output of a host's command, and the node agent's lines in it. Pure, and strict: other lines are skipped.

A login shell may print anything around them, a connection may end in the middle of a line, and a file of the node may
be damaged; none of that may end the thread that reads. Each answer carries the token of its request, so nothing else
that a host prints is mistaken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.agent.reports import Lines, NodeEnd
from pipeline.cluster.events import LogLine, NodeExit, NodeLost, RankError
from pipeline.core.errors import HostError
from pipeline.core.printable import printable
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import FieldError, Record, from_json

ENDLESS = "its login prints without end"
"""The beginning of the note of an output that was cut off."""
LATE = "it hadn't answered after"
"""The beginning of the note of a command that the time limit ended."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of the command on one host, and how it ended.

    ``code`` is its exit code; None: it was ended by the time limit or never began, as ``note`` says.
    """

    stdout: bytes = b""
    stderr: str = ""
    code: int | None = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The agent's JSON (None: there is none), and the output that it came in."""

    value: dict[str, Any] | None
    output: Output = Output()

    @property
    def reported_error(self) -> str | None:
        """Why the agent could not do what was requested, in its own words; None: it did, or didn't answer."""
        error = None if self.value is None else self.value.get("error")
        return None if error is None else str(error)

    def record(self, kind: type[Record]) -> Record | None:
        """Return the answer as a record; None: there is none, or the agent reports an error.

        Raises HostError: it has another form.
        """
        if self.value is None or self.reported_error is not None:
            return None
        try:
            return from_json(kind, self.value)
        except ValueError as error:
            raise HostError(f"an agent's answer is no {kind.__name__}: {error}") from error

    @property
    def error(self) -> str | None:
        """Why the host failed, by its own output; None: it succeeded."""
        if self.value is not None:
            return self.reported_error
        stderr = self.output.stderr.strip().splitlines()
        return self.output.note or (stderr[-1] if stderr else "no answer")


_RECEIVED = "received"
_LONGEST = 60  # characters of a wrong value that a message shows
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and end of line


def parse(line: bytes, token: str) -> dict[str, Any] | None:
    """Return the JSON object of one answer line; None for every other line, and for one that was cut.

    Text printed before it without an end of line stands in the same line.
    """
    _, mark, text = line.rpartition(b"@paceline %s " % token.encode())
    if not mark:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_answer(stdout: bytes, token: str) -> dict[str, Any] | None:
    """Return the agent's last answer, skipping what a login shell prints and reports of progress."""
    return next((value for value in _newest_first(stdout, token) if _RECEIVED not in value), None)


def received_bytes(stdout: bytes, token: str) -> int:
    """Return how many bytes of the payload the agent has reported to have."""
    count = next((value[_RECEIVED] for value in _newest_first(stdout, token) if _RECEIVED in value), 0)
    return count if isinstance(count, int) else 0


def _newest_first(stdout: bytes, token: str) -> Iterator[dict[str, Any]]:
    if token.encode() not in stdout:  # saves parsing the long output of a login
        return iter(())
    return (value for line in reversed(stdout.split(b"\n")) if (value := parse(line, token)) is not None)


def parse_stream(
    line: bytes, token: str, host: str, now: float
) -> Lines | NodeBeat | NodeExamination | NodeExit | NodeLost | None:
    """Return one line of a live stream; None: it isn't the agent's, or is cut.

    ``now``: unix seconds on the controller, to which the times of the node's errors are converted.
    """
    value = parse(line, token) if line.endswith(b"\n") else None
    if value is None:
        return None
    try:
        if "lines" in value:
            return _checked(from_json(Lines, value["lines"]))
        if "end" in value:
            return node_end(host, from_json(NodeEnd, value["end"]), now - float(value["now"]))
        if "error" in value:
            return NodeLost(host=host, reason=str(value["error"]), answers=True)
        if "examination" in value:
            return of_host(host, from_json(NodeExamination, value["examination"]))
        return from_json(NodeBeat, value["beat"])._replace(host=host) if "beat" in value else None
    except (KeyError, TypeError, ValueError):
        return None


def of_host(host: str, examination: NodeExamination) -> NodeExamination:
    """Return the examination with the host's label here."""
    return examination._replace(host=host, ranks=tuple(rank._replace(host=host) for rank in examination.ranks))


def log_line(host: str, text: str) -> LogLine:
    """Parse ``3 | epoch 1`` as a line of rank 3. A line without a rank is torchrun's, or damaged."""
    rank, separator, rest = text.partition(" | ")
    if separator and (rank == "-" or (rank.isascii() and rank.isdecimal())):
        return LogLine(host=host, rank=None if rank == "-" else int(rank), text=rest)
    return LogLine(host=host, rank=None, text=text)


def _checked(lines: Lines) -> Lines:
    """Return the lines. Raises ValueError: their file or range is impossible."""
    if lines.file not in ("log", "metrics") or not 0 <= lines.start_bytes <= lines.end_bytes:
        raise ValueError(lines.file)
    return lines


def node_end(host: str, end: NodeEnd, clock_correction_s: float) -> NodeExit | NodeLost:
    """Return a node's end from the agent's exit.json.

    ``clock_correction_s``: added to the node's times to convert them to the controller's clock.
    """
    reason = _escaped(end.reason)
    if end.lost or not end.gone:  # something still runs there, so it counts as lost
        return NodeLost(host=host, reason=reason, answers=True)
    errors = tuple(
        RankError(
            rank=failure.rank,
            unix_time=failure.unix_time + clock_correction_s,
            message=_escaped(failure.message),
            traceback=_escaped(failure.traceback),
        )
        for failure in end.errors
    )
    reason = "\n".join([reason, *map(_escaped, end.tail if end.code else ())])
    return NodeExit(host=host, code=end.code, reason=reason, errors=errors, outlived=_escaped(end.outlived))


def _escaped(text: str) -> str:
    """Escape control characters, which would move a terminal's cursor or set its colours; the log has them raw."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def host_facts(host: str, value: Mapping[str, Any]) -> HostFacts:
    """Return the facts in the answer of ``host`` to a probe.

    Raises HostError: a field is missing or of another type; names the host, the field and the value.
    """
    try:
        return from_json(HostFacts, {**value, "host": host})
    except FieldError as error:
        seen = printable(repr(error.value))[:_LONGEST]
        raise HostError(
            f"probe: {host} can't take part: its answer has {error.field} = {seen} in place of {error.wanted}",
            hint=f"run the command again; if it stays so, another interpreter for {host} (cluster.python=) or host",
            hosts=[host],
        ) from error
