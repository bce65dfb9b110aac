"""What Slurm does to a run, and a run to Slurm: with its real daemons and two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.slurm_job import Queue
from pipeline.core.errors import HostError, TrainingError
from tests.contract.conftest import Bench, slurm_bench
from tests.contract.listening import listener
from tests.contract.stub import RUN_TO_END, SLEEP
from tests.integration.commands import Project, interrupt
from tests.integration.granted import WhenUp, run, settings
from tests.slurm_fixture import Slurm
from tests.waiting import wait_until

pytestmark = pytest.mark.lab


@pytest.fixture
def bench(slurm: Slurm, tmp_path: Path) -> Bench:
    return slurm_bench(slurm, tmp_path, {"OMP_NUM_THREADS": "1"})


def test_a_refused_job_is_told_with_slurms_own_words(bench: Bench) -> None:
    with pytest.raises(HostError, match="Slurm refused the job: invalid partition specified: nowhere") as caught:
        run(settings(bench, partition="nowhere"), bench.stub(RUN_TO_END, stand_in=True))
    assert caught.value.hint == "sinfo -s shows the partitions; cluster.partition=NAME"


def test_variables_of_the_persons_shell_make_no_other_job_and_hide_none(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    monkeypatch.setenv("SBATCH_PARTITION", "urgent")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-1")
    monkeypatch.setenv("SBATCH_WAIT", "1")
    monkeypatch.setenv("SQUEUE_STATES", "COMPLETED")
    monkeypatch.setenv("SCANCEL_STATE", "COMPLETED")
    script = "#!/bin/bash\n#SBATCH --job-name=paceline-x\n#SBATCH --partition=debug\nsleep 60\n"
    queue = Queue()
    job = queue.submit(script, folder=str(tmp_path), output=str(tmp_path / "out"), environ={})
    assert queue.own_jobs("paceline-x") == [(job, "paceline-x")]
    assert (shown := queue.show(job)) is not None
    assert shown.partition == "debug"
    queue.cancel(job)
    wait_until(lambda: slurm.jobs() == [])


def test_an_interpreter_that_the_nodes_lack_is_told_with_the_field(slurm: Slurm, bench: Bench) -> None:
    hosts = tuple(replace(host, python="/no/such/python") for host in bench.cluster.hosts)
    lacking = replace(bench, cluster=replace(bench.cluster, hosts=hosts))
    with pytest.raises(HostError) as caught:
        run(lacking, bench.stub(RUN_TO_END, stand_in=True))
    assert re.search(r"job \d+ ended before the run began: FAILED", caught.value.what)
    assert "/no/such/python: No such file or directory" in caught.value.what
    assert caught.value.hint == "cluster.python=<an interpreter that the nodes have>"
    assert slurm.jobs() == []


def test_a_job_that_can_never_start_says_so_and_a_signal_takes_it_out_of_the_queue(slurm: Slurm, bench: Bench) -> None:
    stub = bench.stub(SLEEP, stand_in=True)
    with settings(bench, time_limit="3:00:00").spawn(stub) as attempt:
        assert attempt.stdout is not None
        said = attempt.stdout.readline() + attempt.stdout.readline()
        attempt.send_signal(signal.SIGINT)
        rest = attempt.stdout.read()
    assert re.search(r"WARNING: job \d+ can't start as things are: PENDING \(Partition(TimeLimit|Config)\)", said)
    assert "KILLED stopped by SIGINT" in rest
    assert slurm.jobs() == []


@pytest.mark.ci
@pytest.mark.long
def test_a_job_whose_node_is_drained_says_so(slurm: Slurm, bench: Bench) -> None:
    slurm.run("scontrol", "update", "nodename=node1", "state=drain", "reason=a broken fan")
    try:
        with settings(bench).spawn(bench.stub(SLEEP, stand_in=True)) as attempt:
            assert attempt.stdout is not None
            said = attempt.stdout.readline() + attempt.stdout.readline()
            attempt.send_signal(signal.SIGINT)
            attempt.stdout.read()
    finally:
        slurm.run("scontrol", "update", "nodename=node1", "state=resume")
    # Slurm's scheduler looks first at what stands in the way of any job, later at this one's nodes
    reason = r"(ReqNodeNotAvail,_UnavailableNodes:node1|Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved\S*)"
    means = "a node that it needs is drained, down or reserved: sinfo -R says why"
    assert re.search(rf"WARNING: job \d+ can't start as things are: PENDING \({reason}\), .*{means}\n", said), said


RESUMED = """
print('up', flush=True)
done = pathlib.Path('went-on')
if done.exists():
    finish(rank, run)
else:
    time.sleep(600)
"""


@pytest.mark.long
def test_a_preempted_job_goes_on_in_the_same_job_when_slurm_grants_it_again(slurm: Slurm, bench: Bench) -> None:
    stub = bench.stub(RESUMED, stand_in=True)

    def preempt() -> None:
        (stub.run_dir / "went-on").touch()
        slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")

    said: list[str] = []

    def on_job(text: str) -> None:
        said.append(text)
        if "is there already" in text:  # Slurm itself waits two minutes before it tries again
            slurm.run("scontrol", "update", f"jobid={text.split()[1]}", "StartTime=now")

    run_attempt(stub.spec(), closing(Hosts(bench.cluster)), listener(WhenUp(preempt).append, on_notice=on_job))
    jobs = {re.findall(r"job (\d+)", text)[0] for text in said}
    assert len(jobs) == 1
    assert any("was preempted by Slurm and waits in the queue again" in text for text in said), said
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert len(list((stub.run_dir / "slurm").iterdir())) == 1


@pytest.mark.long
def test_a_preempted_job_that_may_not_be_requeued_is_replaced_by_another(slurm: Slurm, bench: Bench) -> None:
    stub, said = bench.stub(RESUMED, stand_in=True), list[str]()

    def preempt() -> None:
        (stub.run_dir / "went-on").touch()
        slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")

    hosts = Hosts(settings(bench, sbatch=["--no-requeue"]).cluster)
    run_attempt(stub.spec(), closing(hosts), listener(WhenUp(preempt).append, on_notice=said.append))
    assert len({re.findall(r"job (\d+) was submitted", text)[0] for text in said if "submitted" in text}) == 2
    assert any("was preempted by Slurm, which doesn't requeue it" in text for text in said), said
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()


FAILS_UNTIL = """
if (run / 'again').exists():
    finish(rank, run)
elif rank == 0:
    sys.exit('the first rank failed')
else:
    time.sleep(600)
"""


@pytest.mark.long
def test_an_attempt_after_a_failed_one_starts_in_the_same_job(slurm: Slurm, bench: Bench) -> None:
    stub = bench.stub(FAILS_UNTIL, stand_in=True)
    said: list[str] = []
    hosts, listening = Hosts(bench.cluster), listener(on_notice=said.append)
    for number in (1, 2):
        with pytest.raises(TrainingError, match="the first rank failed"):
            run_attempt(stub.spec(number), nullcontext(hosts), listening)
    (stub.run_dir / "again").touch()
    run_attempt(stub.spec(3), closing(hosts), listening)
    assert len({re.findall(r"job (\d+)", text)[0] for text in said}) == 1, said
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert bench.left(stub) == 0
    wait_until(lambda: not slurm.jobs())


TOKEN = "xyzzy-0123456789"


def test_a_controller_that_was_killed_finds_its_job_again_and_no_file_holds_its_secrets(
    slurm: Slurm, bench: Bench
) -> None:
    stub = bench.stub("(run / f'token-{rank}').write_text(os.environ['API_TOKEN'][:5])" + RESUMED, stand_in=True)
    hosts = tuple(
        replace(host, env={**host.env, "API_TOKEN": "***"}, secrets={"API_TOKEN": TOKEN})
        for host in bench.cluster.hosts
    )
    bench = replace(bench, cluster=replace(bench.cluster, hosts=hosts))
    with bench.spawn(stub) as attempt:
        assert attempt.stdout is not None
        while not attempt.stdout.readline().endswith("| up\n"):
            pass
        os.kill(attempt.pid, signal.SIGKILL)
    (first,) = slurm.jobs()
    (stub.run_dir / "went-on").touch()
    assert run(bench, stub) == [f"job {first} of this run is there already (RUNNING); going on with it"]
    assert bench.left(stub) == 0
    assert [(stub.run_dir / f"token-{rank}").read_text() for rank in (0, 1)] == [TOKEN[:5]] * 2
    files = [path for path in stub.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


@pytest.mark.long
def test_a_killed_agent_ends_the_job_on_all_nodes(slurm: Slurm, bench: Bench) -> None:
    stub = bench.stub(SLEEP, stand_in=True)

    def kill() -> None:
        found = subprocess.run(["pgrep", "-f", f"{sys.executable} -E -c import sys"], capture_output=True, text=True)
        mine = [int(pid) for pid in found.stdout.split() if _carries(int(pid), "SLURMD_NODENAME=node1")]
        os.kill(mine[0], signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"the node agent in job \d+ was ended") as caught:
        run(bench, stub, WhenUp(kill))
    assert re.search(r"srun: error: \w+: task 1: Killed", caught.value.what)
    assert caught.value.cause == "host"
    wait_until(lambda: not slurm.jobs())  # the ranks of its node end with cgroups, which these daemons do without


def _carries(pid: int, text: str) -> bool:
    try:
        return text.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@pytest.mark.long
def test_each_trial_of_a_sweep_is_a_job_and_a_killed_sweep_goes_on_in_them(slurm: Slurm, tmp_path: Path) -> None:
    python = f"cluster.python={sys.executable}"
    project = Project(tmp_path, words=["cluster=slurm", "cluster.device=cpu", "experiment=quickstart", python])
    words = ("sweep", "-v", "2", "seed=1,2", "sweep.slots=2", "trainer.epochs=60", "tracking=none")
    child = project.start(*words)
    wait_until(lambda: len(slurm.run("squeue", "--noheader", "--states=RUNNING").splitlines()) == 2)
    interrupt(child, signal.SIGKILL)
    before = set(slurm.jobs())
    again = project.doit(*words)
    assert again.returncode == 0, again.stdout
    taken_up = set(re.findall(r"job (\d+) of this run is there already", again.stdout))
    assert taken_up == before, again.stdout
    assert "2 of 2" in again.stdout
    hosts = {tuple(json.loads((folder / "provenance.json").read_text())["hosts"]) for folder in project.run_folders()}
    assert hosts <= {(name,) for name in slurm.nodes}
    wait_until(lambda: not slurm.jobs())  # Slurm completes the last one for a moment


def test_preflight_says_what_slurm_would_do_with_a_job_and_submits_none(slurm: Slurm, bench: Bench) -> None:
    (check,) = preflight.examine(bench.cluster).checks
    assert re.match(r"Slurm would take such a job: Job \d+ to start at .* in partition debug", check.seen)
    with pytest.raises(HostError, match="Slurm refused the job: invalid partition"):
        preflight.examine(settings(bench, partition="nowhere").cluster)
    (check,) = preflight.examine(settings(bench, partition="debug", time_limit="2:00:00").cluster).checks
    assert "cluster.time_limit=2:00:00 is more than the 01:00:00 of partition debug" in check.seen
    assert slurm.jobs() == []
    (partition,) = re.findall(r"in partition (\S+)", check.seen)
    slurm.run("scontrol", "update", f"partitionname={partition}", "state=down")
    try:
        with pytest.raises(
            HostError, match=rf"the state of partition {partition} is DOWN\n  try: scontrol update part"
        ):
            preflight.examine(bench.cluster)
    finally:
        slurm.run("scontrol", "update", f"partitionname={partition}", "state=up")
