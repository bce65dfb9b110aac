"""What Kubernetes does to a run, and a run to Kubernetes: real agents in pods of the test's cluster."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import launchers, preflight
from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.kubernetes_api import KINDS, Api, UnansweredError
from pipeline.core.errors import HostError, Killed, TrainingError
from pipeline.core.processes.signals import Stop
from tests.contract.conftest import Bench, kubernetes_bench
from tests.contract.listening import listener
from tests.contract.stub import RUN_TO_END, SLEEP
from tests.integration.granted import WhenUp, run, settings
from tests.kubernetes_cluster import FakeCluster, RefusedError
from tests.kubernetes_fixture import kubeconfig

pytestmark = pytest.mark.lab


@pytest.fixture
def bench(kubernetes: FakeCluster, tmp_path: Path) -> Bench:
    return kubernetes_bench(kubernetes, tmp_path, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_runs_to_the_end_and_leaves_no_job(kubernetes: FakeCluster, bench: Bench, kind: str) -> None:
    stub = bench.stub(RUN_TO_END, stand_in=True)
    lines: list[LogLine] = []
    said = run(settings(bench, kind=kind), stub, lines)
    (made,) = kubernetes.made
    name = made["metadata"]["name"]
    assert said[0].startswith(
        f"{KINDS[kind].name} {name} was submitted; kubectl -n lab get pods -l paceline/job={name}"
    )
    assert said[1].startswith(f"pod0 is {name}-")
    assert " on machine1" in said[1]
    assert {(line.host, line.text) for line in lines} >= {("pod0", "hello from 0 of 2"), ("pod1", "hello from 1 of 2")}
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert kubernetes.jobs == {}
    assert bench.left(stub) == 0


def refusals(bench: Bench) -> HostError:
    """What an attempt is refused with, before anything runs."""
    with pytest.raises(HostError) as caught:
        run(bench, bench.stub(RUN_TO_END, stand_in=True))
    return caught.value


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ({"kind": "trainjob"},
         "the cluster doesn't know TrainJob (trainer.kubeflow.org/v1alpha1): its operator isn't installed there",
         "cluster.kind=job works on every cluster"),
        ({"namespace": "nowhere"}, 'the cluster has no such namespace: namespaces "nowhere" not found',
         "cluster.namespace=; kubectl get namespaces"),
        ({}, "the cluster's API refuses the manifest: spec.template.spec.containers[0].image: Required value",
         "cluster.image"),
    ],
)  # fmt: skip
def test_what_the_api_refuses_is_one_message_with_the_field(
    kubernetes: FakeCluster, bench: Bench, change: dict[str, str], what: str, hint: str
) -> None:
    kubernetes.groups.remove("trainer.kubeflow.org/v1alpha1")
    cause = {"field": "spec.template.spec.containers[0].image", "message": "Required value"}
    kubernetes.refusal = None if change else RefusedError(422, "Invalid", "Job is invalid", causes=[cause])
    error = refusals(settings(bench, **change))
    assert (error.what, error.hint) == (what, hint)


def test_no_configuration_another_context_and_a_silent_server_are_told(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refusals(settings(bench, context="tset"))
    assert f"cluster.context=tset is not in {os.environ['KUBECONFIG']}; did you mean test? valid: test" in error.what
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert refusals_again(bench).what == f"kubectl's configuration {path} isn't there, so no cluster is known"
    path.write_text("{")
    assert f"kubectl's configuration {path} can't be used" in refusals_again(bench).what
    path.write_text(kubeconfig("http://127.0.0.1:9"))
    error = refusals_again(bench)
    assert error.what.startswith("the cluster's API server http://127.0.0.1:9 can't be reached: ")
    assert "refused" in error.what


def test_a_login_program_of_the_configuration_that_fails_is_told_in_its_words(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    login, path = tmp_path / "login", tmp_path / "config"
    login.write_text("#!/bin/sh\necho run: cloud login >&2\nexit 1\n")
    login.chmod(0o755)
    user = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(login), "interactiveMode": "Never"}
    }
    path.write_text(kubeconfig("http://127.0.0.1:9", user))
    monkeypatch.setenv("KUBECONFIG", str(path))
    said = f"the login that kubectl's configuration {path} names failed: exec: process returned 1. run: cloud login"
    assert refusals_again(bench).what == said
    assert capfd.readouterr().err == ""


def test_a_token_with_a_line_break_is_told_and_not_shown(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config"
    path.write_text(kubeconfig("http://127.0.0.1:9", {"token": "hunter22\n"}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    error = refusals_again(bench)
    assert error.what.startswith(
        f"kubectl's configuration {path} has a token that no request can carry: it holds a line"
    )
    assert "hunter22" not in str(error)


def test_an_api_that_asks_for_patience_and_a_page_in_its_place_are_told_at_once_and_end_no_run(
    kubernetes: FakeCluster, bench: Bench, tmp_path: Path
) -> None:
    api = Api("job", context=None, namespace=None, connect_s=5.0)
    launcher = granted(bench)
    launcher._job = launcher.scheduler._granted("x", JobFolder(tmp_path, "job.yaml"))  # type: ignore[attr-defined]
    kubernetes.busy = 1
    with pytest.raises(UnansweredError, match=r"can't answer now \(503\)"):
        api.jobs("x")
    kubernetes.page = "<html>\n Please\x1b[31m log in"
    with pytest.raises(UnansweredError, match=r"doesn't answer as a cluster's API: <html> Please\\x1b\[31m log in"):
        api.jobs("x")
    with pytest.raises(UnansweredError):
        api.create({"metadata": {"name": "x"}})
    assert launcher._poll().why_gone == ""


def granted(bench: Bench) -> GrantedLauncher:
    launcher = launchers.create(bench.cluster)
    assert isinstance(launcher, GrantedLauncher)
    return launcher


def refusals_again(bench: Bench) -> HostError:
    """The same for a run folder that is laid out already."""
    with pytest.raises(HostError) as caught:
        granted(bench).scheduler.rehearse()
    return caught.value


def test_preflight_tells_what_can_be_told_without_a_job_and_makes_none(
    kubernetes: FakeCluster, bench: Bench, tmp_path: Path
) -> None:
    kubernetes.claims["claim"] = {"spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}}
    assert [check.seen for check in preflight.examine(bench.cluster).checks] == [
        "namespace lab would take such a Job",
        "cluster.pvc=claim: Bound, ReadWriteOnce; pods on several nodes can't share it, which takes ReadWriteMany",
        f"cluster.mount_path={tmp_path} is there and can be written",
    ]
    kubernetes.refusal = RefusedError(403, "Forbidden", "jobs.batch is forbidden")
    assert preflight_refuses(bench) == "the cluster's API refuses it: jobs.batch is forbidden"
    kubernetes.refusal = None
    assert preflight_refuses(settings(bench, pvc="other")) == "cluster.pvc=other is not in namespace lab"
    assert "/absent isn't there on this computer" in preflight_refuses(settings(bench, mount_path="/absent"))
    assert kubernetes.made == []


def preflight_refuses(bench: Bench) -> str:
    with pytest.raises(HostError) as caught:
        preflight.examine(bench.cluster)
    return caught.value.what


def test_an_interpreter_that_the_image_lacks_is_told_with_the_field(kubernetes: FakeCluster, bench: Bench) -> None:
    hosts = tuple(replace(host, python="/no/such/python") for host in bench.cluster.hosts)
    error = refusals(replace(bench, cluster=replace(bench.cluster, hosts=hosts)))
    assert "ended before the run began: pod paceline-" in error.what
    assert "/no/such/python: not found" in error.what
    assert error.hint == "cluster.python=<an interpreter that the image has>"
    assert kubernetes.jobs == {}


def test_a_pod_that_can_not_start_says_why_and_a_signal_deletes_the_job(kubernetes: FakeCluster, bench: Bench) -> None:
    kubernetes.unpulled = 'Back-off pulling image "image"'
    with bench.spawn(bench.stub(SLEEP, stand_in=True)) as attempt:
        assert attempt.stdout is not None
        said = attempt.stdout.readline() + attempt.stdout.readline()
        attempt.send_signal(signal.SIGINT)
        rest = attempt.stdout.read()
    assert 'on machine0: ImagePullBackOff: Back-off pulling image "image"; cluster.image=' in said
    assert "KILLED stopped by SIGINT" in rest
    assert len(kubernetes.made) == 1
    assert kubernetes.jobs == {}


RESUMED = """
print('up', flush=True)
if pathlib.Path('went-on').exists():
    finish(rank, run)
else:
    time.sleep(600)
"""


def test_an_evicted_pod_is_another_job_in_which_the_run_goes_on(kubernetes: FakeCluster, bench: Bench) -> None:
    stub = bench.stub(RESUMED, stand_in=True)

    def evict() -> None:
        (stub.run_dir / "went-on").touch()
        kubernetes.evict(next(name for name in kubernetes.pods if "-1-" in name))

    said = run(bench, stub, WhenUp(evict))
    told = next(text for text in said if "taken away" in text)
    assert re.match(r"pod1, pod paceline-\S+ on machine1, was taken away \(.+\); another job takes the place", told)
    assert len(kubernetes.made) == 2
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert kubernetes.jobs == {}
    assert bench.left(stub) == 0


def test_a_run_that_goes_on_in_another_job_can_still_be_stopped(kubernetes: FakeCluster, bench: Bench) -> None:
    stub, stop = bench.stub(RESUMED, stand_in=True), Stop()

    def evict() -> None:
        (stub.run_dir / "went-on").touch()
        kubernetes.evict(next(name for name in kubernetes.pods if "-1-" in name))

    def on_job(text: str) -> None:
        if "was submitted" in text and len(kubernetes.made) == 2:
            stop.request("SIGTERM")

    listening = listener(WhenUp(evict).append, on_notice=on_job)
    with pytest.raises(Killed, match="stopped by SIGTERM"):
        run_attempt(stub.spec(), closing(Hosts(bench.cluster)), listening, stop)
    assert len(kubernetes.made) == 2
    assert kubernetes.jobs == {}
    assert not (stub.run_dir / "checkpoints" / "final.pt").exists()


def test_a_pod_that_is_preempted_while_it_waits_for_others_leaves_and_another_job_is_made(
    kubernetes: FakeCluster, bench: Bench
) -> None:
    kubernetes.unschedulable = "0/3 nodes are available"
    evicted: list[str] = []
    said: list[str] = []

    def preempt() -> None:
        if not evicted and (told := list(folder.glob("kubernetes/*/node-0"))) and told[0].stat().st_size:
            kubernetes.unschedulable = ""
            evicted.extend(name for name in kubernetes.processes)
            kubernetes.evict(evicted[0], "PreemptionByScheduler", "for a critical pod")

    stub = bench.stub(RUN_TO_END, stand_in=True)
    folder = stub.run_dir
    granted(bench).grant(stub.spec(), (), said.append, preempt)
    assert re.fullmatch(r"pod \S+ on machine0 was taken away \(.+\); another job is created", said[1])
    assert "paceline: ended by SIGTERM" in kubernetes.log(evicted[0]), (
        "the first process of a container has to ask for it"
    )
    assert [job["metadata"]["name"] in evicted[0] for job in kubernetes.made] == [True, False]


@pytest.mark.ci
@pytest.mark.long
def test_an_api_that_is_busy_while_pods_are_waited_for_ends_nothing(kubernetes: FakeCluster, bench: Bench) -> None:
    def say(_: str) -> None:
        kubernetes.busy = 4

    named = granted(bench).grant(bench.stub(RUN_TO_END, stand_in=True).spec(), (), say, lambda: None)
    assert [host.name for host in named.hosts] == ["pod0", "pod1"]
    assert len(kubernetes.made) == 1


@pytest.mark.ci
@pytest.mark.long
def test_a_pod_without_memory_and_a_job_that_somebody_deleted_are_named(kubernetes: FakeCluster, bench: Bench) -> None:
    stub = bench.stub(SLEEP, stand_in=True)
    with pytest.raises(TrainingError, match=r"pod1, pod \S+ on machine1, was out of memory \(OOMKilled\)") as caught:
        run(bench, stub, WhenUp(lambda: kubernetes.kill(_second(kubernetes), "OOMKilled")))
    assert (caught.value.cause, (caught.value.hint or "").partition("=")[0]) == ("memory", "cluster.memory")
    with pytest.raises(TrainingError, match=r"Job paceline-\S+ was deleted"):
        run(bench, stub, WhenUp(lambda: kubernetes.delete(next(iter(kubernetes.jobs)))))
    assert bench.left(stub) == 0


def _second(kubernetes: FakeCluster) -> str:
    return next(name for name in kubernetes.pods if "-1-" in name)


FIRST_FAILS = """
if (run / 'again').exists():
    finish(rank, run)
elif rank == 0:
    while '"end": {' not in next(run.glob('kubernetes/*/node-1')).read_text():
        time.sleep(0.02)
    sys.exit('the first rank failed')
"""


def test_a_node_whose_part_ended_well_takes_part_in_the_next_start(kubernetes: FakeCluster, bench: Bench) -> None:
    stub = bench.stub(FIRST_FAILS, stand_in=True)
    with pytest.raises(TrainingError, match="the first rank failed"):
        run(bench, stub)
    (stub.run_dir / "again").touch()
    run(bench, stub)
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert kubernetes.jobs == {}


TOKEN = "xyzzy-0123456789"


def test_a_controller_that_was_killed_finds_its_job_again_and_no_file_holds_its_secrets(
    kubernetes: FakeCluster, bench: Bench
) -> None:
    kubernetes.secrets["mine"] = {"API_TOKEN": TOKEN}
    bench = settings(bench, env_from=["mine/API_TOKEN"])
    program = "print(os.environ['API_TOKEN'], flush=True); (run / f'is-{rank}').write_text(os.environ['API_TOKEN'][:5])"
    stub = bench.stub(program + RESUMED, stand_in=True)
    with bench.spawn(stub) as attempt:
        bench.see_both_up(attempt)
        os.kill(attempt.pid, signal.SIGKILL)
    (name,) = kubernetes.jobs
    (stub.run_dir / "went-on").touch()
    said = run(bench, stub)
    assert said[0] == f"Job {name} of this run is there already; going on with it"
    assert len(kubernetes.made) == 1
    assert TOKEN not in str(kubernetes.made)
    assert [(stub.run_dir / f"is-{rank}").read_text() for rank in (0, 1)] == [TOKEN[:5]] * 2
    files = [path for path in stub.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert any(b"***" in path.read_bytes() for path in files)
    assert bench.left(stub) == 0
