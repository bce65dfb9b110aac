"""Slurm's commands: what they are asked, and what their answers mean for a run."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.agent.host.probe import facts
from pipeline.cluster.agent.requests import ProbeRequest
from pipeline.cluster.agent.schedulers import Slurm
from pipeline.cluster.events import Event, LogLine, NodeLost
from pipeline.cluster.launchers import LAUNCHERS, job_follower
from pipeline.cluster.launchers.base import GrantedJob, JobState, PackSource
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.job_follower import JobFollower
from pipeline.cluster.launchers.slurm import SlurmScheduler
from pipeline.cluster.launchers.slurm_job import (
    Queue,
    ShownJob,
    duration_s,
    job_id,
    meaning_of_wait,
    options_of,
    parse_job,
    refused,
    waiting,
    why_it_ended,
)
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from tests.agent_records import job_request
from tests.pipeline.test_launch_first_error import PLAN
from tests.waiting import HANG_S, wait_until
from trainers.contract.records import as_json

SETTINGS = LAUNCHERS.settings("slurm")


SHOWN = (
    "JobId=42 JobName=paceline-x UserId=me(1000) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} ExitCode=0:15 TimeLimit=00:10:00 PreemptTime={preempted} Partition=gpu NodeList=node[0-1] "
    "Command=/home/me/a b/job.sh"
)


CLUSTER = Cluster(launcher="slurm", hosts=(Host(name="node7"),), settings=SETTINGS())


def granted(folder: JobFolder) -> GrantedLauncher:
    """One that waits for job 42, with the Slurm that PATH names."""
    launcher = GrantedLauncher(SlurmScheduler(CLUSTER))
    launcher._job = launcher.scheduler._granted("42", folder)  # type: ignore[attr-defined]
    return launcher


def shown(state: str, reason: str = "None", restarts: int = 0, preempted: str = "None") -> ShownJob:
    """A job as scontrol prints it."""
    return parse_job("42", SHOWN.format(state=state, reason=reason, restarts=restarts, preempted=preempted))


def test_a_script_gives_sbatch_its_options_as_arguments_which_go_before_the_shells_variables() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --comment='a b' # c\n#SBATCH -p gpu\necho '#SBATCH --no'\n"
    assert options_of(text) == ["--nodes=2", "--comment=a b", "-p", "gpu"]


def test_the_number_of_a_job_is_found_below_what_a_sites_sbatch_greets_with() -> None:
    assert job_id("-----\n  Welcome to the cluster\n--> Verifying host (login1)...OK\n13;alpha\n") == "13"
    with pytest.raises(HostError, match="told no number of it: Welcome"):
        job_id("Welcome\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Queue]:
    """Slurm's commands, each a line for bash."""

    def make(**programs: str) -> Queue:
        for name in ("sbatch", "squeue", "scontrol", "scancel"):
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/bash\n{programs.get(name, '')}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        return Queue()

    return make


@pytest.mark.parametrize(
    "sbatch",
    [
        "echo 13",
        "echo '13;alpha'",
        "echo Submitted batch job 13",
        "echo 13; echo; echo 2027",
        "echo 13; exit 1",
        "echo it is 1 node",
    ],
)
def test_a_job_is_known_by_its_name_whatever_a_sites_own_sbatch_says(
    site: Callable[..., Queue], tmp_path: Path, sbatch: str
) -> None:
    queue = site(sbatch=sbatch, squeue="echo 12 paceline-xx; echo 13 paceline-x-1; echo 14 other")
    script = "#!/bin/bash\n#SBATCH --job-name=paceline-x-1\n"
    assert queue.submit(script, folder=str(tmp_path), output="out", environ={}) == "13"


def test_a_refusal_on_standard_output_is_told(site: Callable[..., Queue], tmp_path: Path) -> None:
    queue = site(sbatch="echo 'no budget left in 2027'; exit 1")
    with pytest.raises(HostError, match="Slurm refused the job: no budget left in 2027"):
        queue.submit("#SBATCH --job-name=paceline-x-1\n", folder=str(tmp_path), output="out", environ={})


@pytest.mark.parametrize(
    ("scontrol", "trouble"),
    [
        ("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1", "slurm_load_jobs error: Socket timed out"),
        ("echo Welcome", "Welcome"),
    ],
)
def test_a_slurm_that_does_not_tell_how_a_job_stands_ends_nothing_and_its_words_are_shown(
    site: Callable[..., Queue], tmp_path: Path, scontrol: str, trouble: str
) -> None:
    site(scontrol=scontrol)
    folder = JobFolder(tmp_path / "slurm" / "1", "job.sh")
    folder.make("", job_request(), 1)
    launcher = granted(folder)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        launcher._wait(lambda _: None, check)
    assert launcher.starting() == f"asking Slurm, which doesn't tell how job 42 stands: scontrol: {trouble}"
    assert launcher._poll().why_gone == ""


def test_the_nodes_are_told_to_leave_though_slurm_does_not_answer(site: Callable[..., Queue], tmp_path: Path) -> None:
    site(squeue="echo slurm_load_jobs error: Socket timed out >&2; exit 1")
    folder = JobFolder(tmp_path / "slurm" / "d4e5f6", "job.sh")
    folder.make("", job_request(), 1)
    cluster = Cluster(launcher="slurm", hosts=(Host(name="granted0"),), settings=SETTINGS())
    said = launchers.create(cluster).stop("0123456789ab", tmp_path)
    told = "its nodes were told through the run folder and end by themselves"
    assert said == {"Slurm": f"squeue: slurm_load_jobs error: Socket timed out; {told}"}
    assert folder.was_left()


def test_a_job_whose_folder_was_removed_while_it_waited_says_so(site: Callable[..., Queue], tmp_path: Path) -> None:
    site(scontrol="echo JobId=42 JobState=FAILED")
    launcher = granted(JobFolder(tmp_path / "slurm" / "1", "job.sh"))
    with pytest.raises(HostError, match=r"^job 42 found its folder .*/slurm/1 removed") as caught:
        launcher._wait(lambda _: None, lambda: None)
    assert caught.value.hint == "the same command begins anew"


def test_a_node_whose_secret_variables_stayed_behind_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert not any(Slurm().secrets(job_request()))
    with pytest.raises(SystemExit):
        Slurm().secrets(job_request(has_secrets=True))
    assert "node1: the ranks' secret variables did not come" in (said := capsys.readouterr().err)
    assert "--export=ALL takes it along" in said


def test_a_job_is_read_from_what_scontrol_prints() -> None:
    job = shown("PENDING", "Resources")
    assert job == ShownJob(
        id="42", state="PENDING", reason="Resources", partition="gpu", time_limit="00:10:00", nodes="node[0-1]"
    )
    assert not job.ended
    assert parse_job("42", "").ended
    said = " Comment=x JobState=FAILED Reason=TimeLimit WorkDir=/a Restarts=7"
    assert parse_job("42", SHOWN.format(state="RUNNING", reason="None", restarts=0, preempted="None") + said) == shown(
        "RUNNING"
    ), "a comment is no state"


def test_a_waiting_job_tells_its_reason_its_place_and_what_would_let_it_start() -> None:
    usual, never = shown("PENDING", "Resources"), shown("PENDING", "PartitionTimeLimit")
    assert waiting(usual, "place 3 of 12 in partition gpu") == "PENDING (Resources), place 3 of 12 in partition gpu"
    assert not meaning_of_wait(usual)
    assert meaning_of_wait(never)
    assert meaning_of_wait(shown("PENDING", "PartitionInactive"))
    assert meaning_of_wait(shown("PENDING", "DependencyNeverSatisfied"))
    assert waiting(never, "") == (
        "PENDING (PartitionTimeLimit), its time limit is more than the partition allows: cluster.time_limit="
    )


def test_a_refusal_is_slurms_own_word_and_what_helps() -> None:
    error = refused("sbatch: error: invalid partition specified: gpux\nsbatch: error: Batch job submission failed: X\n")
    assert error.what == "Slurm refused the job: invalid partition specified: gpux; Batch job submission failed: X"
    assert error.hint == "sinfo -s shows the partitions; cluster.partition=NAME"
    assert refused("sbatch: error: something new").hint is None
    down = refused("Batch job submission failed: Required partition not available (inactive or drain)")
    assert down.hint == "sinfo -s shows which partitions are up; cluster.partition=NAME"
    for said, field in (("Invalid generic resource (gres)", "gres"), ("Invalid feature specification", "constraint")):
        assert f"cluster.{field}=" in (refused(f"sbatch: error: {said}").hint or "")
    absent = refused("sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsbatch: fatal: X\n")
    assert absent.what.startswith("Slurm is not configured on this computer, so nothing was submitted: resolve_ctls")
    assert absent.hint is not None
    assert "SLURM_CONF=/path/to/slurm.conf" in absent.hint


OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=42.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("now", "output", "text", "hint", "cause"),
    [
        (shown("TIMEOUT"), [], "reached its time limit of 00:10:00", "cluster.time_limit=", ""),
        (shown("COMPLETING", "TimeLimit"), [], "reached its time limit", "the same command again", ""),
        (shown("OUT_OF_MEMORY"), [OOM], "out of memory", "cluster.mem=", "memory"),
        (shown("RUNNING"), [OOM], "Detected 1 oom_kill event", "cluster.mem=", "memory"),
        (shown("NODE_FAIL"), [], "lost a node (NODE_FAIL)", "sinfo -R", "host"),
        (shown("CANCELLED"), [], "was ended by Slurm: CANCELLED", "the same command", "cancelled"),
        (shown("RUNNING"), ["srun: error: node1: task 1: Killed"], "node1: task 1: Killed", "the same command", "host"),
        (shown("RUNNING"), [], "", "", ""),
    ],
)
def test_what_slurm_did_to_a_job_is_named_with_what_helps(
    now: ShownJob, output: list[str], text: str, hint: str, cause: str
) -> None:
    outcome = why_it_ended(0, now, output)
    assert text in outcome.text
    assert hint in (outcome.hint or "")
    assert (outcome.cause, outcome.again) == (cause, False)


@pytest.mark.parametrize(
    "now",
    [
        shown("RUNNING", preempted="2026-01-01T00:00:00"),
        shown("PENDING", "BeginTime", restarts=1),
        shown("RUNNING", restarts=1),
    ],
)
def test_a_job_that_slurm_has_put_back_into_the_queue_goes_on(now: ShownJob) -> None:
    outcome = why_it_ended(0, now, [])
    assert outcome.again
    assert "goes on" not in outcome.text
    assert "the run will start again there" in outcome.text


def test_a_preempted_job_that_slurm_does_not_requeue_is_replaced() -> None:
    outcome = why_it_ended(0, shown("PREEMPTED", preempted="2026-01-01T00:00:00"), [])
    assert outcome.again
    assert outcome.text.startswith(
        "job 42 was preempted by Slurm, which doesn't requeue it; another job takes its place"
    )


def test_a_data_pack_that_a_node_does_not_see_is_told_with_the_field(
    site: Callable[..., Queue], tmp_path: Path
) -> None:
    site()
    folder, pack = JobFolder(tmp_path / "slurm" / "1", "job.sh"), PackSource(path=Path("/data/digits"), digest="d")
    folder.make("", job_request(), 1)
    launcher = granted(folder)

    def report(pack_path: str | None) -> None:
        """What the agent's probe says, as of a node with an address on ib0."""
        found = facts(ProbeRequest(workdir="/tmp"))
        found = found._replace(address="10.0.0.2", interfaces={"10.0.0.2": "ib0"}, pack_path=pack_path)
        with (folder.path / "node-0").open("a") as file:
            file.write(json.dumps({"restart": 0, "now": 1.0, "facts": as_json(found)}) + "\n")

    report("/data/digits")
    (fact,) = launcher.probe(pack)
    assert (fact.host, fact.address, fact.interface) == ("node7", "10.0.0.2", "ib0")
    report(None)
    with pytest.raises(HostError, match="node7: the data pack /data/digits isn't there") as caught:
        launcher.probe(pack)
    assert (caught.value.hint or "").startswith("paths.data=")


def test_a_job_that_is_suspended_is_said_to_be_once(
    site: Callable[..., Queue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_follower, "_ASK_S", 0.1)
    site(scontrol=f"echo x >> {tmp_path}/asked; echo JobId=42 JobState=SUSPENDED")
    folder = JobFolder(tmp_path / "slurm" / "1", "job.sh")
    folder.make("", job_request(), len(PLAN.nodes))
    plan = dataclasses.replace(
        PLAN, nodes=tuple(dataclasses.replace(node, state_dir=str(tmp_path)) for node in PLAN.nodes)
    )
    heard: list[Event] = []
    follower = granted(folder).follow(plan, heard.append, metrics_at=0)
    asked = tmp_path / "asked"
    wait_until(lambda: asked.exists() and len(asked.read_text().splitlines()) >= 3)
    follower.close()
    text = "paceline: WARNING: job 42 is suspended by Slurm, and the run waits for it; scontrol resume 42 lets it go on"
    assert heard == [LogLine(host=plan.nodes[0].host, rank=None, text=text)]


def test_a_scheduler_that_hangs_keeps_neither_beats_nor_output_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_follower, "_ASK_S", 0.1)
    monkeypatch.setattr(job_follower, "BEAT_S", 0.1)
    asked, answers, heard = threading.Event(), threading.Event(), list[Event]()

    def gone() -> JobState:
        asked.set()
        answers.wait(HANG_S)
        return JobState(why_gone="was taken away")

    (node,) = (dataclasses.replace(node, state_dir=str(tmp_path)) for node in PLAN.nodes[:1])
    for name in ("log", "lease"):
        (tmp_path / name).touch()
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.make("", job_request(), 1)
    job = GrantedJob(id="1", title="job 1", show_command="", end_command="", folder=folder, nnodes=1)
    follower = JobFollower(dataclasses.replace(PLAN, nodes=(node,)), job, gone, heard.append)
    try:
        assert asked.wait(HANG_S)
        os.utime(tmp_path / "lease", (0, 0))
        (tmp_path / "log").write_text("0 | a step\n")
        wait_until(lambda: (tmp_path / "lease").stat().st_mtime > 0 and len(heard) == 1)
        answers.set()
        wait_until(lambda: len(heard) == 2)
    finally:
        answers.set()
        follower.close()
    assert heard == [LogLine(host=node.host, rank=0, text="a step"), NodeLost(host=node.host, reason="was taken away")]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 3600), ("1:30", 90), ("1:00:00", 3600), ("2-03", 183_600), ("2-03:04:05", 183_845), ("UNLIMITED", None)],
)
def test_slurms_times_are_minutes_unless_they_say_otherwise(text: str, seconds: int | None) -> None:
    assert duration_s(text) == seconds
