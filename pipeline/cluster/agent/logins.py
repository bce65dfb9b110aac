"""Whether ssh of this node gets to each of the others, nothing typed: as `ssh NAME`, which is how mpirun calls it."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

from .wire import Json, say

AT_ONCE = 8  # connections of one node: sshd refuses by chance from the 10th that hasn't logged in yet (MaxStartups)
CONNECT_S = 8
LOGIN_S = 3 * CONNECT_S
TRY_S = 2 * LOGIN_S  # of one target
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
}


def mesh_try(request: Json) -> None:
    """Log in to each of ``targets`` as ranks' programs would: nothing typed, host keys checked.

    Says label → why not (``failures``), and label → why only with a port and a user (``exact``).
    """
    if shutil.which("ssh") is None:
        raise SystemExit("it has no ssh; install OpenSSH's client there (apt install openssh-client)")
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        tried = list(pool.map(lambda target: (target["label"], *attempt(target)), request["targets"]))
    say(
        failures={label: why for label, why, _ in tried if why},
        exact={label: plain for label, _, plain in tried if plain},
    )


def attempt(target: Json) -> tuple[str, str]:
    """Why ssh doesn't get there, and why `ssh NAME` alone doesn't; '' when it does.

    Both have to do where port and user are those that ssh takes by itself. Elsewhere the plain name needs an entry of
    this node's own ssh configuration.
    """
    exact = login("-p", str(target["port"]), "-l", target["user"], "--", target["address"])
    if exact:
        return exact, ""
    name = typed(target)
    plain = login("--", name)
    words = f"`ssh {name}`: {plain}" if plain else ""
    usual = target["port"] == 22 and target["user"] == getpass.getuser()
    return (words, "") if usual else ("", words)


def typed(target: Json) -> str:
    """The name by which this node calls the other one: that of cluster.hosts where it means anything here."""
    for line in said_of(target["name"]):
        if line.startswith("hostname "):
            try:
                socket.getaddrinfo(line.partition(" ")[2], None)
            except (OSError, UnicodeError):
                break
            return str(target["name"])
    return str(target["address"])


def said_of(name: str) -> list[str]:
    """What this node's ssh configuration makes of a name."""
    words = ["ssh", "-G", "--", name]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines()


def login(*words: str) -> str:
    """Why ``ssh`` doesn't get there; '' when it does."""
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    try:
        done = subprocess.run(
            ["ssh", "-T", *options, *words, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LOGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no login within {LOGIN_S} s"
    if done.returncode != 255:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else "ssh ended with code 255"
