"""The lab: simulated hosts on one computer (Linux, root) to try out and test multi-node runs (docs/lab.md).

Each host has namespaces of its own (network, processes, mounts) and an OpenSSH server. ``doit lab`` calls ``up``, which
makes the lab of a project folder, ``status``, and ``down``, which removes what ``up`` made and nothing else. Tests and
benchmarks break links with ``cut``, ``restore`` and ``limit``. ``network.py`` has the records and the network.
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
_READY_S = 10.0  # until all ssh servers must answer
_POLL_S = 0.005
_LOG_TAIL = 5  # lines of a host's log in an error
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
# The shell functions in it: keep NAME PATH makes a folder reachable as /run/lab/NAME before it is covered, cover NAME
# PATH puts a scratch folder over PATH, own NAME PATH replaces one file, back NAME PATH shows a kept folder, read-only.
_BOOT = """\
# The first process of a lab host, in namespaces of its own. Written by `doit lab`.
set -eu
export PATH={path}
read -r stat </proc/self/stat  # still the controller's /proc: the pid as the controller sees it
set -- $stat
taskset -pc {cores} $$ >/dev/null
echo "$1 ${{22}}" >{folder}/init.new
mv {folder}/init.new {folder}/init
# mount keeps notes in /run. So the host first gets a /run of its own, by a mount without notes (--no-mtab): else this
# and the later mounts would be noted in the controller's /run.
mount --no-mtab -t tmpfs -o mode=755 tmpfs /run
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
    """Return the running lab of ``root`` with this number of hosts; make or repair it if needed (about a second).

    A host whose ssh server died is started again and keeps its files. If a crash or a restart of the computer left only
    parts of a lab, they are removed, and the lab is made anew. Raises HostError: this computer can't run a lab, or it
    did not come up; UsageError: a wrong number of hosts, or a lab with another number runs here.
    """
    root = _checked_root(root)
    if not 1 <= hosts <= _MAX_HOSTS:
        raise UsageError(f"lab: hosts={hosts} is out of range; valid: 1 to {_MAX_HOSTS}", hint="doit lab --hosts 2")
    with _lock():
        lab = network.load(root)
        if lab is None or not _is_complete(lab, root):
            _remove(root)
            return _make(root, hosts)
        if len(lab.hosts) != hosts:
            raise UsageError(
                f"lab: a lab of {counted(len(lab.hosts), 'host')} runs here already, and not one of {hosts}",
                hint=f"doit lab --down && doit lab --hosts {hosts}",
            )
        # repair it: a test may have cut links, and an ssh server may have been killed
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
    """Return the lab of ``root`` as it is now; None: there is none."""
    return network.load(root.resolve())


def _checked_root(root: Path) -> Path:
    """Return the folder, resolved. Raises HostError: no lab can run in this folder, or on this computer."""
    error = missing()
    if error is not None:
        raise error
    root = root.resolve()
    refused = [text for text in ('"', "\\", "${", "\n") if text in str(root)]
    if refused:
        raise HostError(
            f"lab: the folder {str(root)!r} has {refused[0]!r} in its path, which ssh_config can't quote",
            hint="move the project to a folder without it",
        )
    return root


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock of all lab operations on this computer: a lock on the network namespace's file."""
    with Path("/proc/self/ns/net").open("rb") as file:
        deadline = time.monotonic() + _LOCK_S
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise HostError(f"lab: another `doit lab` has been at work for {_LOCK_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield


def _is_complete(lab: Lab, root: Path) -> bool:
    """Return True if the lab was made completely, in this folder, and its namespaces exist."""
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
    # recorded before anything is made, so that whatever happens `down` finds what there is to remove
    network.write_record(root, id_, hosts, network.free_subnet(id_))
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
    # the id that the folder's path gives, and the recorded one, which differs after the folder was moved
    for id_ in sorted({network.lab_id(root), *([lab.id] if lab else [])}):
        # until nothing is left: a command that a killed `up` has started may still make something
        while names := network.disconnect(id_):
            removed += names
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
    known_hosts, host_keys, entries = lab_folder / "known_hosts", [], []
    cores = sorted(os.sched_getaffinity(0))
    # neighbouring cores for each host; if there are more hosts than cores, some hosts share a core
    cores_per_host = max(1, len(cores) // len(lab.hosts))
    for number, host in enumerate(lab.hosts):
        own_cores = [cores[(number * cores_per_host + offset) % len(cores)] for offset in range(cores_per_host)]
        host_keys.append(_write_host(lab, host, names, user, identity, own_cores))
        files = {"identity": _ssh_path(identity), "known_hosts": _ssh_path(known_hosts)}
        entries.append(_SSH.format(name=host.name, address=host.address, user=user.pw_name, **files))
    write_atomic(known_hosts, "".join(host_keys))
    write_atomic(lab.ssh_config, "\n".join(entries))


def _write_host(
    lab: Lab, host: LabHost, names: str, user: pwd.struct_passwd, identity: Path, cores: Sequence[int]
) -> str:
    """Write the files of one host; return its line of known_hosts. ``names``: lines of /etc/hosts for all hosts."""
    ssh, etc = host.folder / "ssh", host.folder / "etc"
    for own_folder, mode in ((ssh, 0o755), (etc, 0o755), (host.home, 0o700)):
        own_folder.mkdir(parents=True, exist_ok=True)
        own_folder.chmod(mode)
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
    covered = {"/tmp": "tmp", "/var/tmp": "var-tmp", str(home): "home", str(root): "project"}  # path → scratch folder
    # a folder first, then those in it, or its cover would hide theirs
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
    """Return the folders of this Python that the covers would hide; the host keeps them, read-only."""
    hidden = [*covered, Path("/tmp"), Path("/var/tmp")]
    needed = {Path(sys.prefix), Path(sys.base_prefix), *_installations(Path(sys.executable))}
    inside = [path for path in needed if any(path.is_relative_to(cover) for cover in hidden)]
    # without a folder that contains a covered one, which would be visible again
    return sorted(path for path in inside if not any(cover.is_relative_to(path) for cover in covered))


def _installations(executable: Path) -> list[Path]:
    """Return the installation folder (…/bin/..) of each link on the way from the executable to the real file."""
    links = [executable]
    while links[-1].is_symlink() and len(links) < 16:  # links may form a circle
        links.append(Path(links[-1].parent, links[-1].readlink()))
    return [path.parent.parent for path in [*links, executable.resolve()]]


def _ssh_path(path: Path) -> str:
    """Quote a path for ssh_config, which takes % for the beginning of a placeholder."""
    return '"' + str(path).replace("%", "%%") + '"'


# --------------------------------------------------------------------------------------- its processes
def _start(host: LabHost) -> None:
    end_processes(host.namespace)
    (host.folder / "init").unlink(missing_ok=True)
    in_namespaces = 'ip netns exec "$1" unshare --mount --uts --ipc --pid --fork --kill-child sh "$2/boot.sh"'
    line = f'setsid {in_namespaces} >"$2/log" 2>&1 </dev/null &'
    command("sh", "-c", line, "sh", host.namespace, str(host.folder))


def wait_ready(lab: Lab) -> Lab:
    """Wait until every host's ssh server answers; return the lab with its processes. Raises HostError with a log."""
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
    """Return True if an ssh server greets this process at the host's address."""
    try:
        with socket.create_connection((host.address, 22), timeout=timeout_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _remove_files(root: Path) -> None:
    lab_folder = folder(root)
    if not lab_folder.is_dir():
        return
    # ".*.*": half-written files. The record goes last: with it `down` can continue after an interruption.
    for pattern in ("node[0-9]*", "id_ed25519*", "known_hosts", "ssh_config", ".*.*", "state.json"):
        for path in sorted(lab_folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any(lab_folder.iterdir()):
        lab_folder.rmdir()
