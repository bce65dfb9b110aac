"""What the cluster's API is given for one run, as data. Pure.

Both kinds run the same pod on each node: one agent, whose request comes from a file on the volume that all mount.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from pipeline.cluster.launchers.job_folder import REQUEST
from pipeline.cluster.launchers.payload import BOOTSTRAP
from trainers.contract import variables

if TYPE_CHECKING:
    from pipeline.cluster.launchers.kubernetes import KubernetesConfig

Manifest = dict[str, Any]
FOLDERS, MANIFEST = "kubernetes", "job.yaml"
"""Where in a run folder those of its jobs lie, and what holds the manifest there."""

RUN, JOB = "paceline/run", "paceline/job"
"""Labels: of a job, which run it is for; of its pods, the job's name."""

_KEPT_S = 3600  # a job that is over, for a look at its pods; TrainJobs have no such field
_GRACE_S = 60  # for a checkpoint, before SIGKILL
_WITH_REQUEST = 'exec "$@" < "$0"'


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One resource of the API that runs a number of pods to their end."""

    name: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


KINDS = {
    "job": Kind(name="Job", group="batch", version="v1", plural="jobs"),
    "trainjob": Kind(name="TrainJob", group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs"),
}
"""``cluster.kind=`` → the resource."""


@dataclass(frozen=True, kw_only=True)
class PodJob:
    """One job before it is created. ``folder`` is the one that it shares with the controller, ``gpus`` a node's;
    ``uid`` and ``gid`` are those of its processes."""

    name: str
    run: str
    folder: str
    python: str
    nnodes: int
    nproc_per_node: int
    gpus: int
    uid: int
    gid: int
    settings: KubernetesConfig


def manifest(job: PodJob) -> Manifest:
    """The whole object for ``cluster.kind``."""
    kind = KINDS[job.settings.kind]
    spec = {"job": _indexed_job, "trainjob": _trainjob}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": job.name, "labels": {**job.settings.labels, RUN: job.run}},
        "spec": spec[job.settings.kind](job),
    }


def text(value: Manifest) -> str:
    """As a person reads it, and kubectl."""
    written: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    return written


def _indexed_job(job: PodJob) -> Manifest:
    """One pod a node, which the API itself numbers. None is tried again alone: torchrun's others would wait for it."""
    return {
        "completionMode": "Indexed",
        "completions": job.nnodes,
        "parallelism": job.nnodes,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": _pod_template(job),
    }


def _trainjob(job: PodJob) -> Manifest:
    """The runtime's pod with our container in it, and what a trainer can't say as a patch of the runtime."""
    template = _pod_template(job)
    pod = template["spec"]
    (container,) = pod["containers"]
    trainer = {
        "image": container["image"],
        "numNodes": job.nnodes,
        "numProcPerNode": job.nproc_per_node,
        "command": container["command"],
        "env": container["env"],
        **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
    }
    patch = {
        "metadata": template["metadata"],
        "spec": {
            **{name: pod[name] for name in _PATCHED if name in pod},
            "containers": [{name: container[name] for name in ("name", "volumeMounts", "securityContext")}],
        },
    }
    jobs = [{"name": "node", "template": {"spec": {"template": patch}}}]
    return {
        "runtimeRef": {"name": job.settings.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "paceline/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        ],
    }


_PATCHED = (
    *("serviceAccountName", "nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "volumes"),
    "terminationGracePeriodSeconds",
)
"""What a TrainJob may change of its runtime's pods."""


def _pod_template(job: PodJob) -> Manifest:
    settings = job.settings
    chosen = {
        "serviceAccountName": settings.service_account,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(item) for item in settings.tolerations],
        "imagePullSecrets": [{"name": name} for name in settings.registry_logins],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # nothing in the pod speaks to the API
        "terminationGracePeriodSeconds": _GRACE_S,
        **{name: value for name, value in chosen.items() if value},
        "securityContext": {
            "runAsNonRoot": job.uid != 0,
            "runAsUser": job.uid,
            "runAsGroup": job.gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.pvc}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}},
        ],
        "containers": [_container(job)],
    }
    return {"metadata": {"labels": {JOB: job.name}}, "spec": spec}


def _container(job: PodJob) -> Manifest:
    settings = job.settings
    command = ["sh", "-c", _WITH_REQUEST, f"{job.folder}/{REQUEST}", job.python, "-E", "-c", BOOTSTRAP]
    limits = {
        "cpu": settings.cpu,
        "memory": settings.memory,
        settings.gpu_resource: str(job.gpus) if job.gpus else None,
    }
    said = {resource: value for resource, value in limits.items() if value is not None}
    return {
        "name": "node",
        "image": settings.image,
        "command": [word.replace("$", "$$") for word in command],  # the API writes $(NAME) out itself
        "env": _environment(settings),
        **({"resources": {"limits": said, "requests": said.copy()}} if said else {}),
        "volumeMounts": [
            {"name": "runs", "mountPath": settings.mount_path},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(settings: KubernetesConfig) -> list[Manifest]:
    """Who the pod is; a home and a user's name, which torch's caches want of a user that the image doesn't know;
    and what Secrets hold, by their names."""
    fields = {variables.POD_NAME: "metadata.name", variables.POD_IP: "status.podIP"}
    secrets = [place.partition("/") for place in settings.env_from]
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "paceline"},
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for secret, _, name in secrets),
    ]
