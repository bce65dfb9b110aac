"""What Kubernetes' API tells of pods, and what its refusals mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.cluster.launchers.kubernetes_api import (
    KINDS,
    Pod,
    UnansweredError,
    help_for,
    is_over,
    pod_of,
    refusal,
    waiting,
    why_it_ended,
)


# ------------------------------------------------------------------------------------------ what the API tells of pods
def told(name: str = "a-0", *, phase: str = "Running", gone: bool = False, **status: Any) -> Pod:
    """A pod as the API tells it."""
    meta = {"name": name, "uid": f"uid-{name}", **({"deletionTimestamp": "now"} if gone else {})}
    return pod_of({"metadata": meta, "spec": {"nodeName": "gpu7"}, "status": {"phase": phase, **status}})


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """The statuses of a container that has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"state": state}]}


def held(reason: str, message: str) -> dict[str, Any]:
    """The statuses of a pod whose container can't begin."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"state": state}]}


def unscheduled(message: str) -> dict[str, Any]:
    row = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [row]}


A1 = "pod a-1 on gpu7"
BUSY = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


@pytest.mark.parametrize(
    ("pods", "warnings", "words", "hint"),
    [
        ([told(), told("a-1", **unscheduled(BUSY))], [], f"1 of 2 pods run; {A1}: Unschedulable: {BUSY}", ""),
        ([told(**held("ImagePullBackOff", 'Back-off pulling image "torhc"'))], [],
         '0 of 2 pods run; pod a-0 on gpu7: ImagePullBackOff: Back-off pulling image "torhc"', "cluster.image="),
        ([told(**held("ContainerCreating", ""))], [], "0 of 2 pods run, 1 were made", ""),
        ([], ["FailedCreate: pods \"a-0\" is forbidden: exceeded quota: gpus"],
         '0 of 2 pods run, 0 were made: FailedCreate: pods "a-0" is forbidden: exceeded quota: gpus', "cluster.gpus="),
        ([told(**unscheduled('persistentvolumeclaim "x" not found'))], [], 'persistentvolumeclaim "x"', "cluster.pvc="),
        ([told(), told("a-1")], [], "all 2 pods run; their agents have not answered yet", ""),
    ],
)  # fmt: skip
def test_a_waiting_job_tells_why_and_what_would_let_it_start(
    pods: list[Pod], warnings: list[str], words: str, hint: str
) -> None:
    said = waiting(pods, 2, warnings)
    assert words in said
    assert hint in help_for(said)
    assert bool(hint) == bool(help_for(said))


PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "b"}


@pytest.mark.parametrize(
    ("now", "text", "cause", "again"),
    [
        ([told(), told("a-1")], "", "", False),
        ([told(gone=True), told("a-1", conditions=[PREEMPTED])],
         f"pod1, {A1}, was taken away (PreemptionByScheduler: b)", "", True),
        ([told()], f"pod1, {A1}, was taken away (it was deleted)", "", True),
        ([told(), told("a-1", phase="Failed", reason="Evicted", message="The node was low on resource: memory.")],
         "was taken away (Evicted: The node was low on resource: memory.)", "", True),
        ([told(gone=True, **ended(1)), told("a-1", **ended(137, "OOMKilled"))], f"pod1, {A1}, was out of memory",
         "memory", False),
        ([told(gone=True), told("a-1", **ended(1, message="x\npaceline: a-1: no"))],
         f"pod1, {A1}, ended with exit code 1 (Error): paceline: a-1: no", "host", False),
    ],
)  # fmt: skip
def test_what_became_of_pods_is_named_by_who_went_first(now: list[Pod], text: str, cause: str, again: bool) -> None:
    outcome = why_it_ended([told(), told("a-1")], now, {"a-0": "pod0", "a-1": "pod1"})
    assert text in outcome.text
    assert bool(text) == bool(outcome.text)
    assert (outcome.cause, outcome.again) == (cause, again)


@pytest.mark.parametrize(("condition", "over"), [("Complete", True), ("Failed", True), ("Suspended", False)])
def test_the_end_of_a_job_of_any_kind_is_known(condition: str, over: bool) -> None:
    row = {"type": condition, "status": "True"}
    assert is_over({"metadata": {}, "status": {"conditions": [row]}}) == over
    assert not is_over({"metadata": {}, "status": {"conditions": [{**row, "status": "False"}]}})


# ------------------------------------------------------------------------------------------------------- its refusals
def status(code: int, message: str, **details: Any) -> tuple[int, str]:
    return code, json.dumps({"kind": "Status", "code": code, "message": message, "details": details})


INVALID = [{"field": "spec.template.spec.containers[0].image", "message": "Required value"}]


@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        (status(401, "Unauthorized"), "doesn't know who this is (401)", "kubectl -n lab get pods"),
        (status(403, 'jobs.batch is forbidden: User "me" cannot create resource "jobs"', name="", kind="jobs"),
         'the cluster\'s API refuses it: jobs.batch is forbidden: User "me" cannot create resource "jobs"',
         "kubectl -n lab auth can-i create trainjobs.trainer.kubeflow.org"),
        (status(403, "exceeded quota: gpus"), "exceeded quota: gpus", "cluster.gpus="),
        (status(404, 'namespaces "x" not found', name="x", kind="namespaces"),
         'the cluster has no such namespace: namespaces "x" not found', "cluster.namespace="),
        ((404, "404 page not found\n"),
         "the cluster doesn't know TrainJob (trainer.kubeflow.org/v1alpha1): its operator isn't installed there",
         "cluster.kind=job works on every cluster"),
        (status(422, "Job is invalid", causes=INVALID),
         "refuses the manifest: spec.template.spec.containers[0].image: Required value", "cluster.image"),
        (status(400, 'strict decoding error: unknown field "spec.runtimePatches"'),
         'the TrainJob of this cluster is another version: strict decoding error: unknown field "spec.runtime',
         "cluster.kind=job works on every cluster"),
        ((503, ""), "the cluster's API can't answer now (503): Service Unavailable", ""),
        ((410, ""), "the cluster's API answers 410: Service Unavailable", ""),
    ],
)  # fmt: skip
def test_a_refusal_is_the_apis_own_word_and_what_helps(answer: tuple[int, str], what: str, hint: str) -> None:
    code, body = answer
    error = refusal(code, "Service Unavailable", body, KINDS["trainjob"], "kubectl -n lab")
    assert what in error.what
    assert hint in (error.hint or "")
    assert isinstance(error, UnansweredError) == (code == 503)
