"""What the lab needs of this machine, and the one way its commands are run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pipeline.core.errors import HostError
from pipeline.core.processes import process

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # a plain user's PATH often lacks sbin
_PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "mount": "mount",
}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bit numbers, linux/capability.h
_OWN_HOSTS = "or train on hosts of your own: doit train cluster=pssh cluster.hostfile=FILE"
_COMMAND_TIMEOUT_S = 30.0


def missing() -> HostError | None:
    """Why no lab can run here, with the way to get what is missing; None where all is there."""
    if sys.platform != "linux":
        return HostError(
            f"the lab needs Linux (network namespaces); this is {sys.platform}",
            hint="doit train cluster=pssh cluster.hostfile=FILE, with hosts of your own",
        )
    absent = [program for program in _PACKAGES if shutil.which(program, path=PATH) is None]
    if absent:
        packages = sorted({_PACKAGES[program] for program in absent})
        return HostError(
            f"the lab needs {', '.join(absent)}, not found in {PATH}",
            hint=f"sudo apt-get install {' '.join(packages)}   ({_OWN_HOSTS})",
        )
    if os.geteuid() != 0:
        return HostError(
            f"the lab needs root (network namespaces); this is uid {os.geteuid()}",
            hint=f'sudo "$(command -v doit)" lab --hosts 2   ({_OWN_HOSTS})',
        )
    lacking = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if lacking:
        return HostError(
            f"the lab needs {' and '.join(lacking)}, which this container's root does not have",
            hint=f"docker run --privileged …   ({_OWN_HOSTS})",
        )
    return None


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def command(*argv: str, stdin: str = "") -> str:
    """Standard output of a system command in a clean environment.

    Raises:
        HostError: it ended with another code than 0; the text holds the command and what it said.
    """
    done = process.run(argv, input=stdin.encode(), timeout_s=_COMMAND_TIMEOUT_S, env={"PATH": PATH, "LC_ALL": "C"})
    if done.code != 0:
        said = " ".join(done.stderr.split()) or "(nothing)"
        raise HostError(
            f"lab: `{' '.join(argv)}` ended with {done.code} and said: {said}", hint="doit lab --down, then again"
        )
    return done.stdout
