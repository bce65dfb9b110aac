"""ssh without passwords among the nodes of a cluster: this node's keys, the keys that it accepts, and undo.

Also whether this node reaches each of the others by `ssh NAME` alone, as mpirun does. Every added line, and a key pair
that was made, has a comment that ends with ``MARK``, so that ``mesh_undo`` removes exactly that.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import glob
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ..node import server_address
from ..reasons import THERE
from ..wire import Json, say

KEY, AUTHORIZED, KNOWN, _LOCK = "id_ed25519", "authorized_keys", "known_hosts", "paceline-mesh.lock"
MARK = "(doit mesh)"
_PUBLIC = re.compile(r"(?:ssh-|ecdsa-|sk-)\S+ [A-Za-z0-9+/=]+")


def ssh_path(name: str) -> str:
    return os.path.join(os.path.expanduser("~/.ssh"), name)


@contextlib.contextmanager
def home_lock() -> Iterator[None]:
    """Hold the lock of a home that several nodes share."""
    with open(ssh_path(_LOCK), "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------- keys
def mesh_offer(request: Json) -> None:
    """Answer with this node's public key (created if missing, unless only ``check``) and its ssh server's host keys."""
    address, port = server_address(request)
    made = False
    if not request["check"]:
        if shutil.which("ssh-keygen") is None or shutil.which("ssh") is None:
            raise SystemExit(
                "it has no ssh and ssh-keygen; install OpenSSH's client there (apt install openssh-client)"
            )
        make_folder()
        with home_lock():
            made = make_key()
    say(
        user=getpass.getuser(),
        address=address,
        port=port,
        public_key=public_key(),
        made=made,
        host_keys=host_keys(address, port),
        warnings=sshd_warnings(),
    )


def make_folder() -> None:
    """Create ~/.ssh for its owner alone. Raises SystemExit: it, or a file to be extended, is something else."""
    place = os.path.expanduser("~/.ssh")
    if os.path.lexists(place) and not os.path.isdir(place):
        kind = f"a link to {os.readlink(place)}, where no folder is" if os.path.islink(place) else "no folder"
        raise SystemExit(f"~/.ssh there is {kind}; move it away{THERE}mv ~/.ssh ~/.ssh.old")
    os.makedirs(place, mode=0o700, exist_ok=True)
    os.chmod(place, 0o700)
    for name in (AUTHORIZED, KNOWN):  # before a host has added anything
        if os.path.isdir(ssh_path(name)):
            raise SystemExit(f"~/.ssh/{name} there is a folder; move it away{THERE}mv ~/.ssh/{name} ~/.ssh/{name}.old")


def make_key() -> bool:
    """Create a key pair without a passphrase if there is none. Return whether one was created."""
    if os.path.exists(ssh_path(KEY)):
        return False
    comment = f"{getpass.getuser()}@{os.uname().nodename} {MARK}"
    done = run_program(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", ssh_path(KEY)])
    if done.returncode:
        raise SystemExit(f"ssh-keygen there: {(done.stderr or done.stdout).strip()[-300:]}")
    return True


def public_key() -> str:
    """Return type and key as text, without the comment; '' if there is none. Raises SystemExit: ssh can't use it."""
    if not os.path.exists(ssh_path(KEY)):
        return ""
    status = os.stat(ssh_path(KEY))
    if status.st_mode & 0o077 and status.st_uid == os.getuid():
        mode = f"{status.st_mode & 0o777:o}"
        raise SystemExit(
            f"~/.ssh/{KEY} there is open to others (mode {mode}), so ssh doesn't use it{THERE}chmod 600 ~/.ssh/{KEY}"
        )
    done = run_program(["ssh-keygen", "-y", "-P", "", "-f", ssh_path(KEY)])
    match = _PUBLIC.match(done.stdout)
    if match is not None:
        return match.group(0)
    why = ((done.stderr or done.stdout).strip().splitlines()[-1:] or ["no public key"])[0]
    if "passphrase" not in why:
        raise SystemExit(
            f"~/.ssh/{KEY} there is no private key that ssh can read ({why}); move it away, then doit mesh makes one"
            f"{THERE}mv ~/.ssh/{KEY} ~/.ssh/{KEY}.old"
        )
    raise SystemExit(
        f"~/.ssh/{KEY} there can't be used without somebody who types ({why}); move it away, or take its passphrase "
        f"off{THERE}ssh-keygen -p -f ~/.ssh/{KEY}"
    )


def run_program(words: list[str], limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program without standard input. Raises OSError, subprocess.TimeoutExpired."""
    stdin = subprocess.DEVNULL
    return subprocess.run(
        words, stdin=stdin, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
    )


def host_keys(address: str, port: int) -> list[str]:
    """Return the keys of this node's ssh server, from the server itself, or else from its public files."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["ssh-keyscan", "-T", "5", "-p", str(port), "-t", "ed25519,ecdsa,rsa", "--", address]
        done = run_program(words, 15)
        scanned = [line.partition(" ")[2] for line in done.stdout.splitlines() if not line.startswith("#")]
        keys = sorted({match.group(0) for line in scanned if (match := _PUBLIC.match(line))})
        if keys:
            return keys
    texts = []
    for name in glob.glob("/etc/ssh/ssh_host_*_key.pub"):
        with contextlib.suppress(OSError), open(name, encoding="utf-8") as file:
            texts.append(file.read())
    return sorted({match.group(0) for text in texts if (match := _PUBLIC.match(text))})


def sshd_warnings() -> list[str]:
    """Return why sshd's StrictModes would ignore ~/.ssh here, as far as the files show."""
    home = os.path.expanduser("~")
    mode = os.stat(home).st_mode & 0o777
    if mode & 0o022:
        return [f"its home {home} can be written by others (mode {mode:o}), so sshd may ignore ~/.ssh: chmod go-w ~"]
    return []


# -------------------------------------------------------------------------------------------- accept
def mesh_accept(request: Json) -> None:
    """Add missing public keys and host keys, each once.

    ``keys``: public keys with a comment. ``known``: possible names of a host (``names``) and its server's keys.
    """
    with home_lock():
        keys = append_lines(AUTHORIZED, missing_keys(request["keys"]))
        wanted, conflicts = missing_hosts(request["known"])
        hosts = append_lines(KNOWN, wanted)
    say(keys=keys, hosts=hosts, conflicts=conflicts)


def missing_keys(keys: list[str]) -> list[str]:
    """Return the keys that authorized_keys lacks, whether with options or without."""
    # every word of a line: options before the key may hold spaces in quotes
    present = {word for line in read_lines(AUTHORIZED) if not line.lstrip().startswith("#") for word in line.split()}
    return [line for line in dict.fromkeys(keys) if line.split()[1] not in present]


def missing_hosts(known: list[Json]) -> tuple[list[str], list[str]]:
    """Return the lines that known_hosts lacks, and contradictions: another key under the name of one of these hosts."""
    lines, conflicts = [], []
    for host in known:
        for name in host["names"]:
            present = known_keys(name)
            new = [key for key in host["keys"] if key not in present]
            other = {key.split()[0] for key in present} & {key.split()[0] for key in new}
            if other:
                conflicts.append(name)
            else:
                lines += [f"{name} {key} {MARK}" for key in new]
    return lines, conflicts


def known_keys(name: str) -> set[str]:
    """Return the keys in known_hosts for a name, hashed or not."""
    if not os.path.exists(ssh_path(KNOWN)):
        return set()
    done = run_program(["ssh-keygen", "-F", name, "-f", ssh_path(KNOWN)])
    lines = (line for line in done.stdout.splitlines() if not line.startswith("#"))
    return {match.group(0) for line in lines if (match := _PUBLIC.search(line))}


def append_lines(name: str, lines: list[str]) -> int:
    """Add lines to a file of ~/.ssh; return how many."""
    if lines:
        write_lines(name, [*read_lines(name), *lines])
    elif os.path.exists(ssh_path(name)):
        os.chmod(ssh_path(name), 0o600)
    return len(lines)


def read_lines(name: str) -> list[str]:
    try:
        with open(ssh_path(name), encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return file.read().removesuffix("\n").split("\n") if os.path.getsize(ssh_path(name)) else []
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_lines(name: str, lines: Iterable[str]) -> None:
    """Write a file of ~/.ssh completely, for its owner alone, also through a link."""
    place = os.path.realpath(ssh_path(name))
    temporary = f"{place}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, place)


# ---------------------------------------------------------------------------------------------- undo
def mesh_undo(_: Json) -> None:
    """Remove the lines that were added here, and the key pair if it was created here and is unchanged."""
    counts, ours = [0, 0], False
    if made_here() or any(is_ours(line) for name in (AUTHORIZED, KNOWN) for line in read_lines(name)):
        with home_lock():
            ours = made_here() and public_key() in read_lines(f"{KEY}.pub")[0]  # may raise: nothing is changed yet
            counts = [remove_lines(name) for name in (AUTHORIZED, KNOWN)]
            for name in [*([KEY, f"{KEY}.pub"] if ours else []), _LOCK]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(ssh_path(name))
    say(keys=counts[0], hosts=counts[1], key_removed=ours)


def made_here() -> bool:
    return any(map(is_ours, read_lines(f"{KEY}.pub"))) and os.path.exists(ssh_path(KEY))


def is_ours(line: str) -> bool:
    """Whether a line was added here; a user may have put options before its key."""
    return line.rstrip().endswith(MARK) and not line.lstrip().startswith("#")


def remove_lines(name: str) -> int:
    """Remove our lines from a file; one that becomes empty is removed too."""
    lines = read_lines(name)
    kept = [line for line in lines if not is_ours(line)]
    if len(kept) < len(lines):
        if kept:
            write_lines(name, kept)
        else:
            os.unlink(ssh_path(name))
    return len(lines) - len(kept)


# ---------------------------------------------------------------------------- logins to other nodes
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
    """Log in to each of ``targets`` as ranks' programs would: without typing, with host keys checked.

    Answers label → error (``failures``), and label → why it works only with port and user (``exact``).
    """
    if shutil.which("ssh") is None:
        raise SystemExit("it has no ssh; install OpenSSH's client there (apt install openssh-client)")
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        tried = list(pool.map(lambda target: (target["label"], *login_errors(target)), request["targets"]))
    say(
        failures={label: why for label, why, _ in tried if why},
        exact={label: plain for label, _, plain in tried if plain},
    )


def login_errors(target: Json) -> tuple[str, str]:
    """Return why ssh fails, and why `ssh NAME` alone fails; '' if it works.

    Both must work if port and user are ssh's defaults. Otherwise the plain name needs an entry in this node's own ssh
    configuration.
    """
    exact = login_error("-p", str(target["port"]), "-l", target["user"], "--", target["address"])
    if exact:
        return exact, ""
    name = name_for_login(target)
    plain = login_error("--", name)
    words = f"`ssh {name}`: {plain}" if plain else ""
    usual = target["port"] == 22 and target["user"] == getpass.getuser()
    return (words, "") if usual else ("", words)


def name_for_login(target: Json) -> str:
    """Return the name by which this node calls the other one: its name in cluster.hosts, if it resolves here."""
    with contextlib.suppress(OSError, UnicodeError, subprocess.TimeoutExpired):
        settings = run_program(["ssh", "-G", "--", target["name"]], LOGIN_S).stdout  # of this node's ssh configuration
        host_names = re.findall(r"^hostname (.*)$", settings, re.MULTILINE)
        if host_names:
            socket.getaddrinfo(host_names[0], None)
            return str(target["name"])
    return str(target["address"])


def login_error(*words: str) -> str:
    """Return why ``ssh`` fails; '' if it works."""
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    try:
        done = run_program(["ssh", "-T", *options, *words, "true"], LOGIN_S)
    except subprocess.TimeoutExpired:
        return f"no login within {LOGIN_S} s"
    if done.returncode != 255:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else "ssh ended with code 255"
