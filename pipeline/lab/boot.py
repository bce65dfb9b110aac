"""The texts a lab host is made of: its boot script, its sshd_config, its ssh_config entry.

Pure but for ``kept_folders``, which looks where this Python lies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from pipeline.lab.requirements import PATH
from pipeline.lab.state import LabHost

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


def boot_script(host: LabHost, root: Path, home: Path, kept: Sequence[Path], cores: Sequence[int]) -> str:
    """The shell script that turns fresh namespaces into the host.

    It gives the host its own name, /proc, /run, /tmp, home, ssh and machine identity and hides the
    project folder, so that nothing is shared by accident; ``kept`` (read-only) is what stays visible. ``cores`` are
    those it computes on: with each host taking them all, training is ten times slower.
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
    """This Python's own folders (virtual environment and base) that lie in a folder which the host covers."""
    hidden = [*covered, Path("/tmp"), Path("/var/tmp")]
    wanted = {Path(sys.prefix), Path(sys.base_prefix), *_links_of(Path(sys.executable))}
    inside = [path for path in wanted if any(path.is_relative_to(cover) for cover in hidden)]
    # never one that would bring a covered folder back
    return sorted(path for path in inside if not any(cover.is_relative_to(path) for cover in covered))


def _links_of(executable: Path) -> list[Path]:
    """The installation folder (…/bin/..) of each step of the executable's chain of links."""
    steps = [executable]
    while steps[-1].is_symlink() and len(steps) < 16:
        steps.append(Path(steps[-1].parent, steps[-1].readlink()))
    return [step.parent.parent for step in [*steps, executable.resolve()]]


def sshd_config(host: LabHost, user: str) -> str:
    """The host's /etc/ssh/sshd_config: one user, keys only; this Python is first on its PATH."""
    return "\n".join(
        [
            "Port 22",
            f"ListenAddress {host.address}",
            "ListenAddress 127.0.0.1",
            "HostKey /etc/ssh/ssh_host_ed25519_key",
            "PidFile /run/sshd.pid",
            "AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys",
            f"AllowUsers {user}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "UseDNS no",
            "PrintMotd no",
            "MaxStartups 100",
            "MaxSessions 100",
            "AcceptEnv LANG LC_*",
            f'SetEnv "PATH={Path(sys.prefix) / "bin"}:{PATH}"',
            "Subsystem sftp internal-sftp",
            "",
        ]
    )


def ssh_client_entry(host: LabHost, user: str, identity: Path, known_hosts: Path) -> str:
    """The host's entry of the lab's ssh_config."""
    return "\n".join(
        [
            f"Host {host.name}",
            f"  HostName {host.address}",
            "  Port 22",
            f"  User {user}",
            f"  IdentityFile {_ssh_path(identity)}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {_ssh_path(known_hosts)}",
            "  GlobalKnownHostsFile /dev/null",
            "  StrictHostKeyChecking yes",
            "  UpdateHostKeys no",
            "",
        ]
    )


def _ssh_path(path: Path) -> str:
    return '"' + str(path).replace("%", "%%") + '"'
