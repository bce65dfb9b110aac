"""An attempt of which all but the script's own processes was killed: the same command runs nothing beside it."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, interrupt, running, wait_for_step
from tests.lab_fixture import require_lab
from tests.waiting import HANG_S, wait_until

STEPS = 30
SCRIPT = f"""
import ctypes, os, subprocess, sys, time, paceline
if "--hidden" in sys.argv:  # as setproctitle does: no variable is shown any more
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
if "--detaches" in sys.argv and not os.path.exists(sys.argv[1] + "/child"):
    code = "import os, sys, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
    code += "open(sys.argv[1], 'w').write(str(os.getpid()))\\ntime.sleep(600)"
    null, words = subprocess.DEVNULL, [sys.executable, "-c", code, sys.argv[1] + "/child"]
    subprocess.run(words, env={{}}, stdin=null, stdout=null, stderr=null, check=True)
is_first = "-1-" in os.environ["PACELINE_NODE"][13:]  # of attempt 1
for step in range(1, {STEPS} + 1):
    with open(sys.argv[1] + "/steps", "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    paceline.log(step, loss=1 / step)
    time.sleep(0.1)
time.sleep(600 * is_first)
"""
FAILS = """
import sys, paceline
paceline.log(1, loss=1)
sys.exit("no data")
"""
IN_CI = [pytest.mark.long, pytest.mark.ci]
ALONE = ["program.torchrun=false", "cluster.nproc_per_node=1", "tracking=none"]


def of_script(folder: Path, text: str, *words: str) -> Project:
    """A project with one script, which is told where its checkpoints lie."""
    (folder / "train.py").write_text(text)
    args = ",".join(["'{checkpoints}'", *words])
    return Project(folder, words=[f"program.script='{folder}/train.py'", f"program.args=[{args}]", *ALONE])


def processes(project: Project, child: subprocess.Popen[str]) -> tuple[list[psutil.Process], psutil.Process]:
    """All that a training on this computer consists of, and the script."""
    entry = json.loads(next(project.only_run().glob("attempts/1/agent-*/agent.json")).read_text())
    agent, controller = psutil.Process(entry["pid"]), psutil.Process(child.pid)
    (parent,) = [one for one in agent.children() if "trainers.script.start" in one.cmdline()]  # not what it adopted
    (script,) = parent.children()
    return [*controller.children(recursive=True), controller, agent, parent], script


def orphaned(project: Project) -> psutil.Process:
    """The script of a training, of which everything else was killed at once."""
    child = project.start("train")
    wait_for_step(project, 3, child)
    others, script = processes(project, child)
    for process in others:
        process.suspend()
    for process in others:
        process.kill()
    child.communicate(timeout=HANG_S)
    assert script.is_running()
    return script


def writers(project: Project) -> list[int]:
    """The process id of each step, in the order in which they were made."""
    return [*map(int, (project.only_run() / "checkpoints" / "steps").read_text().split())]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("words", [[], pytest.param(["--hidden"], marks=IN_CI)])
def test_an_orphaned_script_is_ended_before_the_next_attempt_writes(tmp_path: Path, words: list[str]) -> None:
    project = of_script(tmp_path, SCRIPT, *words)
    script = orphaned(project)
    done = project.doit("train")
    assert done.returncode == 0, done.stdout
    over = "attempt 1 is over on localhost: its agent is gone; what lives on of it is ended first: processes"
    assert f"{over} {script.pid}\n" in done.stdout
    steps = writers(project)
    first = steps.index(next(pid for pid in steps if pid != script.pid))
    assert (len(steps) - first, script.pid in steps[first:]) == (STEPS, False)
    assert not psutil.pid_exists(script.pid)


@pytest.mark.ci
@pytest.mark.long
def test_a_detached_child_that_nothing_proves_is_named_and_nothing_starts_beside_it(tmp_path: Path) -> None:
    project = of_script(tmp_path, SCRIPT, "--detaches")
    orphaned(project)
    child = psutil.Process(int((project.only_run() / "checkpoints" / "child").read_text()))
    try:
        for _ in range(2):  # the refusal doesn't forget it
            done = project.doit("train")
            assert done.returncode != 0
            assert f"process {child.pid} (" in done.stdout
            assert f"in its folder {project.only_run()}; nothing starts beside that" in done.stdout
            assert f"kill {child.pid}" in done.stdout
            assert len(set(writers(project))) == 1
        assert f"process {child.pid} (" in project.doit("stop").stdout
    finally:
        child.kill()
    done = project.doit("train")
    assert done.returncode == 0, done.stdout
    assert project.result()["state"] == "FINISHED"


@pytest.mark.ci
@pytest.mark.long
def test_the_next_call_says_how_the_attempt_before_ended(tmp_path: Path) -> None:
    project = of_script(tmp_path, FAILS)
    project.doit("train")
    over = "attempt 1 is over on localhost: rank 0 ended with exit code 1; it said last: no data\n"
    assert over in project.doit("train").stdout


@pytest.mark.ci
@pytest.mark.long
def test_the_next_call_says_that_the_attempt_before_was_interrupted(tmp_path: Path) -> None:
    project = of_script(tmp_path, SCRIPT)
    child = project.start("train")
    wait_for_step(project, 3, child)
    interrupt(child, signal.SIGINT)
    done = project.doit("train")
    assert "attempt 1 is over on localhost: it was stopped (Ctrl-C or doit stop)\n" in done.stdout


def test_the_killed_parent_of_a_script_that_runs_alone_is_named(tmp_path: Path) -> None:
    project = of_script(tmp_path, SCRIPT)
    child = project.start("train")
    wait_for_step(project, 3, child)
    processes(project, child)[0][-1].kill()
    said, _ = child.communicate(timeout=HANG_S)
    assert "the parent of the script (trainers.script.start) ended with signal 9 (SIGKILL)" in said
    assert "torchrun" not in said


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "ended"),
    [
        pytest.param("parent", ": the parent of the script (trainers.script.start) ended with signal 9", marks=IN_CI),
        pytest.param("torchrun", ": torchrun was ended by SIGKILL", marks=IN_CI),
        ("rank", ", rank 1: ended with signal 9 (SIGKILL)"),
    ],
)
def test_of_a_script_with_torchrun_the_killed_process_is_named(tmp_path: Path, killed: str, ended: str) -> None:
    project = of_script(tmp_path, SCRIPT)
    project.words[-3:] = ["cluster.nproc_per_node=2", "tracking=none"]
    child = project.start("train")
    wait_for_step(project, 3, child)
    (torchrun,) = processes(project, child)[0][-1].children()
    ranks = sorted(torchrun.children(), key=lambda one: one.environ()["RANK"])
    {"parent": torchrun.parent(), "torchrun": torchrun, "rank": ranks[1]}[killed].kill()
    said, _ = child.communicate(timeout=HANG_S)
    assert f"training failed on localhost{ended}" in said
    assert "often that is" not in said
    assert "SignalException" not in said, "how its children were ended afterwards is no cause"
    assert not running((torchrun, *ranks))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_what_runs_here_is_ended_before_the_same_run_starts_on_a_host(tmp_path: Path, lab: Lab) -> None:
    project = of_script(tmp_path, SCRIPT)
    child = project.start("train")
    wait_for_step(project, 3, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    here = set(writers(project))
    done = project.doit("train", "cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]")
    assert "attempt 1 was left on localhost: it is ended there" in done.stdout, done.stdout
    assert not any(psutil.pid_exists(pid) for pid in here)
    assert project.result()["attempts"] == 2


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_an_attempt_on_a_host_that_the_words_reach_at_another_address_is_ended_and_fetched(
    tmp_path: Path, lab: Lab
) -> None:
    ssh_config, text = tmp_path / "ssh_config", lab.ssh_config.read_text()
    hop = f"Host hop\n  HostName {lab.host('node0').address}\n  HostKeyAlias node0\n"
    other = (
        "Host other\n  HostName 127.0.0.1\n  ProxyJump hop\n  HostKeyAlias node0\nHost node0\n  HostName 192.0.2.1\n"
    )
    ssh_config.write_text(other + hop + text.replace("Host node0\n", "Host node0 other hop\n"))
    project = of_script(tmp_path, SCRIPT)
    child = project.start("train", "cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]")
    wait_for_step(project, 3, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    init = psutil.Process(lab.host("node0").init_pid or 0)
    (script,) = [one for one in init.children(recursive=True) if "-u" in one.cmdline()]
    done = project.doit("train", "cluster=pssh", f"cluster.ssh_config='{ssh_config}'", "cluster.hosts=[other]")
    assert done.returncode == 0, done.stdout
    assert "attempt 1 was started there" not in done.stdout, "it was reached there"
    assert not script.is_running()
    assert project.result()["attempts"] == 2
    (kept,) = project.only_run().glob("attempts/2/before/metrics.jsonl")
    assert [json.loads(row)["step"] for row in kept.read_text().splitlines()][:3] == [1, 2, 3]
    assert not [*project.only_run().glob("attempts/1/start-*.json")], "all that it had left is here"


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_an_attempt_that_came_to_this_computer_over_ssh_is_ended_by_a_local_start(tmp_path: Path) -> None:
    require_lab()
    with own_ssh_server(tmp_path) as ssh_config:
        project = of_script(tmp_path, SCRIPT)
        words = ("cluster=pssh", f"cluster.ssh_config='{ssh_config}'", "cluster.hosts=[here]")
        child = project.start("train", *words, f"cluster.workdir='{tmp_path}/work'")
        wait_for_step(project, 3, child)
        child.kill()
        child.communicate(timeout=HANG_S)
        done = project.doit("train")
    assert done.returncode == 0, done.stdout
    (ended,) = tmp_path.glob("work/runs/*/node0")
    assert (
        "here: attempt 1 was started there by cluster.launcher=pssh, and here is localhost: its processes are ended "
        f"before this one starts; files that only it has stay in {ended} and are not used\n"
    ) in done.stdout
    assert json.loads((ended / "agent" / "exit.json").read_text())["code"] != 0
    assert project.result()["attempts"] == 2


@contextmanager
def own_ssh_server(folder: Path) -> Iterator[Path]:
    """An ssh server of this computer alone; the ssh configuration that calls it ``here``."""
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    (folder / "known_hosts").write_text(f"here {(folder / 'host.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"Host here\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias here\n  IdentityFile {folder}/user\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n"
    )
    options = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none"}
    options |= {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no"}
    options["SetEnv"] = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    Path("/run/sshd").mkdir(exist_ok=True)
    program = str(shutil.which("sshd", path="/usr/sbin:/sbin"))
    with subprocess.Popen(
        [program, "-D", "-e", "-f", "/dev/null", *words], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            assert "listening" in server.stderr.readline()
            yield folder / "ssh_config"
        finally:
            server.terminate()


LOGS = """
import time, paceline
for step in range(1, 13):
    paceline.log(step, loss=1 / step)
    with open("own.jsonl", "a") as file:
        file.write(f'{{"step": {step}, "accuracy": {step / 12}}}\\n')
    with open("at", "a") as file:
        file.write("x")
    time.sleep(0.2)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_what_a_script_on_a_host_logged_while_its_parent_stood_still_is_kept(tmp_path: Path, lab: Lab) -> None:
    project = of_script(tmp_path, LOGS)
    hosts = ("cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]")
    child = project.start("train", *hosts)
    wait_for_step(project, 3, child)
    init = psutil.Process(lab.host("node0").init_pid or 0)
    (parent,) = [one for one in init.children(recursive=True) if "trainers.script.start" in one.cmdline()]
    (script,) = parent.children()
    parent.suspend()
    at = Path(f"/proc/{script.pid}/cwd/at")
    seen = at.stat().st_size
    wait_until(lambda: at.stat().st_size >= seen + 4)
    parent.kill()
    child.communicate(timeout=HANG_S)
    done = project.doit("train", *hosts)
    assert done.returncode == 0, done.stdout
    (kept,) = project.only_run().glob("attempts/*/before/metrics.jsonl")
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    for name in ("loss", "accuracy"):
        steps = [row["step"] for row in rows if name in row["metrics"]]
        assert steps[: seen + 4] == list(range(1, seen + 5)), "also what its parent had not recorded yet"
        assert len(steps) <= 12, "and nothing twice"
    assert len((project.only_run() / "metrics.jsonl").read_text().splitlines()) == 24
