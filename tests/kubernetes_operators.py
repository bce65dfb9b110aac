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
    return {"Job": _job, "TrainJob": _trainjob}[job["kind"]](job)


def _job(job: Object) -> list[Wanted]:
    name, spec = job["metadata"]["name"], job["spec"]
    return [
        _pod(spec["template"], f"{name}-{number}-{secrets.token_hex(2)}", {"JOB_COMPLETION_INDEX": str(number)})
        for number in range(spec["completions"])
    ]


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


def _pod(template: Object, name: str, environ: dict[str, str]) -> Wanted:
    (container,) = template["spec"]["containers"]
    return Wanted(name=name, labels=dict(template["metadata"]["labels"]), container=container, environ=environ)
