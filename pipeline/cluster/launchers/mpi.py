"""The launcher ``mpi``: hosts that Open MPI's mpirun reaches, in whatever way it is configured for at a site.

mpirun only starts the node agent on a host; torchrun and the ranks don't use MPI.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, ClassVar, cast

from pipeline.cluster.agent.requests import Access
from pipeline.cluster.launchers.base import AttemptSpec, Transport, refuse_missing_ssh_config
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.transport.answers import (
    Answer,
    Output,
    agent_error,
    interpreter_error,
    quoted,
    ssh_command,
    ssh_error,
)
from pipeline.cluster.launchers.transport.payload import agent_argv
from pipeline.core.errors import HostError, UsageError
from pipeline.core.files import temporary_prefix
from pipeline.core.processes import process
from pipeline.core.specs import Cluster, Host
from trainers.core.config import ConfigError

INSTALL = "apt install openmpi-bin (Debian, Ubuntu), dnf install openmpi (Fedora), or module load openmpi"
_TRIES = 3
_STARTS_S = 5.0  # for mpirun and its daemon on a busy host; on an idle one they take half a second
_ALLOWED_IN_NAME = re.compile(r"[\w.-]")
_PLAIN = re.compile(r"[\w./+-]+")  # mpirun splits ssh's arguments at spaces, so no path with one reaches ssh
_LATE = re.compile(  # errors of ssh; similar ones of mpirun's own connections end with an errno
    r"(?:Connection|Operation) timed out(?: during banner exchange)?(?! \()|Connection to \S+ port \d+ timed out"
)
_FRAME = re.compile(r"-{10,}\s*")  # the line above and below a message of mpirun
_MOST_LINES = 4  # that are shown of a framed message; general advice follows


@dataclass(kw_only=True)
class MpiConfig(ClusterConfig):
    """Settings of mpirun.

    Attributes:
        mpirun: further options of mpirun, such as [--prefix, /opt/openmpi].
        btl_tcp_if_include: network of mpirun's own connections: an interface that this computer and all hosts have, or
            a subnet such as 10.0.0.0/24; null: mpirun chooses.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(hostfile_of_mpi=True)

    launcher: str = "mpi"
    mpirun: list[str] = field(default_factory=list)
    btl_tcp_if_include: str | None = None

    def __post_init__(self) -> None:
        ClusterConfig.__post_init__(self)
        network = self.btl_tcp_if_include
        if network is not None and not re.fullmatch(r"[\w.:/@,-]+", network):
            raise ConfigError(
                f"cluster.btl_tcp_if_include={network!r} is neither an interface nor a subnet such as 10.0.0.0/24"
            )
        if self.mpirun and not self.mpirun[0].startswith("-"):
            raise ConfigError(
                f"cluster.mpirun: {self.mpirun[0]!r} is no option of mpirun; write [--prefix,/opt/openmpi]"
            )


def _settings(cluster: Cluster) -> MpiConfig:
    return cast("MpiConfig", cluster.settings)


def command(
    cluster: Cluster, host: Host, agent: Sequence[str], *, program: str, tmp: str, ssh_config: str | None
) -> list[str]:
    """Return the mpirun command that runs ``agent`` on ``host``, which gets mpirun's stdin. ``tmp``: its own folder."""
    argv = [program, "--host", host.name, "-n", "1", "--wdir", "/"]
    argv += ["--bind-to", "none"]  # else all ranks of the host would share the agent's one core
    argv += ["--mca", "orte_local_tmp_base", tmp]  # two mpiruns at once remove each other's folders in /tmp
    argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if ssh_config:
        timeout = f"ConnectTimeout={math.ceil(cluster.settings.connect_timeout_s)}"
        argv += ["--mca", "plm_rsh_args", f"-F {ssh_config} -o BatchMode=yes -o {timeout}"]
    if network := _settings(cluster).btl_tcp_if_include:
        argv += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
    return [*argv, *_settings(cluster).mpirun, *agent]


class MpiTransport(Transport):
    """Runs one mpirun for each host and request.

    A single mpirun for all hosts would end the processes on all of them when it loses one host. mpirun first starts a
    daemon on the host, so a connection takes longer than with ssh.
    """

    starts_s = _STARTS_S

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        _refuse_unfit_names(cluster)
        # ssh would tell a host its own address; without it the host takes that of its route to the others
        self.access = Access(host_names=tuple(host.name for host in cluster.hosts))
        refuse_missing_ssh_config(cluster)
        self._program = _find_open_mpi()
        self._folder = Path(tempfile.mkdtemp(prefix=temporary_prefix("paceline"), dir="/tmp"))  # a path without spaces
        self._ssh_config = self._without_spaces(cluster.ssh_config)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------- reaching hosts
    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec) -> str:
        """Return the command that reaches each host. Raises UsageError: mpirun can't take one of the hosts' names."""
        _refuse_unfit_names(cluster)
        shown = partial(command, cluster, program="mpirun", tmp="<a folder of its own>", ssh_config=cluster.ssh_config)
        return "".join(f"{shlex.join(shown(host, []))} <node agent of {host.label}>\n" for host in cluster.hosts)

    def stream_argv(self, host: Host) -> list[str]:
        tmp = tempfile.mkdtemp(dir=self._folder)
        agent = agent_argv(host.python)
        return command(self.cluster, host, agent, program=self._program, tmp=tmp, ssh_config=self._ssh_config)

    def _without_spaces(self, ssh_config: str | None) -> str | None:
        """Return a path of the file that mpirun passes to ssh unchanged: a link to it if its own path has spaces."""
        if ssh_config is None or _PLAIN.fullmatch(ssh_config):
            return ssh_config
        link = self._folder / "ssh_config"
        link.symlink_to(Path(ssh_config).absolute())
        return str(link)

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
            outputs = pool.map(lambda host: self._exchange_with(host, stdin, timeout_s), hosts)
            return {host.label: output for host, output in zip(hosts, outputs, strict=True)}

    def _exchange_with(self, host: Host, stdin: IO[bytes], timeout_s: float) -> Output:
        for _ in range(_TRIES):
            # opened again, because each of several readers needs a position of its own
            with Path(f"/proc/self/fd/{stdin.fileno()}").open("rb") as own_stdin:
                output = self.run_agent(host, own_stdin, timeout_s)
            if not lost_its_folder(output):
                break
        return output

    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        network = _settings(self.cluster).btl_tcp_if_include
        return explain(host, answer, ssh_config=self.cluster.ssh_config, network=network)


def _refuse_unfit_names(cluster: Cluster) -> None:
    for host in cluster.with_spares.hosts:
        if why := unfit_for_mpirun(host):
            field = "hosts" if host in cluster.hosts else "spares"
            raise UsageError(f"cluster.{field}: {host.label!r} {why}")


def unfit_for_mpirun(host: Host) -> str:
    """Return why mpirun can't take the host's name, as words that follow the name; '': it can."""
    if host.user or host.port:
        return "has a user or a port, which mpirun doesn't take: set User and Port for it in ~/.ssh/config"
    # other characters have a meaning in mpirun's --host: ^a is "not on a", +n0 "the first node"
    unfit = "-" if host.name.startswith("-") else _ALLOWED_IN_NAME.sub("", host.name)[:1]
    if unfit:
        return f"can't be a host of mpirun: it holds {unfit!r}; give it a name in ~/.ssh/config or /etc/hosts"
    return ""


def _find_open_mpi() -> str:
    """Return the path of Open MPI's mpirun. Raises HostError: there is none, or it is another MPI's."""
    program = process.find("mpirun")
    if program is None:
        raise HostError(
            f"cluster.launcher=mpi needs the program mpirun, which is not in PATH={os.environ.get('PATH')}",
            hint=INSTALL,
        )
    version = process.run([program, "--version"], timeout_s=20.0)
    if "(Open MPI)" not in version.stdout:
        first = (version.stdout + version.stderr).strip().partition("\n")[0]
        raise HostError(
            f"cluster.launcher=mpi needs Open MPI's mpirun; {program} --version says {first!r}", hint=INSTALL
        )
    return program


# ------------------------------------------------------------------------------- the meaning of its messages (pure)
def lost_its_folder(output: Output) -> bool:
    """Return True if another mpirun on the host removed their common folder in /tmp before the agent started."""
    return bool(output.code) and "session_dir" in output.stderr


def explain(host: Host, answer: Answer, *, ssh_config: str | None, network: str | None) -> tuple[str, str | None]:
    """Return why a host gave no answer, and the fix."""
    ssh, full_output = ssh_command(host, ssh_config), answer.output
    if answer.reported_error is not None:
        return agent_error(answer.reported_error, ssh)
    stdout = brief(full_output.stdout.decode(errors="replace")).encode()
    output = dataclasses.replace(full_output, stdout=stdout, stderr=brief(full_output.stderr))
    quotation = quoted(output, host.secrets.values())
    if output.code is None:
        slow = "cluster.connect_timeout_s= if it is only slow"
        return f"mpirun: {output.note}{quotation}", f"{ssh} true; {slow}"
    return (
        ssh_error(host, output, ssh_config)
        or interpreter_error(host, output, ssh)
        or _mpirun_error(output, ssh, network)
        or (f"mpirun ended with exit code {output.code} and no answer{quotation}", f"{ssh} true")
    )


def _mpirun_error(output: Output, ssh: str, network: str | None) -> tuple[str, str] | None:
    """Return (reason, fix) for a known message of mpirun in the output; None: there is none."""
    if late := _LATE.search(output.stderr):
        return f"unreachable: {late[0].strip()}", f"{ssh} true; cluster.connect_timeout_s= if it is only slow"
    text = output.stdout.decode(errors="replace") + output.stderr
    if absent := re.search(r"^.*?([\w./-]*(?:orted|prted)): .*(?:not found|No such file).*$", text, re.MULTILINE):
        return (
            f"Open MPI isn't there, or not on the PATH of its login: {absent[0].strip()}",
            f"{ssh}, then apt install openmpi-bin; or cluster.mpirun=[--prefix,/path/of/openmpi/there]",
        )
    if "None of the TCP networks specified" in text:
        return (
            f"it, or this computer, has nothing of cluster.btl_tcp_if_include={network}",
            "cluster.btl_tcp_if_include=<a subnet that this computer and all hosts have, such as 10.0.0.0/24>",
        )
    if "are already filled" in text or "not enough slots" in text:
        return (
            "it is none of the hosts that mpirun may use here (a batch job's, or those of openmpi-default-hostfile): "
            + " ".join(line for line in text.splitlines() if line.strip()),
            "hosts of the job, or a shell outside of it",
        )
    if "unable to complete a TCP connection" in text or "unable to reliably start" in text:
        return (
            "mpirun's daemon didn't come up there, or can't connect back to this computer, as it must over TCP at any "
            "port",
            f"no firewall between them, or cluster.btl_tcp_if_include=<their common subnet>; {ssh} orted --version",
        )
    return None


def brief(text: str) -> str:
    """Return mpirun's output without frame lines, and with at most ``_MOST_LINES`` lines of each framed message."""
    lines: list[str] = []
    more_lines: int | None = None  # how many more of a framed message are taken; None outside of a frame
    for line in text.splitlines():
        if _FRAME.fullmatch(line):
            more_lines = _MOST_LINES if more_lines is None else None
        elif more_lines is None:
            lines.append(line)
        elif more_lines and line.strip():
            lines.append(line)
            more_lines -= 1
    return "\n".join(lines)
