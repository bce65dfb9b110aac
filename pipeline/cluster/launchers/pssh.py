"""The launcher ``pssh``: hosts over OpenSSH. pssh sends short requests to all hosts at once, ssh streams live output.

The user's own ~/.ssh/config, agent, ProxyJump and known_hosts are used, and host-key checking is never changed. No
value reaches a remote shell: the remote command is constant except for the quoted path of the interpreter, and
everything else goes through stdin.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path
from typing import IO, cast

from pipeline.cluster.launchers.base import LockFile, Transport, refuse_missing_ssh_config
from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.cluster.launchers.transport.answers import ENDLESS, LATE, Answer, Output, explain_over_ssh
from pipeline.cluster.launchers.transport.payload import agent_argv
from pipeline.core.errors import HostError, PacelineError, UsageError
from pipeline.core.files import expanded, temporary_prefix
from pipeline.core.places import ROOT
from pipeline.core.processes import process
from pipeline.core.specs import Cluster, Host, unfit_name

INSTALL = {
    "darwin": "brew install pssh",
    "linux": "apt install pssh (Debian, Ubuntu), dnf install pssh (Fedora); not the packages of Python's index",
}
# Of one pssh. Its signal handler is called again within itself for each ssh that ends meanwhile; if a thousand of them
# end at once, this exceeds Python's recursion limit.
_MOST_HOSTS = 200
_MOST_BYTES = 32 << 20  # of one host's output: more than any answer and what a login prints before it
_SHOWN_BYTES = 4096  # of an output that was cut off
_AT_ONCE = 8  # ssh clients
_FILES, _FILES_OF_HOST = 512, 16  # open files; pssh needs about nine for each host, the live streams three
_SHARES = re.compile(r"^controlpath (?!none$)", re.MULTILINE)  # in the output of `ssh -G`: connections are shared
_RECONNECT_TIMEOUT_S = 2.0  # so that a broken stream is tried again within streams.LOST_S


@dataclass(kw_only=True)
class PsshConfig(ClusterConfig):
    """Settings of the ssh launcher.

    Attributes:
        environment_from: a lock file, of which `doit sync` makes a Python environment on each host, which runs then
            use: a path, or lock (the project's requirements-nodes.lock, or else its requirements.lock); null: the hosts
            have their own environments.
        wheelhouse: folder of wheels on this computer for that environment, if the hosts have no network.
    """

    launcher: str = "pssh"
    environment_from: str | None = None
    wheelhouse: str | None = None


def _settings(cluster: Cluster) -> PsshConfig:
    return cast("PsshConfig", cluster.settings)


LOCKS = ("requirements-nodes.lock", "requirements.lock")
"""The project's files that ``cluster.environment_from=lock`` takes, the preferred one first."""


def lock_file(environment_from: str | None, wheelhouse: str | None) -> LockFile | None:
    """Return the lock file of the settings; None: hosts have their own environments. Raises UsageError."""
    if environment_from is None:
        if wheelhouse is not None:
            raise UsageError("cluster.wheelhouse is for cluster.environment_from=lock, which isn't set")
        return None
    name = environment_from
    if environment_from == "lock":
        name = next((own for own in LOCKS if (ROOT / own).is_file()), LOCKS[-1])
    lock = ROOT / expanded(name, f"cluster.environment_from={name}")
    wheels = ROOT / expanded(wheelhouse, f"cluster.wheelhouse={wheelhouse}") if wheelhouse is not None else None
    if not lock.is_file():
        raise UsageError(
            f"cluster.environment_from={environment_from}: there is no file {lock}",
            hint=f"cluster.environment_from=lock takes the project's {' or '.join(LOCKS)}",
        )
    if wheels is not None and not wheels.is_dir():
        raise UsageError(
            f"cluster.wheelhouse={wheelhouse}: there is no folder {wheels}",
            hint=f"python -m pip download --no-deps --require-hashes -r {lock} -d {wheelhouse}",
        )
    return LockFile(path=lock, wheelhouse=wheels)


class PsshTransport(Transport):
    """Reaches hosts by pssh and ssh. They need an ssh server and Python; no file system must be shared."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        for host in cluster.hosts:
            if why := unfit_name(host):
                raise UsageError(f"cluster.hosts: {host.label!r} {why}")
        refuse_missing_ssh_config(cluster)
        program, ssh = process.find("pssh", "parallel-ssh"), process.find("ssh")
        if program is None or ssh is None:
            absent = "pssh (or parallel-ssh)" if program is None else "ssh"
            raise HostError(
                f"cluster.launcher=pssh needs the program {absent}, which is not in PATH={os.environ.get('PATH')}",
                hint=INSTALL.get(sys.platform, "install OpenSSH's client and pssh"),
            )
        process.allow_open_files(_FILES + _FILES_OF_HOST * cluster.nnodes)
        settings = _settings(cluster)
        self.lock_file = lock_file(settings.environment_from, settings.wheelhouse)
        self._pssh = program
        prefix = temporary_prefix("paceline")
        self._sockets = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # a socket's path has to be short
        self._sharing_options = self._shared_connection()

    # ------------------------------------------------------------------------- reaching hosts
    def _shared_connection(self) -> dict[str, str]:
        """Return ssh options that let later commands share the probe's connection to each host.

        A handshake costs 0.2 to 0.5 s, and many at once may exceed sshd's MaxStartups. Shared connections of the user's
        own configuration are kept: they may be the only way past a second factor.
        """

        def shares_already(host: Host) -> bool:
            return bool(_SHARES.search(process.run([*self._ssh(host, {}), "-G", "--", host.name]).stdout))

        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            if any(pool.map(shares_already, self.cluster.hosts)):
                return {}
        return {"ControlMaster": "auto", "ControlPath": f"{self._sockets}/%C", "ControlPersist": "30"}

    def close(self) -> None:
        """End the shared connections."""

        def end(host: Host) -> None:
            with contextlib.suppress(PacelineError):  # a stuck one ends by itself: ControlPersist
                process.run([*self._ssh(host, self._sharing_options), "-O", "exit", "--", host.name], timeout_s=5.0)

        if self._sharing_options:
            with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
                list(pool.map(end, self.cluster.hosts))
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _ssh(self, host: Host, options: Mapping[str, str]) -> list[str]:
        argv = ["ssh", "-T"]
        argv += ["-F", self.cluster.ssh_config] if self.cluster.ssh_config else []
        argv += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        argv += ["-l", host.user] if host.user else []
        argv += ["-p", str(host.port)] if host.port else []
        return argv

    def python_of(self, host: Host) -> str | None:
        """Return the interpreter that is configured for the host; None: none is."""
        return self.pythons.get(host.label, host.python)

    @property
    def _connect_s(self) -> float:
        """ssh's limit for a connection: less for hosts that have answered before, so a lost one is noticed soon."""
        first_s = self.cluster.settings.connect_timeout_s
        return first_s if self.slow_s is None else min(first_s, max(_RECONNECT_TIMEOUT_S, self.slow_s))

    def _options(self) -> dict[str, str]:
        return {
            **(self._sharing_options if self.shares_connections else {}),
            "BatchMode": "yes",  # no questions, which a user couldn't answer for many hosts
            "ConnectTimeout": str(max(1, round(self._connect_s))),
            "ServerAliveInterval": "1",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",  # forwarded ports of the user's config would collide
            "RemoteCommand": "none",  # one in the user's config would replace the agent's command
            "RequestTTY": "no",  # a terminal would echo what is sent, and change what comes back
            "LogLevel": "INFO",  # ssh says why it failed, and no more
        }

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """Run one pssh for each group of hosts; usually one for all."""
        groups = self._groups(hosts)
        if len(groups) == 1:
            return self._run_pssh(stdin, groups[0], timeout_s)
        with contextlib.ExitStack() as stack:
            # each pssh reads the file on its own, and needs a position of its own in it
            copies = [stack.enter_context(_copy_of(stdin)) for _ in groups]
            pool = stack.enter_context(ThreadPoolExecutor(len(groups)))
            groups_outputs = pool.map(self._run_pssh, copies, groups, repeat(timeout_s))
            return {label: output for outputs in groups_outputs for label, output in outputs.items()}

    def _groups(self, hosts: Sequence[Host]) -> list[list[Host]]:
        """Group hosts by interpreter: one pssh runs one command, on a limited number of hosts."""
        pythons = dict.fromkeys(map(self.python_of, hosts))
        by_python = [[host for host in hosts if self.python_of(host) == python] for python in pythons]
        return [group[at : at + _MOST_HOSTS] for group in by_python for at in range(0, len(group), _MOST_HOSTS)]

    def _run_pssh(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-pssh")) as name:
            folder = Path(name)
            argv = self._pssh_argv(folder, hosts, timeout_s)
            env = {key: value for key, value in os.environ.items() if not key.startswith("PSSH_")}
            try:
                is_endless = partial(_is_endless, folder / "out")
                # pssh ends late hosts itself at timeout_s; the 5 s more are for a pssh that hangs
                done = process.run_apart(argv, stdin=stdin, env=env, timeout_s=timeout_s + 5, enough=is_endless)
            except PacelineError as error:
                return {host.label: Output(code=None, note=error.what) for host in hosts}
            report = done.stdout + done.stderr
            return {host.label: output_of(folder, pssh_name(host), report, timeout_s) for host in hosts}

    def _pssh_argv(self, folder: Path, hosts: Sequence[Host], timeout_s: float) -> list[str]:
        self.outputs |= {host.label: folder / "out" / pssh_name(host) for host in hosts}
        (folder / "hosts").write_text("".join(f"{pssh_name(host)}\n" for host in hosts), encoding="utf-8")
        argv = [self._pssh, "-h", str(folder / "hosts"), "-p", str(len(hosts)), "-t", str(round(timeout_s))]
        argv += ["-o", str(folder / "out"), "-e", str(folder / "err"), "-I"]
        argv += [word for key, value in self._options().items() for word in ("-O", f"{key}={value}")]
        if self.cluster.ssh_config:
            # one word, which pssh splits like a shell
            argv += ["-x", f"-F {shlex.quote(self.cluster.ssh_config)}"]
        return [*argv, remote_command(self.python_of(hosts[0]))]

    def stream_argv(self, host: Host) -> list[str]:
        return [*self._ssh(host, self._options()), "--", host.name, remote_command(self.python_of(host))]

    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        is_first = self.slow_s is None  # then the limit was cluster.connect_timeout_s
        return explain_over_ssh(host, answer, self.cluster.ssh_config, connect_s=self._connect_s, is_setting=is_first)


def _copy_of(file: IO[bytes]) -> IO[bytes]:
    copy = tempfile.TemporaryFile(prefix="paceline-")  # noqa: SIM115  (the caller closes it)
    file.seek(0)
    shutil.copyfileobj(file, copy)
    return copy


def remote_command(python: str | None) -> str:
    """Return the command line for the remote login shell."""
    return shlex.join(["exec", *agent_argv(python)])


# ---------------------------------------------------------------------------------------------------- what pssh leaves
def pssh_name(host: Host) -> str:
    """Return a host's line in pssh's host file. pssh splits at the last colon, so an IPv6 address needs its port."""
    if ":" in host.name and host.port is None:
        return f"{host.label}:22"
    return host.label


def output_of(folder: Path, name: str, report: str, timeout_s: float) -> Output:
    """Return the output of one host's command and how it ended, by pssh's report.

    ``name``: the host's line in pssh's host file; its two output files have it too. ``timeout_s``: pssh's own limit.
    """
    out, err = folder / "out" / name, folder / "err" / name
    stderr = err.read_text(encoding="utf-8", errors="replace") if err.exists() else ""
    stdout = b""
    if out.exists():
        with out.open("rb") as file:
            stdout = file.read(_MOST_BYTES)
    if len(stdout) == _MOST_BYTES:
        note = f"{ENDLESS} ({_MOST_BYTES >> 20} MiB so far)"
        return Output(stdout=stdout[-_SHOWN_BYTES:], stderr=stderr, code=None, note=note)
    end = _ends(report).get(name)
    if end is None or "Timed out" in end:
        note = "pssh has not asked it" if end is None else f"{LATE} {timeout_s:g} s"
        return Output(stdout=stdout, stderr=stderr, code=None, note=note)
    error, killed = re.search(r"error code (\d+)", end), re.search(r"signal (\d+)", end)
    code = int(error[1]) if error else -int(killed[1]) if killed else 0
    return Output(stdout=stdout, stderr=stderr, code=code)


@lru_cache(maxsize=1)
def _ends(report: str) -> dict[str, str]:
    """Return host name → how its command ended, in pssh's words. Cached, because it is called once for each host."""
    lines = re.finditer(r"\[(?:SUCCESS|FAILURE)\] (\S+)(?: (.*))?$", report, re.MULTILINE)
    return {line[1]: line[2] or "" for line in lines}


def _is_endless(folder: Path) -> bool:
    """Return True if a host has written more into ``folder`` than is ever read, and would fill the disk."""
    with contextlib.suppress(OSError):  # there is nothing yet
        return any(path.stat().st_size > 2 * _MOST_BYTES for path in folder.iterdir())
    return False
