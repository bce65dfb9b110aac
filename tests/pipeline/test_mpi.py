"""mpirun as data: its command line, its hostfiles, and what its messages mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.agent.node import address_towards
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.launchers.mpi import command, explain, lost_its_folder, unfit_for_mpirun
from pipeline.cluster.launchers.transport.answers import Answer, Output
from pipeline.config.cluster import parse_mpi
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from tests.pipeline.test_planning import planned
from trainers.core.config import ConfigError

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = LAUNCHERS.settings("mpi")
FRAMED = """ssh: connect to host node1 port 22: {why}
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes. Please check your PATH and LD_LIBRARY_PATH
  settings, or configure OMPI with --enable-orterun-prefix-by-default
--------------------------------------------------------------------------
after it
"""


@pytest.mark.parametrize("name", ["plain", "full"])
def test_the_command_is_the_one_that_was_read_by_a_person(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, is_full = Host(name="node1"), name == "full"
    settings = (
        SETTINGS(btl_tcp_if_include="10.0.0.0/24", mpirun=["--prefix", "/opt/openmpi"]) if is_full else SETTINGS()
    )
    monkeypatch.setattr("os.geteuid", lambda: 0 if is_full else 1000)
    words = command(
        Cluster(launcher="mpi", hosts=(host,), settings=settings),
        host,
        ["/bin/sh", "-c", "it's $(touch x)"],
        program="/opt/openmpi/bin/mpirun" if is_full else "mpirun",
        tmp="/tmp/paceline-1/2",
        ssh_config="/tmp/paceline-1/ssh_config" if is_full else None,
    )
    assert "\n".join(words) + "\n" == (GOLDEN / f"mpi_{name}.txt").read_text()


@pytest.mark.slow
def test_a_plan_shows_the_command_for_each_host_and_no_value_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb:1\n")
    hosts = f"cluster.hostfile={tmp_path / 'hosts'}"
    ssh = (f"cluster.ssh_config={tmp_path}/hosts", "cluster.connect_timeout_s=44.5")
    plan = planned(
        tmp_path, "cluster=mpi", hosts, *ssh, "+cluster.env.API_KEY=hunter22", "trainer.global_batch_size=48"
    ).launch
    commands = plan.submission.splitlines()
    assert [command.split()[:3] for command in commands] == [["mpirun", "--host", "a"], ["mpirun", "--host", "b"]]
    assert plan.submission.count("-o ConnectTimeout=45'") == 2, "ssh takes whole seconds"
    assert "hunter22" not in plan.submission
    assert [(node.nproc_per_node, node.first_rank) for node in plan.nodes] == [(2, 0), (1, 2)]


def test_a_plan_refuses_what_mpirun_would_take_for_another_host(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"cluster\.hosts: '\+n0' can't be a host of mpirun: it holds '\+'; give it a name in"
    ):
        planned(tmp_path, "cluster=mpi", "cluster.hosts=[{name: '+n0'}]")


def test_hostfiles_of_open_mpi_mpich_and_batch_systems() -> None:
    text = "# ours\nbig slots=4 max_slots=8\nsmall\nmpich:2\npbs\npbs\npbs\nmore slots=2\nmore slots=1\n"
    slots = {"big": 4, "small": None, "mpich": 2, "pbs": 3, "more": 3}
    assert {host.name: host.nproc_per_node for host in parse_mpi(text, "hosts")} == slots


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a slots=0", "hosts:1: slots='0' must be a whole number from 1"),
        ("a:0", "hosts:1: slots='0' must be a whole number from 1"),
        ("a:4 slots=2", "hosts:1: slots is given twice, 4 and 2"),
        ("a\x01", "hosts:1: 'a\\x01' is not a host name that ssh can be given: it holds '\\x01'"),
        ("a cores=4", "hosts:1: 'cores=4' is not understood; a line is host [slots=N]"),
        ("hosts: [a, b]", "hosts:1: 'hosts: [a, b]' is YAML, and a hostfile has one host in each line"),
        ("-x", "hosts:1: '-x' is not a host name that ssh can be given: it begins with '-'"),
        ("", "hosts names no host"),
    ],
)
def test_bad_lines_are_refused_with_file_line_and_value(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mpi(f"{line}\n", "hosts")
    assert caught.value.what.startswith(message)


@pytest.mark.parametrize("name", ["fd00::7", "a,b", "-a", "+n0", "^node0", "%s", "node*"])
def test_what_mpirun_would_split_or_take_for_an_option_is_no_host(name: str) -> None:
    assert unfit_for_mpirun(Host(name=name)).startswith("can't be a host of mpirun")
    assert unfit_for_mpirun(Host(name="a", port=2222)).startswith("has a user or a port, which mpirun doesn't take")
    assert unfit_for_mpirun(Host(name="a")) == ""


def test_a_host_that_nobody_reached_over_ssh_has_the_address_from_which_it_reaches_another() -> None:
    assert address_towards(["127.0.0.1", "127.0.0.2"]) == "127.0.0.1"
    assert address_towards(["127.0.0.1"]) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"btl_tcp_if_include": "eth0; id"}, r"cluster\.btl_tcp_if_include='eth0; id' is neither an interface nor"),
        ({"mpirun": ["prefix"]}, r"cluster\.mpirun: 'prefix' is no option of mpirun"),
    ],
)
def test_what_is_no_interface_and_no_option_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SETTINGS(**change)


@pytest.mark.parametrize(
    ("output", "what", "hint"),
    [
        (Output(stderr=FRAMED.format(why="No route to host"), code=1), r"unreachable: No route to host",
         "ssh -F cfg node1 true"),
        (Output(stderr="Connection timed out during banner exchange\n" + FRAMED.format(why="?"), code=1),
         r"unreachable: Connection timed out during banner exchange",
         "ssh -F cfg node1 true; cluster.connect_timeout_s="),
        (Output(stderr="recv() failed: Connection timed out (110)\nA process that was unable to reliably start"),
         r"mpirun's daemon didn't come up there", "no firewall"),
        (Output(stderr="bash: line 1: orted: command not found\n" + FRAMED.format(why="?"), code=127),
         r"Open MPI isn't there, or not on the PATH of its login: bash: line 1: orted: command not found",
         "apt install openmpi-bin"),
        (Output(stdout=b"-----------\nA process or daemon was unable to complete a TCP connection\n", code=1),
         r"mpirun's daemon didn't come up there, or can't connect back to this computer",
         "no firewall between them, or cluster.btl_tcp_if_include="),
        (Output(stderr="None of the TCP networks specified to be included", code=1),
         r".*or this computer, has nothing of cluster\.btl_tcp_if_include=ib0", "cluster.btl_tcp_if_include=<a subnet"),
        (Output(stderr="All nodes which are allocated for this job are already filled.", code=1),
         r"it is none of the hosts that mpirun may use here .*already filled", "hosts of the job"),
        (Output(code=None, note="it hadn't answered after 28 s"), r"mpirun: it hadn't answered after 28 s",
         "ssh -F cfg"),
        (Output(stderr="Permission denied (publickey).\n" + FRAMED.format(why="?"), code=1),
         r"Permission denied \(publickey\): no key", "ssh-copy-id"),
        (Output(stderr="[vm:1] recv() failed: Connection reset by peer (104) [sd = 22]\n"
         "paceline: no interpreter /no/such/python; PATH=/bin", code=127), r"no such interpreter there",
         "cluster.python"),
        (Output(stderr="what nobody has seen before", code=7),
         r"mpirun ended with exit code 7 and no answer; it said:\s+what nobody has seen before",
         "ssh -F cfg node1 true"),
    ],
)  # fmt: skip
def test_its_messages_in_words_with_what_mends_them(output: Output, what: str, hint: str) -> None:
    why, mend = explain(Host(name="node1"), Answer(value=None, output=output), ssh_config="cfg", network="ib0")
    assert re.match(what, why)
    assert hint in (mend or "")


def test_a_daemon_that_met_another_in_its_folder_is_told_from_an_answer() -> None:
    said = "[vm:1] ORTE_ERROR_LOG: Error in file ../../../orte/util/session_dir.c at line 346"
    assert lost_its_folder(Output(stderr=said, code=1))
    assert not lost_its_folder(Output(stderr=said, code=0))
    assert not lost_its_folder(Output(stderr="session ended", code=1))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, r"needs the program mpirun, which is not in PATH="),
        ("echo 'HYDRA build details:'", r"needs Open MPI's mpirun; \S+ --version says 'HYDRA build details:'"),
    ],
)
def test_an_mpirun_that_is_missing_or_another_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    if script is not None:
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match=said) as caught:
        launchers.create(Cluster(launcher="mpi", hosts=(Host(name="a"),), settings=SETTINGS()))
    assert "apt install openmpi-bin" in (caught.value.hint or "")
