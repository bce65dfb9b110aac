"""What ssh's messages mean to a person, and what fixes them. Pure."""

from __future__ import annotations

import re
import shlex

from pipeline.cluster.launchers import login_errors
from pipeline.cluster.launchers.replies import Answer, Output
from pipeline.core.specs import Host

SSH_FAILED = 255  # exit code of ssh itself; a remote command may have it too, so its words have to be ssh's
_UNREACHABLE = re.compile(
    r"(Could not resolve hostname[^\n]*|Connection refused|No route to host|Network is unreachable"
    r"|Connection (?:closed|reset) by(?! peer \()[^\n]*)",  # with an errno behind it, it is Open MPI's, of its own link
    re.IGNORECASE,
)
_SLOW = re.compile(r"(Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out|not responding)")
_REFUSED = re.compile(r"^(?:\S+@\S+: )?(Permission denied \([\w,@.-]+\))\.?\s*$", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):\d+\s*$", re.MULTILINE)


def explain(
    host: Host, answer: Answer, ssh_config: str | None, *, connect_s: float, is_setting: bool = True
) -> tuple[str, str | None]:
    """(what is wrong with the value seen, the command that fixes it).

    Args:
        connect_s: how long ssh tried to connect.
        is_setting: whether that was cluster.connect_timeout_s (else: the shorter time of a host that has answered).
    """
    ssh = ssh_words(host, ssh_config)
    if answer.told is not None:
        return _told(answer.told, ssh)
    slow = f"cluster.connect_timeout_s={3 * connect_s:g} if it is only slow, or {ssh} true" if is_setting else None
    if answer.output.code is None and answer.output.note.startswith("it hadn't answered"):
        setting = f" (cluster.connect_timeout_s={connect_s:g} and some for the answer)" if is_setting else ""
        said = login_errors.quoted(answer.output, host.secrets.values())
        return f"{answer.output.note}{setting}{said}", slow or f"{ssh} true"
    if answer.output.code == SSH_FAILED:
        found = of_ssh(host, answer.output, ssh_config)
        if found:
            return found
        late = _SLOW.findall(answer.output.stderr)
        if late:
            setting = " (cluster.connect_timeout_s)" if is_setting else ""
            return f"unreachable: it hadn't answered after {connect_s:g} s{setting}: {late[-1]}", slow or f"{ssh} true"
    return login_errors.explain(host, answer.output, ssh)


def _told(error: str, ssh: str) -> tuple[str, str]:
    """The agent's own word, so ssh itself works."""
    if "has a full disk" in error:
        return error, f"{ssh} df -h, or cluster.workdir=/path/to/a/folder/there"
    if "set cluster.workdir" in error:
        return error, "cluster.workdir=/path/to/a/folder/there"
    return login_errors.told(error, ssh)


def of_ssh(host: Host, output: Output, ssh_config: str | None) -> tuple[str, str] | None:
    """What ssh has said of a connection that it could not make; None where these aren't its words."""
    ssh, said = ssh_words(host, ssh_config), output.stderr
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
        return _host_key(host, said, ssh)
    refused = _REFUSED.findall(said)
    if refused:
        return (
            f"{refused[-1]}: no key of your agent or ~/.ssh (IdentityFile) is accepted there",
            f"{ssh_copy_id(host, ssh_config)}, or ssh-add the right key",
        )
    if "Too many authentication failures" in said:
        return (
            "Too many authentication failures: your ssh agent offers more keys than it takes",
            f"IdentityFile and IdentitiesOnly yes for {host.name} in ~/.ssh/config",
        )
    unreachable = _UNREACHABLE.findall(said)
    if not unreachable:
        return None
    more = login_errors.quoted(output) if unreachable[-1].startswith("Connection closed") else ""  # by a ProxyCommand?
    return f"unreachable: {unreachable[-1].strip()}{more}", f"{ssh} true"


def _host_key(host: Host, failure: str, ssh: str) -> tuple[str, str]:
    """A key that changed, or one that nobody has accepted yet."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in failure:
        where = _OFFENDING.search(failure)
        file = f" -f {shlex.quote(where.group(1))}" if where else ""
        return (
            "its host key is another one than known_hosts has: it was reinstalled, or somebody stands between",
            f"ssh-keygen{file} -R {shlex.quote(keyscan_name(host))} once you know why, then {ssh} true",
        )
    return (
        "its host key is not in known_hosts (and is never accepted without you)",
        f"{ssh} true, compare the fingerprint, answer yes",
    )


def ssh_words(host: Host, ssh_config: str | None) -> str:
    """The ssh command that a person would type."""
    words = ["ssh"]
    words += ["-F", ssh_config] if ssh_config else []
    words += ["-p", str(host.port)] if host.port else []
    words += [f"{host.user}@{host.name}" if host.user else host.name]
    return shlex.join(words)


def ssh_copy_id(host: Host, ssh_config: str | None) -> str:
    """The command that puts one's key on the host."""
    return ssh_words(host, ssh_config).replace("ssh", "ssh-copy-id", 1)


def keyscan_name(host: Host) -> str:
    """How known_hosts names the host."""
    return f"[{host.name}]:{host.port}" if host.port and host.port != 22 else host.name
