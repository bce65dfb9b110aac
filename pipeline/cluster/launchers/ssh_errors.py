"""What ssh's and the remote shell's messages mean to a person, and what fixes them. Pure."""

from __future__ import annotations

import re
import shlex

from pipeline.core.specs import Host

_UNREACHABLE = re.compile(
    r"(Could not resolve hostname[^\n]*|Connection refused|Connection timed out|Operation timed out|No route to host"
    r"|Network is unreachable|Connection (?:closed|reset) by[^\n]*|Connection to [^\n]* timed out|Timed out)",
    re.IGNORECASE,
)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):\d+\s*$", re.MULTILINE)


def explain(host: Host, failure: str, ssh_config: str | None) -> tuple[str, str | None]:
    """(what is wrong with the value seen, the command that fixes it)."""
    ssh = ssh_words(host, ssh_config)
    last = failure.strip().splitlines()[-1] if failure.strip() else "no message"
    if "has a full disk" in failure:
        return failure.strip(), f"{ssh} df -h"
    if "set cluster.workdir" in failure:  # the agent's own word, so ssh itself works
        return failure.strip(), "cluster.workdir=/path/to/a/folder/there"
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in failure or "Host key verification failed" in failure:
        return _host_key(host, failure, ssh)
    if "Permission denied" in failure:
        seen = re.search(r"Permission denied[^\n]*", failure)
        return (
            f"{seen.group(0) if seen else last}: no key of your agent or ~/.ssh (IdentityFile) is accepted there",
            f"{ssh_copy_id(host, ssh_config)}, or ssh-add the right key",
        )
    if "no interpreter" in failure or "exit code 127" in failure.lower():
        return _no_interpreter(host, failure, ssh)
    if "SyntaxError" in failure or "is too old" in failure:
        return f"its Python is too old for the node agent (3.9): {last}", "cluster.python=/path/to/newer/python"
    unreachable = _UNREACHABLE.search(failure)
    if unreachable:
        return f"unreachable: {unreachable.group(1).strip()}", f"{ssh} true"
    return failure.strip()[-600:] or "no answer", f"{ssh} true"


def _no_interpreter(host: Host, failure: str, ssh: str) -> tuple[str, str]:
    """Not there at all, or not found because the login's PATH is another one than a person expects."""
    value = repr(host.python) if host.python else "null (this controller's interpreter, else python3)"
    path = re.search(r"; PATH=(.*)", failure)
    seen = f"; its login has PATH={path.group(1)}" if path else ""
    return (
        f"no such interpreter there: cluster.python={value}{seen}",
        f"cluster.python=/path/to/python, or install Python there ({ssh} ls /usr/bin/python3), or mend PATH in the "
        "start file of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)",
    )


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
