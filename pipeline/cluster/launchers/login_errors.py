"""What a host has said instead of an answer: its last lines, and what they mean where that is known. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from typing import NamedTuple

from pipeline.cluster.agent.reasons import HERE, THERE
from pipeline.cluster.launchers.payload import NO_PROGRAM, TAKEN_FOR_COMMANDS, TOO_OLD
from pipeline.cluster.launchers.replies import ENDLESS, Output
from pipeline.core.printable import printable
from pipeline.core.redact import hide
from pipeline.core.specs import Host

_MOST_LINES = 5
_LONGEST_LINE = 200  # characters
_TOO_OLD = re.compile(rf"^(.+): Python (\S+) {TOO_OLD}\s*$", re.MULTILINE)
_OTHER_PYTHON = "cluster.python=/path/to/python"
_START_FILES = "the start files of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)"


class _Known(NamedTuple):
    """A text that a login prints, what it means, and what mends it ({ssh}: the ssh command of that host)."""

    pattern: str
    meaning: str
    hint: str


_KNOWN = (
    _Known(
        f"(?m)^{TAKEN_FOR_COMMANDS}",  # not where a login prints what was sent
        "a start file of its login puts another shell in the place of the login shell, also where nobody types",
        "write it as `[[ $- == *i* ]] && exec zsh` in " + _START_FILES,
    ),
    _Known(
        f"(?m)^{NO_PROGRAM}",
        "a start file of its login reads standard input, which is how the node agent gets there",
        "let it read only where somebody types (`[[ $- == *i* ]]`): see " + _START_FILES,
    ),
    _Known(
        r"(?i)account is (?:currently )?not available",
        "this account may not log in (its shell is nologin)",
        "another account (cluster.hosts: user), or a login shell for this one (chsh -s /bin/bash, as root there)",
    ),
    _Known(
        r"(?i)password (?:has )?expired|change your password|password change required",
        "its password has to be changed before anything else runs there",
        "{ssh}, change it, log out",
    ),
    _Known(r"(?i)account (?:has )?expired", "this account has expired", "ask who administers it"),
    _Known(
        r"(?i)sftp connections only",
        "its ssh server lets this account transfer files only (ForceCommand internal-sftp)",
        "another account (cluster.hosts: user), or let it run commands in its sshd_config",
    ),
    _Known(
        r"(?i)rbash: |: restricted\b",
        "its login shell is a restricted one (rbash), which runs no program by its path",
        "another account (cluster.hosts: user), or another login shell (chsh -s /bin/bash, as root there)",
    ),
    _Known(
        r"(?i)system is (?:booting up|going down)|unprivileged users are not permitted",
        "it lets nobody log in just now (/etc/nologin)",
        "wait for it, then the same command",
    ),
)


def explain(host: Host, output: Output, ssh: str) -> tuple[str, str]:
    """(what is wrong and what the host has said, what mends it).

    Args:
        ssh: the ssh command that a person would type to reach the host.
    """
    if output.note.startswith(ENDLESS):
        return output.note + quoted(output, host.secrets.values()), f"{ssh} true; see {_START_FILES}"
    said = "\n".join([output.stdout.decode(errors="replace"), output.stderr])
    found = of_interpreter(host, output, ssh)
    if found:
        return found
    for known in _KNOWN:
        if re.search(known.pattern, said):
            return known.meaning + quoted(output, host.secrets.values()), known.hint.format(ssh=ssh)
    if output.code is None:
        return output.note + quoted(output, host.secrets.values()), f"{ssh} true"
    ended = f"exit code {output.code}" if output.code >= 0 else f"signal {-output.code}"
    what = f"its login ended with {ended} and no answer of the node agent"
    if output.code == 0:
        what += ": an `exit` in a start file, or a ForceCommand in its sshd_config"
    return what + quoted(output, host.secrets.values()), f"{ssh} echo ok, which must print ok; see {_START_FILES}"


def told(error: str, ssh: str) -> tuple[str, str]:
    """The agent's own word, so ssh itself works: with the command that the agent names, where it names one."""
    for mark, command in ((THERE, "{ssh} -t {quoted}"), (HERE, "{text}")):
        what, found, text = error.rpartition(mark)
        if found:
            return what, command.format(ssh=ssh, quoted=shlex.quote(text), text=text)
    return error[-600:], f"{ssh} true"


def of_interpreter(host: Host, output: Output, ssh: str) -> tuple[str, str] | None:
    """What is wrong with the host's Python; None where nothing was said of it."""
    return too_old(output) or _interpreter(host, output, ssh)


def too_old(output: Output) -> tuple[str, str] | None:
    """That the interpreter is too old for the node agent, as BOOTSTRAP says; None: it is not."""
    found = _TOO_OLD.search(output.stderr)
    if found is None:
        return None
    return f"{found[1]} is Python {found[2]}; the node agent needs 3.9, training 3.11", _OTHER_PYTHON


def _interpreter(host: Host, output: Output, ssh: str) -> tuple[str, str] | None:
    """Not there at all, or not found because the login's PATH is another one than a person expects."""
    value = repr(host.python) if host.python else "null (this controller's interpreter, else python3)"
    absent = re.search(r"^paceline: no interpreter [^;\n]*(.*); PATH=(.*)$", output.stderr, re.MULTILINE)
    if absent:
        return (
            f"no such interpreter there: cluster.python={value}{absent[1]}; its login has PATH={absent[2]}",
            f"{_OTHER_PYTHON}, or install Python there ({ssh} ls /usr/bin/python3), or fix PATH in the "
            "start file of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)",
        )
    refused = re.search(r"^.*\bexec: (.*)$", output.stderr, re.MULTILINE)
    if output.code in (126, 127) and refused and "restricted" not in refused[1]:
        return f"its interpreter can't be run: cluster.python={value}: {refused[1]}", _OTHER_PYTHON
    return None


def quoted(output: Output, secrets: Collection[str] = ()) -> str:
    """The last lines of what the host has said, each on a line of its own; '' where it said nothing.

    Secrets are hidden, control characters are escaped: what a terminal would obey is shown.
    """
    text = hide("\n".join([output.stdout.decode(errors="replace"), output.stderr]), list(secrets))
    lines = [line.strip() for line in text.splitlines() if '{"received": ' not in line]
    last = [_shortened(line) for line in lines if line][-_MOST_LINES:]
    return "".join(["; it said:", *(f"\n      {line}" for line in last)]) if last else ""


def _shortened(line: str) -> str:
    shown = printable(line)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}…"
