"""One lab host: its keys, its files, the start of its first process, and the wait for its ssh server."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.errors import HostError
from pipeline.core.files import write_atomic
from pipeline.lab.boot import boot_script, kept_folders, ssh_client_entry, sshd_config
from pipeline.lab.network import end_processes
from pipeline.lab.requirements import command
from pipeline.lab.state import Lab, LabHost, folder

_READY_S = 10.0
_POLL_S = 0.005
_LOG_TAIL = 5  # lines


def write_files(lab: Lab) -> None:
    """Keys, ssh_config, known_hosts, and each host's folder with what it will see as its own /etc files."""
    place = folder(lab.root)
    user = pwd.getpwuid(os.geteuid())
    identity = place / "id_ed25519"
    _new_key(identity, "paceline-lab")
    # torch's store listens on IPv6 and looks its clients' names up by their mapped addresses
    names = "".join(f"{host.address} {host.name}\n::ffff:{host.address} {host.name}.mapped\n" for host in lab.hosts)
    known = [
        _write_host(lab, host, names, user, identity, cores)
        for host, cores in zip(lab.hosts, share_of_cores(sorted(os.sched_getaffinity(0)), len(lab.hosts)), strict=True)
    ]
    write_atomic(place / "known_hosts", "".join(known))
    entries = [ssh_client_entry(host, user.pw_name, identity, place / "known_hosts") for host in lab.hosts]
    write_atomic(lab.ssh_config, "\n".join(entries))


def share_of_cores(cores: Sequence[int], hosts: int) -> list[list[int]]:
    """Neighbouring cores for each host; where there are more hosts than cores, some share one."""
    size = max(1, len(cores) // hosts)
    return [[cores[(first * size + offset) % len(cores)] for offset in range(size)] for first in range(hosts)]


def _write_host(
    lab: Lab, host: LabHost, names: str, user: pwd.struct_passwd, identity: Path, cores: Sequence[int]
) -> str:
    """Write one host's folder; its line for known_hosts."""
    ssh, etc = host.folder / "ssh", host.folder / "etc"
    for made, mode in ((ssh, 0o755), (etc, 0o755), (host.home, 0o700)):
        made.mkdir(parents=True, exist_ok=True)
        made.chmod(mode)
    for name in ("tmp", "var-tmp", "project"):
        (host.scratch / name).mkdir(exist_ok=True)
        (host.scratch / name).chmod(0o1777)
    _new_key(ssh / "ssh_host_ed25519_key", host.name)
    write_atomic(ssh / "sshd_config", sshd_config(host, user.pw_name))
    write_atomic(ssh / "authorized_keys", identity.with_suffix(".pub").read_text())
    write_atomic(etc / "hosts", f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{names}")
    write_atomic(etc / "hostname", f"{host.name}\n")
    write_atomic(etc / "machine-id", f"{uuid.uuid4().hex}\n")
    write_atomic(etc / "boot_id", f"{uuid.uuid4()}\n")
    # without PAM sshd refuses an account whose password is locked with "!", as root's often is
    write_atomic(etc / "shadow", f"{user.pw_name}:*:20000:0:99999:7:::\n")
    (etc / "shadow").chmod(0o600)
    kept = kept_folders([lab.root, Path(user.pw_dir)])
    script = boot_script(host, lab.root, Path(user.pw_dir), kept, cores)
    write_atomic(host.folder / "boot.sh", script)
    key = (ssh / "ssh_host_ed25519_key.pub").read_text().split()
    return f"{host.name},{host.address} {key[0]} {key[1]}\n"


def _new_key(path: Path, comment: str) -> None:
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def start(host: LabHost) -> None:
    """Start the host's first process in its namespace and leave it running on its own."""
    end_processes(host.namespace)
    (host.folder / "init").unlink(missing_ok=True)
    inside = 'ip netns exec "$1" unshare --mount --uts --ipc --pid --fork --kill-child sh "$2/boot.sh"'
    line = f'setsid {inside} >"$2/log" 2>&1 </dev/null &'
    command("sh", "-c", line, "sh", host.namespace, str(host.folder))


def wait_ready(lab: Lab) -> None:
    """Return once every host's ssh server answers the controller. Raises HostError with the host's log."""
    deadline = time.monotonic() + _READY_S
    for host in lab.hosts:
        while not answers(host):
            if time.monotonic() > deadline:
                raise HostError(
                    f"lab: {host.name} ({host.address}) has no ssh server after {_READY_S:g} s; its log:\n"
                    + _log_tail(host),
                    hint="doit lab down=1, then again",
                )
            time.sleep(_POLL_S)


def answers(host: LabHost, timeout_s: float = 0.5) -> bool:
    """True if an ssh server greets the controller on the host's address."""
    try:
        with socket.create_connection((host.address, 22), timeout=timeout_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _log_tail(host: LabHost) -> str:
    try:
        lines = (host.folder / "log").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL:]) or "  (an empty log)"


def remove_files(root: Path) -> None:
    """Remove the lab's own files from ``root/.lab``, and the folder unless other files lie there."""
    place = folder(root)
    if not place.is_dir():
        return
    ours = (
        "node[0-9]*",
        "id_ed25519*",
        "known_hosts",
        "ssh_config",
        ".*.*",
        "state.json",
    )  # .*.*: half-written
    for pattern in ours:
        for path in sorted(place.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any(place.iterdir()):
        place.rmdir()
