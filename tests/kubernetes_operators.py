"""What the operators make of a job of each kind: its pods, with the environment that they set."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One pod before it has a node. ``environ`` is the operator's part of its container's environment."""

    name: str
    labels: dict[str, str]
    container: Object
    environ: dict[str, str]


def pods_of(job: Object) -> list[Wanted]:
    """The pods of one job."""
    made = {"Job": _job, "JobSet": _jobset, "TrainJob": _trainjob, "PyTorchJob": _pytorchjob}
    return made[job["kind"]](job)


def _job(job: Object, name: str = "", spec: Object | None = None) -> list[Wanted]:
    name, spec = name or job["metadata"]["name"], spec or job["spec"]
    return [
        _pod(spec["template"], f"{name}-{number}-{secrets.token_hex(2)}", {"JOB_COMPLETION_INDEX": str(number)})
        for number in range(spec["completions"])
    ]


def _jobset(job: Object) -> list[Wanted]:
    (inner,) = job["spec"]["replicatedJobs"]
    return _job(job, f"{job['metadata']['name']}-{inner['name']}-0", inner["template"]["spec"])


def _trainjob(job: Object) -> list[Wanted]:
    """With the runtime torch-distributed: a container ``node``; image, command and environment are the trainer's."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    template = node["template"]["spec"]["template"]
    (patched,) = template["spec"]["containers"]
    assert patched["name"] == "node"
    assert not {"env", "command"} & patched.keys(), "a patch can't set these of the container node"
    container = {**patched, **{key: trainer[key] for key in ("image", "command", "env")}}
    own = {"metadata": template["metadata"], "spec": {"containers": [container]}}
    return [
        _pod(
            own,
            f"{name}-node-0-{number}-{secrets.token_hex(2)}",
            {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29500",
                "JOB_COMPLETION_INDEX": str(number),
            },
        )
        for number in range(trainer["numNodes"])
    ]


def _pytorchjob(job: Object) -> list[Wanted]:
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = [(kind, value) for kind, value in spec["pytorchReplicaSpecs"].items() for _ in range(value["replicas"])]
    nproc = int(spec["nprocPerNode"])
    made = []
    for number, (kind, value) in enumerate(replicas):
        environ = {
            "MASTER_ADDR": f"{name}-master-0",
            "MASTER_PORT": "23456",
            "RANK": str(number),
            "WORLD_SIZE": str(len(replicas) * nproc),
            "PET_NPROC_PER_NODE": str(nproc),
            "PET_NNODES": str(len(replicas)),
        }
        assert value["template"]["spec"]["containers"][0]["name"] == "pytorch", "the operator looks for this name"
        made.append(_pod(value["template"], f"{name}-{kind.lower()}-{max(0, number - 1)}", environ))
    return made


def _pod(template: Object, name: str, environ: dict[str, str]) -> Wanted:
    (container,) = template["spec"]["containers"]
    return Wanted(name=name, labels=dict(template["metadata"]["labels"]), container=container, environ=environ)
