"""Hosts over OpenSSH: the system's pssh for short commands on all hosts at once, plain ssh for live output.

Your own ~/.ssh/config, agent, ProxyJump and known_hosts are honoured; host-key checking is never touched.
No value reaches a remote shell: the remote command is constant but for the interpreter's path (quoted),
everything else goes through stdin.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO, Any

from pipeline.cluster.launchers import environments
from pipeline.cluster.launchers.answers import received_bytes
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.launchers.payload import agent_argv
from pipeline.cluster.launchers.pssh_output import fills_the_disk, output_of, pssh_name
from pipeline.cluster.launchers.remote_launcher import RemoteLauncher
from pipeline.cluster.launchers.replies import Answer, Output
from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.cluster.launchers.ssh_settings import shares_already
from pipeline.core import leftovers, process
from pipeline.core.cluster import unfit_name
from pipeline.core.errors import HostError, PacelineError, UsageError
from pipeline.core.specs import Cluster, Host, NodeFacts

INSTALL = {
    "darwin": "brew install pssh",
    "linux": "apt install pssh (Debian, Ubuntu), dnf install pssh (Fedora); not the packages of Python's index",
}
MOST_HOSTS = 200
"""Of one pssh. It looks at all of its ssh in a signal handler, which each ssh that ends meanwhile calls within itself:
of a thousand that end at once more than Python nests (RecursionError)."""
_AT_ONCE = 8  # ssh clients that ask or end something here
_FILES, _FILES_OF_HOST = 512, 16  # pssh was seen to open nine for each host, the live streams have three
_RECONNECT_TIMEOUT_S = 2.0  # a stream that breaks is tried again within streams.LOST_S


@dataclass(kw_only=True)
class PsshConfig(ClusterConfig):
    """Hosts that may get their environment from here.

    Attributes:
        environment_from: lock (requirements.lock) or the path of another lock file, of which `doit sync` makes an
            environment on each host that runs then use; null: the hosts have one.
        wheelhouse: folder of wheels on this computer, from which it is made where hosts have no network.
    """

    launcher: str = "pssh"
    environment_from: str | None = None
    wheelhouse: str | None = None


class PsshLauncher(RemoteLauncher):
    """Needs pssh and ssh here, and on the hosts an ssh server and Python; no shared file system."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        for host in cluster.hosts:
            if why := unfit_name(host):
                raise UsageError(f"cluster.hosts: {host.label!r} {why}")
        if cluster.ssh_config and not Path(cluster.ssh_config).is_file():
            of_a_lab = Path(cluster.ssh_config).parent.name == ".lab"
            raise UsageError(
                f"cluster.ssh_config={cluster.ssh_config} does not exist" + (": no lab is up here" if of_a_lab else ""),
                hint="doit lab hosts=2" if of_a_lab else "cluster.ssh_config=null, which takes your own ~/.ssh/config",
            )
        program, ssh = process.find("pssh", "parallel-ssh"), process.find("ssh")
        if program is None or ssh is None:
            absent = "pssh (or parallel-ssh)" if program is None else "ssh"
            raise HostError(
                f"cluster.launcher=pssh needs the program {absent}, which is not in PATH={os.environ.get('PATH')}",
                hint=INSTALL.get(sys.platform, "install OpenSSH's client and pssh"),
            )
        process.allow_open_files(_FILES + _FILES_OF_HOST * cluster.nnodes)
        settings = cluster.settings
        self.environment = (
            environments.wanted(settings.environment_from, settings.wheelhouse) if settings is not None else None
        )
        self._pythons: dict[str, str] = {}  # host label → the interpreter of its environment
        self._pssh, self._ssh_program = program, ssh
        self._outputs: dict[str, Path] = {}  # host label → where pssh puts what it says just now
        prefix = leftovers.prefix("paceline")
        self._sockets = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # a socket's path has to be short
        self._shared = self._sharing = self._shared_connection()

    # ------------------------------------------------------------------------- reaching hosts
    def _shared_connection(self) -> dict[str, str]:
        """ssh options that let all later commands share the probe's connection to each host.

        A handshake costs 0.2 to 0.5 s, and many at once meet sshd's MaxStartups. Who configured shared
        connections himself keeps his: they may be the only way past a second factor.
        """

        hosts = {host.label: host for host in self.cluster.hosts}

        def told(label: str, more: Sequence[str]) -> tuple[str, str]:
            done = process.run([*self._ssh(hosts[label], {}), *more, "-G", "--", hosts[label].name])
            return done.stdout, done.stderr

        if shares_already([*hosts], told, at_once=_AT_ONCE):
            return {}
        return {"ControlMaster": "auto", "ControlPath": f"{self._sockets}/%C", "ControlPersist": "30"}

    def close(self) -> None:
        """End the shared connections."""

        def end(host: Host) -> None:
            with contextlib.suppress(PacelineError):  # a stuck one ends by itself: ControlPersist
                process.run([*self._ssh(host, self._shared), "-O", "exit", "--", host.name], timeout_s=5.0)

        if self._shared:
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

    def probe(
        self, pack: PackSource | None, modules: Sequence[str] = (), warm: Mapping[str, Any] | None = None
    ) -> list[NodeFacts]:
        self._sharing = self._shared
        if self.environment is not None and not self._pythons:
            self._pythons = environments.interpreters(self, self.environment)
        return super().probe(pack, modules, warm)

    def python_of(self, host: Host) -> str | None:
        """The interpreter that is asked for there; None: what is found."""
        return self._pythons.get(host.label, host.python)

    @property
    def _connect_s(self) -> float:
        """ssh's limit for a connection. Hosts that have answered answer quickly again, or the others would run on for
        long after one is lost."""
        first_s = self.cluster.connect_timeout_s
        return first_s if self.slow_s is None else min(first_s, max(_RECONNECT_TIMEOUT_S, self.slow_s))

    def _options(self) -> dict[str, str]:
        return {
            **self._sharing,
            "BatchMode": "yes",  # ask nothing: nobody could answer for many hosts at once
            "ConnectTimeout": str(max(1, round(self._connect_s))),
            "ServerAliveInterval": "1",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",  # forwarded ports of the user's config would collide
            "RemoteCommand": "none",  # one of the user's config can't be had beside ours
            "RequestTTY": "no",  # a terminal would echo what is sent, and change what comes back
            "LogLevel": "INFO",  # ssh says why it failed, and no more
        }

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """As a rule one pssh for all of them."""
        groups = self._groups(hosts)
        if len(groups) == 1:
            return self._pssh_run(stdin, groups[0], timeout_s)
        with contextlib.ExitStack() as stack:
            copies = [stack.enter_context(copy_of(stdin)) for _ in groups]
            pool = stack.enter_context(ThreadPoolExecutor(len(groups)))
            told = pool.map(self._pssh_run, copies, groups, repeat(timeout_s))
            return {label: output for outputs in told for label, output in outputs.items()}

    def _groups(self, hosts: Sequence[Host]) -> list[list[Host]]:
        """Those of each pssh: it has one command, and so one interpreter, and can't watch any number of hosts."""
        pythons = dict.fromkeys(map(self.python_of, hosts))
        alike = [[host for host in hosts if self.python_of(host) == python] for python in pythons]
        return [group[at : at + MOST_HOSTS] for group in alike for at in range(0, len(group), MOST_HOSTS)]

    def _pssh_run(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        with tempfile.TemporaryDirectory(prefix=leftovers.of_system("pssh")) as name:
            folder = Path(name)
            argv = self._pssh_argv(folder, "hosts", hosts, timeout_s, "-I")
            env = {key: value for key, value in os.environ.items() if not key.startswith("PSSH_")}
            try:
                fills = partial(fills_the_disk, folder / "out")
                done = process.run_apart(argv, stdin=stdin, env=env, timeout_s=timeout_s + 5, enough=fills)
            except PacelineError as error:
                return {host.label: Output(code=None, note=error.what) for host in hosts}
            report = done.stdout + done.stderr
            return {host.label: output_of(folder, pssh_name(host), report, timeout_s) for host in hosts}

    def _pssh_argv(self, folder: Path, listed: str, hosts: Sequence[Host], timeout_s: float, *more: str) -> list[str]:
        """The command that runs the agent on ``hosts`` (one group), which are ``listed`` in a file of that name, and
        whose answers come in files below ``folder``."""
        self._outputs |= {host.label: folder / "out" / pssh_name(host) for host in hosts}
        (folder / listed).write_text("".join(f"{pssh_name(host)}\n" for host in hosts), encoding="utf-8")
        argv = [self._pssh, "-h", str(folder / listed), "-p", str(len(hosts)), "-t", str(round(timeout_s))]
        argv += ["-o", str(folder / "out"), "-e", str(folder / "err"), *more]
        argv += [word for key, value in self._options().items() for word in ("-O", f"{key}={value}")]
        if self.cluster.ssh_config:
            argv += ["-x", f"-F {shlex.quote(self.cluster.ssh_config)}"]
        return [*argv, remote_command(self.python_of(hosts[0]))]

    def arrived(self, labels: Sequence[str]) -> dict[str, int]:
        told = {}
        for label in labels:
            with contextlib.suppress(OSError, KeyError):  # not there yet, or no longer
                told[label] = received_bytes(self._outputs[label].read_bytes(), self._tokens[label])
        return told

    def starting(self) -> str:
        """With what has arrived at each host, where one has told of anything yet."""
        arrived = self.arrived(self.transfer.hosts) if self.transfer is not None else {}
        if self.transfer is None or not any(arrived.values()):
            return "sending code and data to the hosts and starting torchrun there"
        return self.transfer.text(arrived, time.monotonic())

    def go_alone(self) -> None:
        self._sharing = {}  # what is stuck may be the shared connection; the next probe shares it again

    def stream_argv(self, host: Host) -> list[str]:
        return [*self._ssh(host, self._options()), "--", host.name, remote_command(self.python_of(host))]

    def remote_shell(self, host: Host) -> list[str]:
        options = self._options()
        if "ControlMaster" in options:  # one that became the shared connection would hold rsync's output open
            options["ControlMaster"] = "no"
        return self._ssh(host, options)

    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        from pipeline.cluster.launchers.ssh_errors import explain  # not before: as a rule nobody asks

        first = self.slow_s is None
        return explain(host, answer, self.cluster.ssh_config, connect_s=self._connect_s, is_setting=first)


def copy_of(file: IO[bytes]) -> IO[bytes]:
    """A temporary file with the same content, and a position of its own."""
    copy = tempfile.TemporaryFile(prefix="paceline-")  # noqa: SIM115  (whoever asks for it closes it)
    file.seek(0)
    shutil.copyfileobj(file, copy)
    return copy


def remote_command(python: str | None) -> str:
    """What the remote login shell is given."""
    return shlex.join(["exec", *agent_argv(python)])
