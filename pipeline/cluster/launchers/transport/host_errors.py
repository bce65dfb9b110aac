"""Why a host gave no answer, by the output of ssh, of its login and of the agent, and the fix. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from pipeline.cluster.agent.wire import HERE, THERE
from pipeline.cluster.launchers.transport.answers import ENDLESS, LATE, Answer, Output
from pipeline.cluster.launchers.transport.payload import NO_PROGRAM, TAKEN_FOR_COMMANDS, TOO_OLD
from pipeline.core.printable import printable
from pipeline.core.redact import hide
from pipeline.core.specs import Host

_SSH_FAILED = 255  # ssh's own exit code; remote commands may have it too, so the output must be ssh's as well
_UNREACHABLE = re.compile(
    r"(Could not resolve hostname[^\n]*|Connection refused|No route to host|Network is unreachable"
    r"|Connection (?:closed|reset) by(?! peer \()[^\n]*)",  # with an errno: a link of Open MPI's
    re.IGNORECASE,
)
_SLOW = re.compile(r"(Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out|not responding)")
_REFUSED = re.compile(r"^(?:\S+@\S+: )?(Permission denied \([\w,@.-]+\))\.?\s*$", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):\d+\s*$", re.MULTILINE)
_TOO_OLD = re.compile(rf"^(.+): Python (\S+) {TOO_OLD}\s*$", re.MULTILINE)

_MOST_LINES = 5
_LONGEST_LINE = 200  # characters
_OTHER_PYTHON = "cluster.python=/path/to/python"
_START_FILES = "the start files of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)"


def explain_over_ssh(
    host: Host, answer: Answer, ssh_config: str | None, *, connect_s: float, is_setting: bool = True
) -> tuple[str, str | None]:
    """Return why a host gave no answer over ssh, with the value seen, and the command that fixes it.

    Args:
        connect_s: how long ssh tried to connect.
        is_setting: True if that was cluster.connect_timeout_s, False if it was the shorter limit of a host that has
            answered.
    """
    ssh, output = ssh_command(host, ssh_config), answer.output
    if answer.reported_error is not None:
        return agent_error(answer.reported_error, ssh)
    slow = f"cluster.connect_timeout_s={3 * connect_s:g} if it is only slow, or {ssh} true" if is_setting else None
    if output.code is None and output.note.startswith(LATE):
        setting = f" (cluster.connect_timeout_s={connect_s:g} and some for the answer)" if is_setting else ""
        return f"{output.note}{setting}{quoted(output, host.secrets.values())}", slow or f"{ssh} true"
    if output.code == _SSH_FAILED:
        if error := ssh_error(host, output, ssh_config):
            return error
        if late := _SLOW.findall(output.stderr):
            setting = " (cluster.connect_timeout_s)" if is_setting else ""
            return f"unreachable: {LATE} {connect_s:g} s{setting}: {late[-1]}", slow or f"{ssh} true"
    return interpreter_error(host, output, ssh) or _login_error(host, output, ssh)


def agent_error(error: str, ssh: str) -> tuple[str, str]:
    """Return the agent's own error, and the command that fixes it (the one that the error names, if it names one).

    ``ssh``: the ssh command that the user would type to reach the host.
    """
    if "has a full disk" in error:
        return error, f"{ssh} df -h, or cluster.workdir=/path/to/a/folder/there"
    if "set cluster.workdir" in error:
        return error, "cluster.workdir=/path/to/a/folder/there"
    for mark, command in ((THERE, "{ssh} -t {quoted}"), (HERE, "{text}")):
        what, separator, text = error.rpartition(mark)
        if separator:
            return what, command.format(ssh=ssh, quoted=shlex.quote(text), text=text)
    return error[-600:], f"{ssh} true"


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
        where = _OFFENDING.search(stderr)
        file = f" -f {shlex.quote(where[1])}" if where else ""
        name = f"[{host.name}]:{host.port}" if host.port and host.port != 22 else host.name  # as known_hosts has it
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
    more = quoted(output) if unreachable[-1].startswith("Connection closed") else ""  # perhaps a ProxyCommand's
    return f"unreachable: {unreachable[-1].strip()}{more}", f"{ssh} true"


# ---------------------------------------------------------------------------------------------- the output of a login
_KNOWN = (
    (
        f"(?m)^{TAKEN_FOR_COMMANDS}",  # at the start of a line, as a login may print what was sent
        "a start file of its login puts another shell in the place of the login shell, also where nobody types",
        f"write it as `[[ $- == *i* ]] && exec zsh` in {_START_FILES}",
    ),
    (
        f"(?m)^{NO_PROGRAM}",
        "a start file of its login reads standard input, which is how the node agent gets there",
        f"let it read only where somebody types (`[[ $- == *i* ]]`): see {_START_FILES}",
    ),
)
"""A text that says why a login started no agent, its meaning, and the fix; others explain themselves."""


def _login_error(host: Host, output: Output, ssh: str) -> tuple[str, str]:
    """Return why the login started no agent: by a known text in its output, else by how it ended."""
    quotation = quoted(output, host.secrets.values())
    if output.note.startswith(ENDLESS):
        return output.note + quotation, f"{ssh} true; see {_START_FILES}"
    text = "\n".join([output.stdout.decode(errors="replace"), output.stderr])
    for pattern, meaning, hint in _KNOWN:
        if re.search(pattern, text):
            return meaning + quotation, hint
    if output.code is None:
        return output.note + quotation, f"{ssh} true"
    ended = f"exit code {output.code}" if output.code >= 0 else f"signal {-output.code}"
    what = f"its login ended with {ended} and no answer of the node agent"
    if output.code == 0:
        what += ": an `exit` in a start file, or a ForceCommand in its sshd_config"
    return what + quotation, f"{ssh} echo ok, which must print ok; see {_START_FILES}"


def interpreter_error(host: Host, output: Output, ssh: str) -> tuple[str, str] | None:
    """Return why the host's Python can't run the agent; None: the output doesn't say.

    It may be too old, absent (often the PATH of the login differs from what the user expects) or not executable.
    """
    if error := too_old(output):
        return error
    value = repr(host.python) if host.python else "null (this controller's interpreter, else python3)"
    if absent := re.search(r"^paceline: no interpreter [^;\n]*(.*); PATH=(.*)$", output.stderr, re.MULTILINE):
        return (
            f"no such interpreter there: cluster.python={value}{absent[1]}; its login has PATH={absent[2]}",
            f"{_OTHER_PYTHON}, or install Python there ({ssh} ls /usr/bin/python3), or fix PATH in the "
            "start file of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)",
        )
    refused = re.search(r"^.*\bexec: (.*)$", output.stderr, re.MULTILINE)
    if output.code in (126, 127) and refused and "restricted" not in refused[1]:
        return f"its interpreter can't be run: cluster.python={value}: {refused[1]}", _OTHER_PYTHON
    return None


def too_old(output: Output) -> tuple[str, str] | None:
    """Return that the interpreter is too old for the node agent, as BOOTSTRAP reports; None: it is not."""
    version = _TOO_OLD.search(output.stderr)
    if version is None:
        return None
    return f"{version[1]} is Python {version[2]}; the node agent needs 3.9, training 3.11", _OTHER_PYTHON


def quoted(output: Output, secrets: Collection[str] = ()) -> str:
    """Return the last lines that the host printed, each on its own line; '' where it printed nothing.

    Secrets are hidden, and control characters are escaped.
    """
    text = hide("\n".join([output.stdout.decode(errors="replace"), output.stderr]), list(secrets))
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip() and '{"received": ' not in line]
    last = [line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…" for line in lines[-_MOST_LINES:]]
    return "".join(["; it said:", *(f"\n      {line}" for line in last)]) if last else ""
