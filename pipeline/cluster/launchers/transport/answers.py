"""Parse the output of a command on a host: the node agent's answer in it, or why there is none, and the fix. Pure.

A login shell may print anything around the agent's lines, a connection may end in the middle of a line, and a file of
the node may be damaged; none of this may end the thread that reads. Each answer contains the token of its request, so
that nothing else that a host prints is mistaken for an answer.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.agent.requests import Lines, NodeEnd
from pipeline.cluster.agent.wire import FIX_HERE, FIX_THERE
from pipeline.cluster.events import LogLine, NodeExit, NodeLost, RankError
from pipeline.cluster.launchers.transport.payload import NO_PROGRAM, TAKEN_FOR_COMMANDS, TOO_OLD
from pipeline.core.errors import HostError
from pipeline.core.printable import printable
from pipeline.core.redact import hide
from pipeline.core.specs import Host
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import FieldError, Record, from_json

ENDLESS = "its login prints without end"
LATE = "it hadn't answered after"
"""How ``Output.note`` begins if the output was cut off; if the time limit ended the command."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of the command on one host, and how it ended."""

    stdout: bytes = b""
    stderr: str = ""
    code: int | None = 0  # exit code; None: the command was ended, or never began, as ``note`` explains
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The agent's answer on one host."""

    value: dict[str, Any] | None  # None: the output contains no answer
    output: Output = Output()  # of the command

    @property
    def reported_error(self) -> str | None:
        """Why the agent could not do what was requested, in its words; None: it could, or it didn't answer."""
        error = None if self.value is None else self.value.get("error")
        return None if error is None else str(error)

    def record(self, kind: type[Record]) -> Record | None:
        """Return the answer as a record; None: there is none, or it is an error. Raises HostError: another form."""
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


_RECEIVED = "received"  # the field of a report of progress
_LONGEST = 60  # characters of a wrong value that a message shows
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and end of line


def parse(line: bytes, token: str) -> dict[str, Any] | None:
    """Return the JSON object of one answer line; None for every other line, and for one that was cut."""
    # not at the start of the line only: a login may have printed text without an end of line
    _, prefix, text = line.rpartition(b"@paceline %s " % token.encode())
    if not prefix:
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
    """Return how many bytes of the payload have arrived, by the agent's newest report."""
    count = next((value[_RECEIVED] for value in _newest_first(stdout, token) if _RECEIVED in value), 0)
    return count if isinstance(count, int) else 0


def _newest_first(stdout: bytes, token: str) -> Iterator[dict[str, Any]]:
    return (value for line in reversed(stdout.split(b"\n")) if (value := parse(line, token)) is not None)


def parse_stream(
    line: bytes, token: str, host: str, now: float
) -> Lines | NodeBeat | NodeExamination | NodeExit | NodeLost | None:
    """Parse a line of a live stream; None: it isn't the agent's, or it is cut. ``now``: the controller's unix time."""
    value = parse(line, token) if line.endswith(b"\n") else None
    if value is None:
        return None
    try:
        if "lines" in value:
            lines = from_json(Lines, value["lines"])
            is_possible = lines.file in ("log", "metrics") and 0 <= lines.start_bytes <= lines.end_bytes
            return lines if is_possible else None
        if "end" in value:
            return node_end(host, from_json(NodeEnd, value["end"]), now - float(value["now"]))
        if "error" in value:
            return NodeLost(host=host, reason=str(value["error"]), is_explained=True)
        if "examination" in value:
            return with_host_label(host, from_json(NodeExamination, value["examination"]))
        return from_json(NodeBeat, value["beat"])._replace(host=host) if "beat" in value else None
    except (KeyError, TypeError, ValueError):
        return None


def with_host_label(host: str, examination: NodeExamination) -> NodeExamination:
    """Set the host's label, which the agent doesn't know."""
    return examination._replace(host=host, ranks=tuple(rank._replace(host=host) for rank in examination.ranks))


def log_line(host: str, text: str) -> LogLine:
    """Parse ``3 | epoch 1`` as a line of rank 3. A line without a rank is torchrun's, or damaged."""
    rank, separator, rest = text.partition(" | ")
    if separator and (rank == "-" or (rank.isascii() and rank.isdecimal())):
        return LogLine(host=host, rank=None if rank == "-" else int(rank), text=rest)
    return LogLine(host=host, rank=None, text=text)


def node_end(host: str, end: NodeEnd, clock_correction_s: float) -> NodeExit | NodeLost:
    """Return the event for a node's end. ``clock_correction_s``: what the controller's clock is ahead of the node's."""
    reason = _escaped(end.reason)
    if end.lost or not end.gone:  # not gone: some of its processes still run, so it counts as lost
        return NodeLost(host=host, reason=reason, is_explained=True)
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
    """Return the facts in an answer to a probe. Raises HostError: a field is missing or of another type."""
    try:
        return from_json(HostFacts, {**value, "host": host})
    except FieldError as error:
        seen = printable(repr(error.value))[:_LONGEST]
        raise HostError(
            f"probe: {host} can't take part: its answer has {error.field} = {seen} in place of {error.wanted}",
            hint=f"run the command again; if it stays so, another interpreter for {host} (cluster.python=) or host",
            hosts=[host],
        ) from error


# ------------------------------------------------------------------------------- why a host gave no answer, and the fix
_SSH_FAILED = 255  # ssh's own exit code; remote commands may have it too, so the output is looked at as well
_UNREACHABLE = re.compile(
    r"(Could not resolve hostname[^\n]*|Connection refused|No route to host|Network is unreachable"
    r"|Connection (?:closed|reset) by(?! peer \()[^\n]*)",  # with an errno in parentheses it is Open MPI's message
    re.IGNORECASE,
)
_SLOW = re.compile(r"(Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out|not responding)")
_REFUSED = re.compile(r"^(?:\S+@\S+: )?(Permission denied \([\w,@.-]+\))\.?\s*$", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):\d+\s*$", re.MULTILINE)
_CHANGED = re.compile(r"^Host key for (\S+) has changed", re.MULTILINE)
_TOO_OLD = re.compile(rf"^(.+): Python (\S+) {TOO_OLD}\s*$", re.MULTILINE)

_MOST_LINES = 5
_LONGEST_LINE = 200  # characters
_OTHER_PYTHON = "cluster.python=/path/to/python"
_START_FILES = "the start files of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)"


def explain_over_ssh(
    host: Host, answer: Answer, ssh_config: str | None, *, connect_s: float, is_setting: bool = True
) -> tuple[str, str | None]:
    """Return why a host gave no answer over ssh, with the value seen, and the command that fixes it.

    ``connect_s``: how long ssh tried to connect. ``is_setting``: True if that was cluster.connect_timeout_s, False if
    it was the shorter limit of a host that has answered before.
    """
    ssh, output = ssh_command(host, ssh_config), answer.output
    if answer.reported_error is not None:
        return agent_error(answer.reported_error, ssh)
    slow_hint = f"{ssh} true"
    if is_setting:
        slow_hint = f"cluster.connect_timeout_s={3 * connect_s:g} if it is only slow, or {ssh} true"
    if output.code is None and output.note.startswith(LATE):
        setting = f" (cluster.connect_timeout_s={connect_s:g} and some for the answer)" if is_setting else ""
        return f"{output.note}{setting}{quoted(output, host.secrets.values())}", slow_hint
    if output.code == _SSH_FAILED:
        if error := ssh_error(host, output, ssh_config):
            return error
        if late := _SLOW.findall(output.stderr):
            setting = " (cluster.connect_timeout_s)" if is_setting else ""
            return f"unreachable: {LATE} {connect_s:g} s{setting}: {late[-1]}", slow_hint
    return interpreter_error(host, output, ssh) or _login_error(host, output, ssh)


def agent_error(error: str, ssh: str) -> tuple[str, str]:
    """Return the agent's own error, and the command that fixes it; ``ssh``: what the user would type to reach it."""
    if "has a full disk" in error:
        return error, f"{ssh} df -h, or cluster.workdir=/path/to/a/folder/there"
    if "set cluster.workdir" in error:
        return error, "cluster.workdir=/path/to/a/folder/there"
    # behind one of these marks the agent's error names a command to type on the host, or here
    what, separator, command = error.rpartition(FIX_THERE)
    if separator:
        return what, f"{ssh} -t {shlex.quote(command)}"
    what, separator, command = error.rpartition(FIX_HERE)
    return (what, command) if separator else (error[-600:], f"{ssh} true")


def ssh_command(host: Host, ssh_config: str | None) -> str:
    """Return the ssh command that the user would type to reach the host."""
    words = ["ssh"]
    words += ["-F", ssh_config] if ssh_config else []
    words += ["-p", str(host.port)] if host.port else []
    words += [f"{host.user}@{host.name}" if host.user else host.name]
    return shlex.join(words)


# -------------------------------------------------------------------------------------------------- the output of ssh
def ssh_error(host: Host, output: Output, ssh_config: str | None) -> tuple[str, str] | None:
    """Return why ssh could not connect, and the fix; None: the output isn't ssh's."""
    ssh, stderr = ssh_command(host, ssh_config), output.stderr
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        offending = _OFFENDING.search(stderr)
        file = f" -f {shlex.quote(offending[1])}" if offending else ""
        # the host's name in known_hosts: ssh prints it, and for an alias of ~/.ssh/config it is the HostName
        name = f"[{host.name}]:{host.port}" if host.port and host.port != 22 else host.name
        if changed := _CHANGED.search(stderr):
            name = changed[1]
        return (
            "its host key is another one than known_hosts has: it was reinstalled, or somebody stands between",
            f"ssh-keygen{file} -R {shlex.quote(name)} once you know why, then {ssh} true",
        )
    if "Host key verification failed" in stderr:
        return (
            "its host key is not in known_hosts (and is never accepted without you)",
            f"{ssh} true, compare the fingerprint, answer yes",
        )
    if refused := _REFUSED.findall(stderr):
        return (
            f"{refused[-1]}: no key of your agent or ~/.ssh (IdentityFile) is accepted there",
            f"{ssh.replace('ssh', 'ssh-copy-id', 1)}, or ssh-add the right key",
        )
    if "Too many authentication failures" in stderr:
        return (
            "Too many authentication failures: your ssh agent offers more keys than it takes",
            f"IdentityFile and IdentitiesOnly yes for {host.name} in ~/.ssh/config",
        )
    if not (unreachable := _UNREACHABLE.findall(stderr)):
        return None
    # a connection may have been closed because a ProxyCommand failed, which then has printed why
    quotation = quoted(output) if unreachable[-1].startswith("Connection closed") else ""
    return f"unreachable: {unreachable[-1].strip()}{quotation}", f"{ssh} true"


# ---------------------------------------------------------------------------------------------- the output of a login
def _login_error(host: Host, output: Output, ssh: str) -> tuple[str, str]:
    """Return why the login started no agent: by a known text in its output, else by how it ended."""
    quotation = quoted(output, host.secrets.values())
    if output.note.startswith(ENDLESS):
        return output.note + quotation, f"{ssh} true; see {_START_FILES}"
    text = "\n".join([output.stdout.decode(errors="replace"), output.stderr])
    # The beginning of stdin (payload._PREAMBLE) is a shell command that prints this text. A shell has executed it:
    if re.search(f"(?m)^{TAKEN_FOR_COMMANDS}", text):
        what = "a start file of its login puts another shell in the place of the login shell, also where nobody types"
        return what + quotation, f"write it as `[[ $- == *i* ]] && exec zsh` in {_START_FILES}"
    # or a program has only printed the command
    if re.search(f"(?m)^echo {TAKEN_FOR_COMMANDS}", text):
        what = "a start file of its login puts a program in its place that prints what it reads (`exec cat`)"
        return what, f"let it run only where somebody types (`[[ $- == *i* ]]`): see {_START_FILES}"
    if re.search(f"(?m)^{NO_PROGRAM}", text):
        what = "a start file of its login reads standard input, which is how the node agent gets there"
        return what + quotation, f"let it read only where somebody types (`[[ $- == *i* ]]`): see {_START_FILES}"
    if output.code is None:
        return output.note + quotation, f"{ssh} true"
    ended = f"exit code {output.code}" if output.code >= 0 else f"signal {-output.code}"
    what = f"its login ended with {ended} and no answer of the node agent"
    if output.code == 0:
        what += ": an `exit` in a start file, or a ForceCommand in its sshd_config"
    return what + quotation, f"{ssh} echo ok, which must print ok; see {_START_FILES}"


def interpreter_error(host: Host, output: Output, ssh: str) -> tuple[str, str] | None:
    """Return why the host's Python can't run the agent (too old, absent, not executable); None: another reason."""
    if error := too_old(output):
        return error
    value = repr(host.python) if host.python else "null (this controller's interpreter, else python3)"
    # as payload._FIND_PYTHON prints it, with a remark about each path that exists:
    # paceline: no interpreter /opt/py/bin/python; /opt/py/bin/python is not executable; PATH=/usr/bin:/bin
    if absent := re.search(r"^paceline: no interpreter [^;\n]*(.*); PATH=(.*)$", output.stderr, re.MULTILINE):
        return (
            f"no such interpreter there: cluster.python={value}{absent[1]}; its login has PATH={absent[2]}",
            f"{_OTHER_PYTHON}, or install Python there ({ssh} ls /usr/bin/python3), or fix PATH in {_START_FILES}",
        )
    # An error of /bin/sh itself; one in a login's start file begins with that file's name. A restricted shell refuses
    # every exec ("exec: restricted"), so another interpreter wouldn't help.
    refused = re.search(r"^sh: .*\bexec: (.*)$", output.stderr, re.MULTILINE)
    if output.code in (126, 127) and refused and "restricted" not in refused[1]:
        return f"its interpreter can't be run: cluster.python={value}: {refused[1]}", _OTHER_PYTHON
    return None


def too_old(output: Output) -> tuple[str, str] | None:
    """Return the error if payload.BOOTSTRAP, the program that loads the agent, reports a too old Python; else None."""
    version = _TOO_OLD.search(output.stderr)
    if version is None:
        return None
    return f"{version[1]} is Python {version[2]}; the node agent needs 3.9, training 3.11", _OTHER_PYTHON


def quoted(output: Output, secrets: Collection[str] = ()) -> str:
    """Return the last lines that the host printed, without secrets and control characters; '' if it printed nothing."""
    text = hide("\n".join([output.stdout.decode(errors="replace"), output.stderr]), list(secrets))
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip() and '{"received": ' not in line]
    last = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines[-_MOST_LINES:]]
    return "".join(["; it said:", *(f"\n      {line}" for line in last)]) if last else ""
