"""Open MPI's mpirun: its command line as data, and what its messages mean. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cluster.launchers import login_errors
from pipeline.cluster.launchers.replies import Answer, Output
from pipeline.cluster.launchers.ssh_errors import of_ssh, ssh_words
from pipeline.core.specs import Host

_VERSION = re.compile(r"\(Open MPI\) (\d[\w.]*)")
_MPICH = re.compile(r"HYDRA|MPICH|Intel\(R\) MPI")
_LATE = re.compile(  # ssh's words; those of mpirun's own links end with an errno
    r"(?:Connection|Operation) timed out(?: during banner exchange)?(?! \()|Connection to \S+ port \d+ timed out"
)
_FRAME = re.compile(r"-{10,}\s*")
_MOST_LINES = 4  # of one of its framed messages: what follows is advice for every case there is


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """How mpirun is called: ``tmp`` is a folder that this call alone has, ``ssh_args`` are what its ssh gets besides,
    ``network`` is that of its own connections (an interface or a subnet, None: mpirun chooses), ``options`` are further
    ones."""

    program: str
    tmp: str
    as_root: bool
    ssh_args: Sequence[str] = ()
    network: str | None = None
    options: Sequence[str] = ()

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """The argv that runs ``agent`` once on ``host``. mpirun gives it to the host without a shell, and its stdin."""
        argv = [self.program, "--host", host.name, "-n", "1", "--wdir", "/"]
        argv += ["--bind-to", "none"]  # else all ranks of the host had the agent's one core
        argv += ["--mca", "orte_local_tmp_base", self.tmp]  # two mpiruns at once remove each other's folders in /tmp
        argv += ["--allow-run-as-root"] if self.as_root else []
        argv += ["--mca", "plm_rsh_args", " ".join(self.ssh_args)] if self.ssh_args else []
        if self.network:
            argv += ["--mca", "btl_tcp_if_include", self.network, "--mca", "oob_tcp_if_include", self.network]
        return [*argv, *self.options, *agent]


def refused(said: str) -> str:
    """Why this isn't the mpirun that is wanted, from what ``mpirun --version`` says; '': it is."""
    if _VERSION.search(said):
        return ""
    if _MPICH.search(said):
        return "is MPICH's, which ends when it has to pass on some megabytes of standard input (4.0.2 does)"
    first = said.strip().partition("\n")[0]
    return f"isn't Open MPI's: `mpirun --version` says {first!r}"


def began_beside_another(output: Output) -> bool:
    """Whether its daemon met another one of yours that was just leaving that host, with which it shares a folder in
    /tmp there: nothing was started, and the same again does better."""
    return bool(output.code) and "session_dir" in output.stderr


def explain(host: Host, answer: Answer, *, ssh_config: str | None, network: str | None) -> tuple[str, str | None]:
    """What is wrong with a host that didn't answer as asked, and what mends it."""
    ssh = ssh_words(host, ssh_config)
    if answer.told is not None:
        return login_errors.told(answer.told, ssh)
    output = _brief(answer.output)
    if output.code is None:
        slow = "cluster.connect_timeout_s= if it is only slow"
        return f"mpirun: {output.note}{_quoted(host, output)}", f"{ssh} true; {slow}"
    return (
        of_ssh(host, output, ssh_config)
        or login_errors.of_interpreter(host, output, ssh)
        or _of_slow_ssh(output, ssh)
        or _of_mpirun(output, ssh, network)
        or (f"mpirun ended with exit code {output.code} and no answer{_quoted(host, output)}", f"{ssh} true")
    )


def _of_slow_ssh(output: Output, ssh: str) -> tuple[str, str] | None:
    late = _LATE.search(output.stderr)
    return late and (f"unreachable: {late[0].strip()}", f"{ssh} true; cluster.connect_timeout_s= if it is only slow")


def _of_mpirun(output: Output, ssh: str, network: str | None) -> tuple[str, str] | None:
    said = output.stdout.decode(errors="replace") + output.stderr
    if absent := re.search(r"^.*?([\w./-]*(?:orted|prted)): .*(?:not found|No such file).*$", said, re.MULTILINE):
        return (
            f"Open MPI isn't there, or not on the PATH of its login: {absent[0].strip()}",
            f"{ssh}, then apt install openmpi-bin; or cluster.mpirun=[--prefix,/path/of/openmpi/there]",
        )
    if "None of the TCP networks specified" in said:
        return (
            f"it has nothing of cluster.btl_tcp_if_include={network}",
            "cluster.btl_tcp_if_include=<a subnet that this computer and all hosts have, such as 10.0.0.0/24>",
        )
    if "are already filled" in said or "not enough slots" in said:
        return (
            "it is none of the hosts that mpirun may use here (a batch job's, or those of openmpi-default-hostfile): "
            + " ".join(line for line in said.splitlines() if line.strip()),
            "hosts of the job, or a shell outside of it",
        )
    if "unable to complete a TCP connection" in said or "unable to reliably start" in said:
        return (
            "mpirun's daemon didn't come up there, or can't connect back to this computer, as it must over TCP at any "
            "port",
            f"no firewall between them, or cluster.btl_tcp_if_include=<their common subnet>; {ssh} orted --version",
        )
    return None


def _quoted(host: Host, output: Output) -> str:
    return login_errors.quoted(output, host.secrets.values())


def _brief(output: Output) -> Output:
    """The output with the beginnings of mpirun's framed messages."""
    return Output(
        stdout=brief(output.stdout.decode(errors="replace")).encode(),
        stderr=brief(output.stderr),
        code=output.code,
        note=output.note,
    )


def brief(text: str) -> str:
    """What mpirun says, without frames and without what follows the first lines in one."""
    lines: list[str] = []
    left: int | None = None  # of the lines of a frame; None outside
    for line in text.splitlines():
        if _FRAME.fullmatch(line):
            left = _MOST_LINES if left is None else None
        elif left is None:
            lines.append(line)
        elif left and line.strip():
            lines.append(line)
            left -= 1
    return "\n".join(lines)
