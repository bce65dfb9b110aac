"""The lab: simulated hosts on one computer, in network namespaces, each with its own OpenSSH server (docs/lab.md).

``up`` makes the lab of a project folder, ``status`` looks at it, ``down`` removes what ``up`` made and nothing else.
``cut``, ``restore`` and ``limit`` make the link faults that tests and benchmarks need.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from pipeline.core.errors import HostError, UsageError, os_reason
from pipeline.core.files import write_atomic
from pipeline.core.locks import try_lock
from pipeline.core.tables import counted
from pipeline.lab import network
from pipeline.lab.network import PATH, Lab, LabHost, command, cut, end_processes, folder, limit, missing, restore

__all__ = ["Lab", "LabHost", "answers", "cut", "down", "limit", "missing", "restore", "status", "up", "wait_ready"]

_MAX_HOSTS = 64
_LOCK_S = 60.0
_LOCK_POLL_S = 0.02
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


def up(root: Path, hosts: int) -> Lab:
    """Return the running lab of ``root`` with that many hosts: found, repaired, or made (about a second).

    A host whose ssh server died is started again and keeps its files. What a crash or a restart of the computer left
    of a lab is removed, and the lab made anew.

    Raises:
        HostError: this computer can't run a lab, or a part of it did not come up.
        UsageError: a wrong number of hosts, or a lab with another number runs here.
    """
    root = _checked_root(root)
    if not 1 <= hosts <= _MAX_HOSTS:
        raise UsageError(f"lab: hosts={hosts} is out of range; valid: 1 to {_MAX_HOSTS}", hint="doit lab --hosts 2")
    with _lock():
        lab = network.load(root)
        if lab is None or not _usable(lab, root):
            _remove(root)
            return _make(root, hosts)
        if len(lab.hosts) != hosts:
            raise UsageError(
                f"lab: a lab of {counted(len(lab.hosts), 'host')} runs here already, and not one of {hosts}",
                hint=f"doit lab --down && doit lab --hosts {hosts}",
            )
        for host in lab.hosts:
            network.restore(lab, host.name)
            if host.sshd_pid is None:
                _start(host)
        return wait_ready(lab)


def down(root: Path) -> tuple[str, ...]:
    """Remove all that is left of the lab of ``root``, and return the names of what was removed."""
    with _lock():
        return _remove(_checked_root(root))


def status(root: Path) -> Lab | None:
    """Return the lab of ``root`` as it is now (``lab.running``: every ssh server lives); None: there is none."""
    return network.load(root.resolve())


def _checked_root(root: Path) -> Path:
    """Return the folder, resolved. Raises HostError: no lab can run there, or on this computer."""
    if (reason := missing()) is not None:
        raise reason
    root = root.resolve()
    refused = [sign for sign in ('"', "\\", "${", "\n") if sign in str(root)]
    if refused:
        raise HostError(
            f"lab: the folder {str(root)!r} has {refused[0]!r} in its path, which ssh_config can't quote",
            hint="move the project to a folder without it",
        )
    return root


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock of all lab operations in this network namespace. The kernel releases it when a process dies."""
    with Path("/proc/self/ns/net").open("rb") as file:
        deadline = time.monotonic() + _LOCK_S
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise HostError(f"lab: another `doit lab` has been at work for {_LOCK_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield


def _usable(lab: Lab, root: Path) -> bool:
    """Whether the lab was made completely, in this folder, and its namespaces exist."""
    expected = {lab.switch, *(host.namespace for host in lab.hosts)}
    return lab.root == root and lab.ssh_config.exists() and expected == set(network.namespaces(lab.id))


def _make(root: Path, hosts: int) -> Lab:
    id_ = network.lab_id(root)
    try:
        network.folder(root).mkdir(exist_ok=True)
    except OSError as error:
        raise HostError(
            f"lab: its hosts' files can't lie in this project: {os_reason(error)}", hint="a clone that you can write to"
        ) from error
    network.journal(root, id_, hosts, network.free_subnet(id_))
    lab = network.load(root)
    assert lab is not None
    try:
        network.connect(lab)
        _write_files(lab)
        for host in lab.hosts:
            _start(host)
        return wait_ready(lab)
    except BaseException:
        _remove(root)
        raise


def _remove(root: Path) -> tuple[str, ...]:
    lab = network.load(root)
    removed = list[str]()
    for id_ in sorted({network.lab_id(root), *([lab.id] if lab else [])}):
        while ended := network.disconnect(id_):  # again: a killed `up` may have left a command at work
            removed += ended
    _remove_files(root)
    return tuple(removed)


# ---------------------------------------------------------------------------------------------- the files of a host
def _write_files(lab: Lab) -> None:
    lab_folder = folder(lab.root)
    user = pwd.getpwuid(os.geteuid())
    identity = lab_folder / "id_ed25519"
    _new_key(identity, "paceline-lab")
    # torch's store listens on IPv6 and looks its clients' names up by their mapped addresses
    names = "".join(f"{host.address} {host.name}\n::ffff:{host.address} {host.name}.mapped\n" for host in lab.hosts)
    known_hosts, known, entries = lab_folder / "known_hosts", [], []
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // len(lab.hosts))  # neighbouring cores for each; of more hosts than cores some share one
    for number, host in enumerate(lab.hosts):
        own_cores = [cores[(number * size + offset) % len(cores)] for offset in range(size)]
        known.append(_write_host(lab, host, names, user, identity, own_cores))
        files = {"identity": _ssh_path(identity), "known_hosts": _ssh_path(known_hosts)}
        entries.append(_SSH.format(name=host.name, address=host.address, user=user.pw_name, **files))
    write_atomic(known_hosts, "".join(known))
    write_atomic(lab.ssh_config, "\n".join(entries))


def _write_host(
    lab: Lab, host: LabHost, names: str, user: pwd.struct_passwd, identity: Path, cores: Sequence[int]
) -> str:
    ssh, etc = host.folder / "ssh", host.folder / "etc"
    for made, mode in ((ssh, 0o755), (etc, 0o755), (host.home, 0o700)):
        made.mkdir(parents=True, exist_ok=True)
        made.chmod(mode)
    for name in ("tmp", "var-tmp", "project"):
        (host.scratch / name).mkdir(exist_ok=True)
        (host.scratch / name).chmod(0o1777)
    _new_key(ssh / "ssh_host_ed25519_key", host.name)
    path = f"{Path(sys.prefix) / 'bin'}:{PATH}"
    write_atomic(ssh / "sshd_config", _SSHD.format(address=host.address, user=user.pw_name, path=path))
    write_atomic(ssh / "authorized_keys", identity.with_suffix(".pub").read_text())
    write_atomic(etc / "hosts", f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{names}")
    write_atomic(etc / "hostname", f"{host.name}\n")
    write_atomic(etc / "machine-id", f"{uuid.uuid4().hex}\n")
    write_atomic(etc / "boot_id", f"{uuid.uuid4()}\n")
    # without PAM sshd refuses an account whose password is locked with "!", as root's often is
    write_atomic(etc / "shadow", f"{user.pw_name}:*:20000:0:99999:7:::\n")
    (etc / "shadow").chmod(0o600)
    write_atomic(host.folder / "boot.sh", _boot_script(host, lab.root, Path(user.pw_dir), cores))
    key = (ssh / "ssh_host_ed25519_key.pub").read_text().split()
    return f"{host.name},{host.address} {key[0]} {key[1]}\n"


def _new_key(path: Path, comment: str) -> None:
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def _boot_script(host: LabHost, root: Path, home: Path, cores: Sequence[int]) -> str:
    """Return the shell script that turns fresh namespaces into the host.

    The host gets its own name, /proc, /run, /tmp, home, ssh keys and machine id, and doesn't see the project folder. It
    computes on ``cores`` alone: with all cores for each host, training would be ten times slower.
    """
    covered = {"/tmp": "tmp", "/var/tmp": "var-tmp", str(home): "home", str(root): "project"}
    shallow_first = sorted(covered.items(), key=lambda item: len(Path(item[0]).parts))
    kept_names = [(f"keep{index}", quote(str(path))) for index, path in enumerate(_kept_folders([root, home]))]
    return _BOOT.format(
        path=quote(PATH),
        folder=quote(str(host.folder)),
        name=host.name,
        cores=",".join(map(str, cores)),
        keeps="\n".join(f"keep {name} {path}" for name, path in kept_names),
        covers="\n".join(f"cover {name} {quote(path)}" for path, name in shallow_first),
        backs="\n".join(f"back {name} {path}" for name, path in kept_names),
    )


def _kept_folders(covered: Sequence[Path]) -> list[Path]:
    """Return this Python's folders in a folder that the host covers; they stay visible there, read-only."""
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


def _ssh_path(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'


# --------------------------------------------------------------------------------------- its processes
def _start(host: LabHost) -> None:
    end_processes(host.namespace)
    (host.folder / "init").unlink(missing_ok=True)
    inside = 'ip netns exec "$1" unshare --mount --uts --ipc --pid --fork --kill-child sh "$2/boot.sh"'
    line = f'setsid {inside} >"$2/log" 2>&1 </dev/null &'
    command("sh", "-c", line, "sh", host.namespace, str(host.folder))


def wait_ready(lab: Lab) -> Lab:
    """Wait until every host's ssh server answers; return the lab as it is then. Raises HostError with a host's log."""
    deadline = time.monotonic() + _READY_S
    for host in lab.hosts:
        while not answers(host):
            if time.monotonic() > deadline:
                log = host.folder / "log"
                lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:] if log.exists() else []
                raise HostError(
                    f"lab: {host.name} ({host.address}) has no ssh server after {_READY_S:g} s; its log:\n"
                    + ("\n".join(f"  {line}" for line in lines) or "  (empty)"),
                    hint="doit lab --down, then again",
                )
            time.sleep(_POLL_S)
    ready = network.load(lab.root)
    assert ready is not None
    return ready


def answers(host: LabHost, timeout_s: float = 0.5) -> bool:
    """Whether an ssh server greets the controller on the host's address."""
    try:
        with socket.create_connection((host.address, 22), timeout=timeout_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _remove_files(root: Path) -> None:
    lab_folder = folder(root)
    if not lab_folder.is_dir():
        return
    ours = ("node[0-9]*", "id_ed25519*", "known_hosts", "ssh_config", ".*.*", "state.json")  # .*.*: half-written
    for pattern in ours:
        for path in sorted(lab_folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any(lab_folder.iterdir()):
        lab_folder.rmdir()
