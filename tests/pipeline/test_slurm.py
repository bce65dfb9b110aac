"""Slurm as data: the script, node names, what its commands say, and the files between controller and nodes."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.agent import slurm_node
from pipeline.cluster.agent.job import JobNode
from pipeline.cluster.agent.nodelist import expand
from pipeline.cluster.launchers import LAUNCHERS, job_follow
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.job_follow import JobFollower
from pipeline.cluster.launchers.payload import BOOTSTRAP
from pipeline.cluster.launchers.slurm_job import BatchJob
from pipeline.cluster.launchers.slurm_queue import (
    JobState,
    Queue,
    job_id,
    options_of,
    parse_job,
    refused,
    stuck,
    waiting,
    why_it_ended,
)
from pipeline.cluster.launchers.slurm_script import Job, script
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Event, Host, LogLine, NodeFacts, NodeLost
from pipeline.execution import dry_run
from tests.pipeline.test_launch_first_error import PLAN
from tests.pipeline.test_planning import planned
from tests.waiting import HANG_S, wait_until
from trainers.core.config import ConfigError

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = LAUNCHERS.settings("slurm")


def job(**change: object) -> Job:
    """Two nodes with four ranks each, in a folder that a shell could take apart."""
    settings = SETTINGS(nnodes=2, **change)
    return Job(
        name="paceline-0123456789ab-1a2b3c-d4e5f6",
        folder="/home/me/it's a $(touch x) run",
        python="/opt/my python/bin/python",
        nnodes=2,
        nproc_per_node=4,
        gpus=4,
        settings=settings,
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {}),
        (
            "full",
            {
                "partition": "gpu",
                "account": "lab",
                "qos": "high",
                "constraint": "a100&nvlink",
                "gres": "gpu:a100:4",
                "cpus_per_task": 32,
                "mem": "64G",
                "time_limit": "2-00:00:00",
                "sbatch": ["--exclusive", "--mail-type=END"],
                "setup": ["module load cuda", "ulimit -n 65536"],
            },
        ),
    ],
)
def test_the_script_is_the_one_that_was_read_by_a_person(name: str, change: dict[str, object]) -> None:
    shown = script(job(**change)).replace(shlex.quote(BOOTSTRAP), "BOOTSTRAP")
    assert shown == (GOLDEN / f"slurm_{name}.sh").read_text()


@pytest.mark.slow
def test_a_plan_shows_the_script_before_the_commands_of_nodes_without_names(tmp_path: Path) -> None:
    trial = planned(tmp_path, "cluster=slurm", "cluster.nnodes=2", "cluster.partition=gpu")
    plan = trial.launch
    said = "granted0 to granted1 stand for the hosts that slurm will grant when the run asks for them\n#!/bin/bash\n"
    assert said in dry_run.text([trial])
    assert "\n#SBATCH --nodes=2\n" in plan.submission
    assert "\n#SBATCH --partition=gpu\n" in plan.submission
    assert [node.host for node in plan.nodes] == ["granted0", "granted1"]
    assert "--master-addr=<address of granted0>" in plan.nodes[1].argv


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": "a b"}, r"cluster\.partition='a b' can't stand in a line of sbatch"),
        ({"mem": "-5"}, r"cluster\.mem='-5' must be a size that sbatch knows"),
        ({"cpus_per_task": 0}, r"cluster\.cpus_per_task=0 must be null or a whole number from 1"),
        ({"time_limit": "3600"}, r"cluster\.time_limit='3600' must be minutes:seconds"),
        ({"sbatch": ["exclusive"]}, r"cluster\.sbatch: 'exclusive' is no option of sbatch"),
        ({"sbatch": ["--exclusive\nreboot"]}, r"cluster\.sbatch: '--exclusive\\nreboot' is no option of sbatch"),
        ({"sbatch": ["--comment=it's"]}, r"cluster\.sbatch: .* is not quoted as a shell would read it"),
        ({"sbatch": ["-N4"]}, r"'-N4' would make another job of it than the run needs; cluster\.nnodes="),
        ({"sbatch": ["--array 0-3"]}, r"'--array 0-3' would make another job .*; doit sweep"),
        ({"sbatch": ["--job-name=mine"]}, r"by its name the job is found again"),
        ({"sbatch": ["--job=mine"]}, r"by its name the job is found again"),
        ({"sbatch": ["--arr=0-3"]}, r"'--arr=0-3' would make another job .*; doit sweep"),
        ({"sbatch": ["--exclusive --array=0-3"]}, r"'--exclusive --array=0-3' is more than one option"),
        ({"sbatch": ["--comment=a job.sh"]}, r"'--comment=a job.sh' is more than one option; .*--comment='a b'"),
        ({"sbatch": ["--quiet"]}, r"then it doesn't tell the number of the job"),
        ({"setup": ["#SBATCH --array=0-3"]}, r"cluster\.setup: '#SBATCH --array=0-3' is an option of sbatch"),
    ],
)
def test_what_would_break_the_script_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SETTINGS(**change)


@pytest.mark.parametrize("option", ["-p gpu", "--partition gpu", "--comment='a b'", "--nodelist=n1", "--hold"])
def test_options_that_only_look_alike_are_passed_on(option: str) -> None:
    assert SETTINGS(sbatch=[option]).sbatch == [option]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node0", ["node0"]),
        ("node[001-003,007],gpu-a", ["node001", "node002", "node003", "node007", "gpu-a"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a[3],b[8-9]-ib", ["a3", "b8-ib", "b9-ib"]),
    ],
)
def test_node_names_are_written_out(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["node[1", "node]1[", "node[a-b]", "node[1-]"])
def test_node_names_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range of numbers|brackets"):
        expand(text)


SHOWN = (
    "JobId=42 JobName=paceline-x UserId=me(1000) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} ExitCode=0:15 TimeLimit=00:10:00 PreemptTime={preempted} Partition=gpu NodeList=node[0-1] "
    "Command=/home/me/a b/job.sh"
)


def shown(state: str, reason: str = "None", restarts: int = 0, preempted: str = "None") -> JobState:
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
    assert queue.submit(script, folder=str(tmp_path), output="out", secrets={}) == "13"


def test_a_refusal_on_standard_output_is_told(site: Callable[..., Queue], tmp_path: Path) -> None:
    queue = site(sbatch="echo 'no budget left in 2027'; exit 1")
    with pytest.raises(HostError, match="Slurm refused the job: no budget left in 2027"):
        queue.submit("#SBATCH --job-name=paceline-x-1\n", folder=str(tmp_path), output="out", secrets={})


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
    queue = site(scontrol=scontrol)
    assert queue.show("42") is None
    batch = BatchJob(queue, lambda _: "", name="paceline-x", run_dir=tmp_path, nnodes=1)
    batch.state = shown("PENDING")

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        batch.wait(lambda _: None, check)
    assert batch.doing == f"asking Slurm, which doesn't tell how job 42 stands: scontrol: {trouble}"


def test_the_nodes_are_told_to_leave_though_slurm_does_not_answer(site: Callable[..., Queue], tmp_path: Path) -> None:
    site(squeue="echo slurm_load_jobs error: Socket timed out >&2; exit 1")
    folder = JobFolder(tmp_path / "slurm" / "d4e5f6", "job.sh")
    folder.make("", {}, 1)
    cluster = Cluster(launcher="slurm", hosts=(Host(name="granted0"),), settings=SETTINGS())
    said = launchers.create(cluster).stop("0123456789ab", tmp_path)
    told = "its nodes were told through the run folder and end by themselves"
    assert said == {"Slurm": f"squeue: slurm_load_jobs error: Socket timed out; {told}"}
    assert folder.was_left()


def test_a_job_whose_folder_was_removed_while_it_waited_says_so(tmp_path: Path) -> None:
    queue: Any = SimpleNamespace(show=lambda _: shown("FAILED"))
    batch = BatchJob(queue, lambda _: "", name="paceline-x", run_dir=tmp_path, nnodes=1)
    batch.state, batch.folder = shown("PENDING"), JobFolder(tmp_path / "slurm" / "1", "job.sh")
    with pytest.raises(HostError, match=r"^job 42 found its folder .*/slurm/1 removed") as caught:
        batch.wait(lambda _: None, lambda: None)
    assert caught.value.hint == "the same command begins anew"


def test_a_node_whose_secret_variables_stayed_behind_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert slurm_node.secrets({"is_told": False}) == {}
    with pytest.raises(SystemExit):
        slurm_node.secrets({"is_told": True})
    assert "node1: the ranks' secret variables did not come" in (said := capsys.readouterr().err)
    assert "--export=ALL takes it along" in said


def test_a_job_is_read_from_what_scontrol_prints() -> None:
    found = shown("PENDING", "Resources")
    assert found == JobState(
        id="42",
        name="paceline-x",
        state="PENDING",
        reason="Resources",
        partition="gpu",
        time_limit="00:10:00",
        exit_code="0:15",
        nodes="node[0-1]",
    )
    assert not found.ended
    assert parse_job("42", "").ended
    said = " Comment=x JobState=FAILED Reason=TimeLimit WorkDir=/a Restarts=7"
    assert parse_job("42", SHOWN.format(state="RUNNING", reason="None", restarts=0, preempted="None") + said) == shown(
        "RUNNING"
    ), "a comment is no state"


def test_a_waiting_job_tells_its_reason_its_place_and_what_would_let_it_start() -> None:
    usual, never = shown("PENDING", "Resources"), shown("PENDING", "PartitionTimeLimit")
    assert waiting(usual, "place 3 of 12 in partition gpu") == "PENDING (Resources), place 3 of 12 in partition gpu"
    assert not stuck(usual)
    assert stuck(never)
    assert stuck(shown("PENDING", "PartitionInactive"))
    assert stuck(shown("PENDING", "DependencyNeverSatisfied"))
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
        (shown("COMPLETING", "TimeLimit"), [], "reached its time limit", "the same command continues", ""),
        (shown("OUT_OF_MEMORY"), [OOM], "out of memory", "cluster.mem=", "memory"),
        (shown("RUNNING"), [OOM], "Detected 1 oom_kill event", "cluster.mem=", "memory"),
        (shown("NODE_FAIL"), [], "lost a node (NODE_FAIL)", "sinfo -R", "host"),
        (shown("CANCELLED"), [], "was ended by Slurm: CANCELLED", "the same command", "cancelled"),
        (shown("RUNNING"), ["srun: error: node1: task 1: Killed"], "node1: task 1: Killed", "the same command", "host"),
        (shown("RUNNING"), [], "", "", ""),
    ],
)
def test_what_slurm_did_to_a_job_is_named_with_what_helps(
    now: JobState, output: list[str], text: str, hint: str, cause: str
) -> None:
    outcome = why_it_ended(shown("RUNNING"), now, output)
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
def test_a_job_that_slurm_has_put_back_into_the_queue_goes_on(now: JobState) -> None:
    outcome = why_it_ended(shown("RUNNING"), now, [])
    assert outcome.again
    assert "goes on" not in outcome.text
    assert "the run will go on from its last checkpoint" in outcome.text


def test_a_preempted_job_that_slurm_does_not_requeue_is_replaced() -> None:
    outcome = why_it_ended(shown("RUNNING"), shown("PREEMPTED", preempted="2026-01-01T00:00:00"), [])
    assert outcome.again
    assert outcome.text.startswith(
        "job 42 was preempted by Slurm, which doesn't requeue it; another job takes its place"
    )


def test_nodes_and_controller_speak_through_files_that_only_grow(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.make("#!/bin/bash\n", {"do": "job"}, 2)
    before = {path.name for path in folder.path.iterdir()}
    folder.order(restart=0, start={"run_id": "a-1"})
    assert not folder.is_idle(0, 2)
    assert folder.is_idle(1, 2), "another life of the job has nothing to do with it"
    for number in range(2):
        row = {"restart": 0, "now": 1.0, "facts": {"host": f"node{number}"}}
        end = {"restart": 0, "now": 2.0, "run_id": "a-1", "exit": {"code": 0}}
        with (folder.path / f"node-{number}").open("a") as file:
            file.write(f"{json.dumps(row)}\n{json.dumps(end)}\n" + '{"cut')
    assert [fact["host"] for fact in folder.facts(0, 2)] == ["node0", "node1"]
    assert folder.facts(1, 2) == []
    assert folder.is_idle(0, 2)
    folder.leave(restart=0)
    assert not folder.was_left()
    folder.leave()
    assert folder.was_left()
    assert {path.name for path in folder.path.iterdir()} == before
    assert folder.script == "#!/bin/bash\n"


def test_a_job_folder_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.leave()
    assert (folder.script, folder.facts(0, 1), folder.output()) == ("", [], [])
    assert not folder.path.exists()


def test_a_node_that_does_not_share_the_folder_of_runs_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(SystemExit):
        JobNode({"scheduler": "slurm_node", "folder": "/no/such/runs/0123456789ab/slurm/d4e5f6"})
    said = capsys.readouterr().err
    assert said.startswith("paceline: node1: /no/such/runs/0123456789ab/slurm/d4e5f6 isn't there; all nodes must share")
    assert "paths.runs" in said


class OneNode:
    """Stands for a job whose only node has told its facts."""

    def __init__(self, pack_path: str | None) -> None:
        self.pack_path = pack_path

    def facts(self) -> list[dict[str, object]]:
        """What the agent's probe tells."""
        names = [item.name for item in dataclasses.fields(NodeFacts)]
        told = dict.fromkeys(names, "") | {"address": "10.0.0.2", "extra": {"interfaces": {"10.0.0.2": "ib0"}}}
        return [{**told, "host": "node7", "pack_path": self.pack_path}]


def test_a_data_pack_that_a_node_does_not_see_is_told_with_the_field() -> None:
    cluster = Cluster(launcher="slurm", hosts=(Host(name="node7"),), settings=SETTINGS())
    launcher, pack = launchers.placing(cluster), PackSource(path=Path("/data/digits"), digest="d")
    vars(launcher)["_job"] = OneNode("/data/digits")
    (fact,) = launcher.probe(pack)
    assert (fact.host, fact.address, fact.interface) == ("node7", "10.0.0.2", "ib0")
    vars(launcher)["_job"] = OneNode(None)
    with pytest.raises(HostError, match="node7: the data pack /data/digits isn't there") as caught:
        launcher.probe(pack)
    assert (caught.value.hint or "").startswith("paths.data=")


def test_a_job_that_is_suspended_is_said_to_be_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_follow, "_ASK_S", 0.1)
    asked: list[str] = []

    def show(id_: str) -> JobState:
        asked.append(id_)
        return shown("SUSPENDED")

    queue: Any = SimpleNamespace(show=show)
    batch = BatchJob(queue, lambda _: "", name="paceline-x", run_dir=tmp_path, nnodes=1)
    batch.state = shown("RUNNING")
    plan = dataclasses.replace(
        PLAN, nodes=tuple(dataclasses.replace(node, state_dir=str(tmp_path)) for node in PLAN.nodes)
    )
    heard: list[Event] = []
    follower = JobFollower(plan, batch.folder, 0, lambda: batch.gone(0), heard.append, lambda: batch.standing)
    wait_until(lambda: len(asked) >= 3)
    follower.close()
    text = "paceline: WARNING: job 42 is suspended by Slurm, and the run waits for it; scontrol resume 42 lets it go on"
    assert heard == [LogLine(host=plan.nodes[0].host, rank=None, text=text)]


def test_a_scheduler_that_hangs_keeps_neither_beats_nor_output_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_follow, "_ASK_S", 0.1)
    monkeypatch.setattr(job_follow, "BEAT_S", 0.1)
    asked, answers, heard = threading.Event(), threading.Event(), list[Event]()

    def gone() -> str:
        asked.set()
        answers.wait(HANG_S)
        return "was taken away"

    (node,) = (dataclasses.replace(node, state_dir=str(tmp_path)) for node in PLAN.nodes[:1])
    for name in ("log", "lease"):
        (tmp_path / name).touch()
    folder = JobFolder(tmp_path / "job", "job.sh")
    folder.make("", {}, 1)
    follower = JobFollower(dataclasses.replace(PLAN, nodes=(node,)), folder, 0, gone, heard.append)
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
    assert heard == [
        LogLine(host=node.host, rank=0, text="a step"),
        NodeLost(host=node.host, reason="was taken away"),
    ]
