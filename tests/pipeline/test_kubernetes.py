"""Kubernetes as data: manifests, and how the pods that they make begin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml  # type: ignore[import-untyped]

from pipeline.cluster import launchers
from pipeline.cluster.agent.running.job import JobNode
from pipeline.cluster.agent.schedulers import Kubernetes
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.kubernetes import manifest, yaml_of
from pipeline.cluster.launchers.kubernetes_api import KINDS, Object
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.execution.attempting import unfinished_attempt
from tests.agent_records import job_request
from tests.kubernetes_fixture import kubeconfig
from tests.kubernetes_operators import pods_of
from tests.pipeline.test_build import configured
from tests.pipeline.test_planning import planned
from trainers.core.config import ConfigError

if TYPE_CHECKING:
    from pipeline.execution.run import Run

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = LAUNCHERS.settings("kubernetes")
NEEDED = {"image": "registry.local/torch:2.9", "pvc": "shared", "mount_path": "/shared"}
FULL: dict[str, Any] = {
    "cpu": "8",
    "memory": "64Gi",
    "shm_size": "8Gi",
    "env_from": ["wandb/API_TOKEN"],
    "service_account": "trainer",
    "node_selector": {"gpu": "a100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "registry_logins": ["registry"],
    "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
}


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getgid", lambda: 100)


def made_of(nnodes: int = 2, **change: Any) -> Object:
    """The manifest of nodes with four ranks each, in a folder that a shell could take apart."""
    settings = SETTINGS(**{**NEEDED, "nnodes": nnodes, "run_as_user": 1000, **change})
    hosts = tuple(Host(name=f"granted{number}", nproc_per_node=4) for number in range(nnodes))
    cluster = Cluster(launcher="kubernetes", hosts=hosts, settings=settings, device="cuda")
    return manifest(cluster, "0123456789ab", Path("/shared/it's a $(touch x) run"), "d4e5f6")


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_the_one_that_was_read_by_a_person(kind: str) -> None:
    made = made_of(kind=kind, **FULL)
    for words in (value for value in _lists(made) if value[:2] == ["sh", "-c"]):
        request = "/shared/it's a $$(touch x) run/kubernetes/d4e5f6/request"
        assert words[2:4] == ['exec "$$@" < "$$0"', request], "the API reads $(NAME)"
    shown = yaml.safe_load(yaml_of(made).replace("$$", "$"))
    for words in (value for value in _lists(shown) if value[:2] == ["sh", "-c"]):
        assert words[-1] == BOOTSTRAP
        words[-1] = "BOOTSTRAP"
    assert yaml_of(shown) == (GOLDEN / f"kubernetes_{kind}.yaml").read_text()


def _lists(value: Any) -> list[list[Any]]:
    """All lists in a document."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, list) else []), *(found for item in inner for found in _lists(item))]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), [("job", "IoK8sApiBatchV1Job"), ("trainjob", "TrainerV1alpha1TrainJob")])
@pytest.mark.parametrize("change", [{}, FULL], ids=["plain", "full"])
def test_a_manifest_has_only_fields_and_types_of_the_published_schemas(
    kind: str, model: str, change: dict[str, Any]
) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = made_of(kind=kind, **change)
    assert _same(getattr(models, model), made)


def _same(model: Any, value: Object) -> bool:
    """Whether nothing is lost on the way through the model, as a field that it doesn't know would be."""
    read = model.from_dict(json.loads(json.dumps(value)))
    kept: Object = read.to_dict()
    return kept == value


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_valid_dns_labels_also_those_of_the_pods(kind: str) -> None:
    made = made_of(nnodes=1000, kind=kind)
    names = [made["metadata"]["name"], *(pod.name for pod in pods_of(made))]
    assert len(names) == 1001
    assert max(map(len, names)) <= 60, "three more characters are the API's"
    assert all(name.replace("-", "a").isalnum() and name == name.lower() and name[0].isalpha() for name in names)


def test_a_run_whose_key_is_no_dns_label_has_a_name_all_the_same(tmp_path: Path) -> None:
    settings = SETTINGS(**{**NEEDED, "mount_path": "/", "run_as_user": 1000})
    cluster = Cluster(launcher="kubernetes", hosts=(Host(name="granted0"),), settings=settings)
    spec = AttemptSpec(run_dir=tmp_path, run_key="All_Reduce.2026-11-22-abcdef", attempt=1, trainer="x")
    made = yaml.safe_load(launchers.submission(cluster, spec))
    assert made["metadata"]["name"] == "paceline-reduce-2026-11-22-abcdef-<random>"
    assert made["metadata"]["labels"]["paceline/run"].startswith("2026-11-22-abcdef-")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_knows_its_number_by_what_its_operator_sets(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for pod in pods_of(made_of(kind=kind)):
        with monkeypatch.context() as environ:
            for name, value in {**pod.environ, "PACELINE_POD_NAME": pod.name}.items():
                environ.setenv(name, value)
            numbers.append(Kubernetes().who()[1])
    assert numbers == [0, 1]


def test_a_container_that_is_started_a_second_time_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PACELINE_POD_NAME": "a-1", "PET_NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    request = job_request(scheduler="kubernetes", folder=str(tmp_path))
    (tmp_path / "node-1").touch()
    assert JobNode(request).number == 1
    (tmp_path / "node-1").write_text("{}\n")
    with pytest.raises(SystemExit):
        JobNode(request)
    assert capsys.readouterr().err == (
        "paceline: a-1: this node of the job was started a second time, and is not taken up again\n"
    )


def test_a_pod_waits_for_others_as_long_as_its_controller_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PACELINE_POD_NAME": "a-0", "JOB_COMPLETION_INDEX": "0"}.items():
        monkeypatch.setenv(name, value)
    folder = JobFolder(tmp_path / "job", "job.yaml")
    folder.make("", job_request(), 1)
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 1.0
        if clock[0] < 100:
            os.utime(folder.path / "orders", (clock[0], clock[0]))

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    monkeypatch.setattr("pipeline.cluster.agent.running.job.time", fake)
    monkeypatch.setattr("pipeline.cluster.agent.wire.time", fake)
    assert list(JobNode(job_request(scheduler="kubernetes", folder=str(folder.path))).starts(5.0)) == []
    assert 103 <= clock[0] <= 105


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_the_pods_are_told_to_leave_though_the_api_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    (tmp_path / "config").write_text(kubeconfig("http://127.0.0.1:9"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    folder = JobFolder(tmp_path / "kubernetes" / "d4e5f6", "job.yaml")
    folder.make("", job_request(), 1)
    cluster = Cluster(launcher="kubernetes", hosts=(Host(name="granted0"),), settings=SETTINGS(**NEEDED))
    said = launchers.create(cluster).stop("0123456789ab", tmp_path)
    assert said["Kubernetes"].startswith("the cluster's API server http://127.0.0.1:9 can't be reached")
    assert folder.was_left()


@pytest.mark.parametrize("plan", [None, SimpleNamespace(nodes=())], ids=["queued", "started"])
def test_doit_attach_names_the_command_that_finds_a_job_again(
    monkeypatch: pytest.MonkeyPatch, plan: SimpleNamespace | None
) -> None:
    monkeypatch.setattr("pipeline.cluster.starts.unfinished_plan", lambda _: plan)
    cluster = Cluster(launcher="kubernetes", hosts=(), settings=SETTINGS(**NEEDED))
    run = SimpleNamespace(
        config=SimpleNamespace(cluster=cluster), folder=SimpleNamespace(path=None), key=SimpleNamespace(short="0f77")
    )
    with pytest.raises(UsageError, match="only doit train finds it again") as caught:
        unfinished_attempt(cast("Run", run))
    assert (caught.value.hint or "").startswith("the command that started it")


def test_root_is_asked_for_by_name() -> None:
    made = made_of(run_as_user=0)
    assert made["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "trainjobs"}, r"cluster\.kind='trainjobs' is not an option; did you mean trainjob\?"),
        ({"image": None}, r"cluster\.image is not set, and pods need it: a container image"),
        ({"pvc": None}, r"cluster\.pvc is not set"),
        ({"mount_path": "shared"}, r"cluster\.mount_path='shared' must be an absolute path"),
        (
            {"mount_path": "/shared/../etc"},
            r"mount_path='/shared/\.\./etc' must be an absolute path without a colon, \. and",
        ),
        ({"memory": "64 GB"}, r"cluster\.memory='64 GB' must be a quantity of Kubernetes"),
        ({"gpus": -1}, r"cluster\.gpus=-1 must be at least 0"),
        ({"run_as_user": 2**31}, r"cluster\.run_as_user=2147483648 must be a user's id"),
        ({"env_from": ["TOKEN=abc"]}, r"cluster\.env_from='TOKEN=abc' must be SECRET/NAME"),
    ],
)
def test_what_no_manifest_can_be_made_of_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SETTINGS(**{**NEEDED, **change})


@pytest.mark.slow
def test_all_that_no_manifest_can_be_made_of_is_told_at_once_and_before_the_user() -> None:
    with pytest.raises(UsageError) as caught:
        configured("cluster=kubernetes", "cluster.image=torch", "cluster.pvc=shared", "cluster.memory='64 GB'")
    fields = [line.partition(" must ")[0] for line in str(caught.value).splitlines()]
    assert fields == [
        "cluster.mount_path is not set, and pods need it: where that volume is mounted, here and in the pods",
        "cluster.memory='64 GB'",
    ]


WORDS = ("cluster=kubernetes", "cluster.image=torch", "cluster.pvc=shared", "cluster.run_as_user=1000")


@pytest.mark.slow
def test_a_plan_shows_the_manifest_before_the_commands_of_nodes_without_names(tmp_path: Path) -> None:
    plan = planned(tmp_path, *WORDS, f"cluster.mount_path={tmp_path}", "cluster.nnodes=2", "cluster.kind=trainjob")
    shown = yaml.safe_load(plan.launch.submission)
    assert (shown["kind"], shown["spec"]["trainer"]["numNodes"]) == ("TrainJob", 2)
    assert [node.host for node in plan.launch.nodes] == ["granted0", "granted1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cluster.mount_path=/shared",), r"paths\.runs is .*, which is not on the volume that pods mount"),
        (
            ("cluster.mount_path=/", "cluster.env.API_TOKEN=abcdef123"),
            r"cluster\.env holds secrets \(API_TOKEN\).*cluster\.env_from=\[mine/API_TOKEN\]",
        ),
    ],
)
def test_what_pods_can_not_have_is_refused_in_the_plan(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(tmp_path, *WORDS, *words)


def test_a_pod_hides_the_values_that_it_has_from_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", 'xyzzy"0123')
    request = job_request(env_from=("API_TOKEN", "ABSENT"), masking_rules=(("form", "***"),))
    secrets = Kubernetes().secrets(request)
    assert secrets.env == {"API_TOKEN": 'xyzzy"0123'}
    assert {pattern for pattern, _ in secrets.masking_rules} == {'xyzzy"0123', 'xyzzy\\\\"0123', "xyzzy%220123", "form"}
