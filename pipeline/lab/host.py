"""One lab host: its keys, its files, the start of its first process, and the wait for its ssh server."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from pipeline.core.errors import HostError
from pipeline.core.files import write_atomic
from pipeline.lab.network import PATH, command, end_processes
from pipeline.lab.state import Lab, LabHost, folder

_READY_S = 10.0
_POLL_S = 0.005
_LOG_TAIL = 5  # lines
_SSHD = """\
Port 22
ListenAddress {address}
ListenAddress 127.0.0.1
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100
MaxSessions 100
AcceptEnv LANG LC_*
SetEnv "PATH={path}"
Subsystem sftp internal-sftp
"""
_SSH = """\
Host {name}
  HostName {address}
  Port 22
  User {user}
  IdentityFile {identity}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  UpdateHostKeys no
"""
_BOOT = """\
# The first process of a lab host, in namespaces of its own. Written by `doit lab`.
set -eu
export PATH={path}
read -r stat </proc/self/stat  # still the controller's /proc: the pid as the controller sees it
set -- $stat
taskset -pc {cores} $$ >/dev/null
echo "$1 ${{22}}" >{folder}/init.new
mv {folder}/init.new {folder}/init
mount --no-mtab -t tmpfs -o mode=755 tmpfs /run  # before mount keeps its notes in the controller's /run
mount -t proc proc /proc
echo {name} >/proc/sys/kernel/hostname
mkdir -p /run/sshd /run/lab
keep() {{ mkdir -p "/run/lab/$1"; mount --bind "$2" "/run/lab/$1"; }}
cover() {{ mkdir -p "$2"; mount --bind "/run/lab/host/scratch/$1" "$2"; }}
own() {{ if [ -e "$2" ]; then mount --bind "/run/lab/host/$1" "$2"; fi; }}
back() {{ mkdir -p "$2"; mount --bind "/run/lab/$1" "$2"; mount -o remount,bind,ro "$2"; }}
keep host {folder}
{keeps}
{covers}
mount -t tmpfs tmpfs /var/log
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
{backs}
own etc/hosts /etc/hosts
own etc/hostname /etc/hostname
own etc/machine-id /etc/machine-id
own etc/boot_id /proc/sys/kernel/random/boot_id
own etc/shadow /etc/shadow
mount --bind /run/lab/host/ssh /etc/ssh
umount /run/lab/*
cd /
"$(command -v sshd)" -D -e &
while :; do sleep 2147483647 & wait $!; done  # the first process also collects orphans
"""


def write_files(lab: Lab) -> None:
    """Write keys, ssh_config, known_hosts, and each host's folder with the files that it has as its /etc."""
    lab_folder = folder(lab.root)
    user = pwd.getpwuid(os.geteuid())
    identity = lab_folder / "id_ed25519"
    _new_key(identity, "paceline-lab")
    # torch's store listens on IPv6 and looks its clients' names up by their mapped addresses
    names = "".join(f"{host.address} {host.name}\n::ffff:{host.address} {host.name}.mapped\n" for host in lab.hosts)
    known = [
        _write_host(lab, host, names, user, identity, cores)
        for host, cores in zip(lab.hosts, share_of_cores(sorted(os.sched_getaffinity(0)), len(lab.hosts)), strict=True)
    ]
    write_atomic(lab_folder / "known_hosts", "".join(known))
    entries = [ssh_client_entry(host, user.pw_name, identity, lab_folder / "known_hosts") for host in lab.hosts]
    write_atomic(lab.ssh_config, "\n".join(entries))


def share_of_cores(cores: Sequence[int], hosts: int) -> list[list[int]]:
    """Return neighbouring cores for each host; if there are more hosts than cores, some share one."""
    size = max(1, len(cores) // hosts)
    return [[cores[(first * size + offset) % len(cores)] for offset in range(size)] for first in range(hosts)]


def _write_host(
    lab: Lab, host: LabHost, names: str, user: pwd.struct_passwd, identity: Path, cores: Sequence[int]
) -> str:
    """Write one host's folder, and return its line for known_hosts."""
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


# ----------------------------------------------------------------------------------- texts of a host
def boot_script(host: LabHost, root: Path, home: Path, kept: Sequence[Path], cores: Sequence[int]) -> str:
    """Return the shell script that turns fresh namespaces into the host.

    It gives the host its own name, /proc, /run, /tmp, home, ssh and machine identity and hides the
    project folder, so that nothing is shared by accident.

    Args:
        kept: folders that stay visible, read-only.
        cores: the host computes on these; if each host took all, training would be ten times slower.
    """
    covered = {"/tmp": "tmp", "/var/tmp": "var-tmp", str(home): "home", str(root): "project"}
    shallow_first = sorted(covered.items(), key=lambda item: len(Path(item[0]).parts))
    kept_names = [(f"keep{index}", quote(str(path))) for index, path in enumerate(kept)]
    return _BOOT.format(
        path=quote(PATH),
        folder=quote(str(host.folder)),
        name=host.name,
        cores=",".join(map(str, cores)),
        keeps="\n".join(f"keep {name} {path}" for name, path in kept_names),
        covers="\n".join(f"cover {name} {quote(path)}" for path, name in shallow_first),
        backs="\n".join(f"back {name} {path}" for name, path in kept_names),
    )


def kept_folders(covered: Sequence[Path]) -> list[Path]:
    """Return this Python's folders (virtual environment and base) that lie in a folder which the host covers."""
    hidden = [*covered, Path("/tmp"), Path("/var/tmp")]
    wanted = {Path(sys.prefix), Path(sys.base_prefix), *_links_of(Path(sys.executable))}
    inside = [path for path in wanted if any(path.is_relative_to(cover) for cover in hidden)]
    # never one that would bring a covered folder back
    return sorted(path for path in inside if not any(cover.is_relative_to(path) for cover in covered))


def _links_of(executable: Path) -> list[Path]:
    """Return the installation folder (…/bin/..) of each link from the executable to the real file."""
    steps = [executable]
    while steps[-1].is_symlink() and len(steps) < 16:
        steps.append(Path(steps[-1].parent, steps[-1].readlink()))
    return [step.parent.parent for step in [*steps, executable.resolve()]]


def sshd_config(host: LabHost, user: str) -> str:
    """Return the host's /etc/ssh/sshd_config: one user, keys only; this Python is first on its PATH."""
    path = f"{Path(sys.prefix) / 'bin'}:{PATH}"
    return _SSHD.format(address=host.address, user=user, path=path)


def ssh_client_entry(host: LabHost, user: str, identity: Path, known_hosts: Path) -> str:
    """Return the host's entry of the lab's ssh_config."""
    files = {"identity": _ssh_path(identity), "known_hosts": _ssh_path(known_hosts)}
    return _SSH.format(name=host.name, address=host.address, user=user, **files)


def _ssh_path(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'


# --------------------------------------------------------------------------------------- its processes
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
                    hint="doit lab --down, then again",
                )
            time.sleep(_POLL_S)


def answers(host: LabHost, timeout_s: float = 0.5) -> bool:
    """Whether an ssh server greets the controller on the host's address."""
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
    lab_folder = folder(root)
    if not lab_folder.is_dir():
        return
    ours = ("node[0-9]*", "id_ed25519*", "known_hosts", "ssh_config", ".*.*", "state.json")  # .*.*: half-written
    for pattern in ours:
        for path in sorted(lab_folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any(lab_folder.iterdir()):
        lab_folder.rmdir()
