"""Hosts that Kubernetes grants: the pods of one job, which mount the volume that holds the folder of runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml  # type: ignore[import-untyped]

from pipeline.cluster.agent.requests import JobRequest
from pipeline.cluster.agent.schedulers import POD_IP, POD_NAME
from pipeline.cluster.launchers.base import AttemptSpec, GrantedJob, JobState, Outcome, Scheduler
from pipeline.cluster.launchers.job_folder import REQUEST, JobFolder
from pipeline.cluster.launchers.kubernetes_api import JOB, KINDS, RUN, Api, Object, UnansweredError
from pipeline.cluster.launchers.kubernetes_job import claim_words, pod_of, state_of
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.errors import HostError, UsageError, suggestion
from pipeline.core.redact import rules
from pipeline.core.specs import Cluster
from pipeline.runs import journal
from trainers.core.config import ConfigError

_FORMS = {
    ("cpu", "memory", "shm_size"): (
        r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE])?",
        "a quantity of Kubernetes, such as 8, 500m or 64Gi",
    ),
    ("mount_path",): (
        r"(/+(?!\.{1,2}(/|$))[^/:\x00-\x1f\x7f]+)+/*|/",
        "an absolute path without a colon, . and .., such as /shared",
    ),
    ("env_from",): (
        r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z_]\w*",
        "SECRET/NAME, the name of a Secret and that of its key, which becomes the variable's",
    ),
}
"""Values that the API couldn't name the setting of, or that work here, too; it refuses others itself."""
_NEEDED = {
    "image": "a container image with Python and torch",
    "pvc": "the claim of the volume that holds paths.runs",
    "mount_path": "where that volume is mounted, here and in the pods",
}
_KINDS = ("job", "trainjob")
_LARGEST_ID = 2147483647
FOLDERS = "kubernetes"
"""The folder below a run's for those of its jobs."""


@dataclass(kw_only=True)
class KubernetesConfig(ClusterConfig):
    """Settings of the pods.

    Attributes:
        nnodes: how many pods a job has; each is one node.
        kind: job (works on every cluster), or trainjob (Kubeflow Trainer from 2.2 on).
        context: of kubectl's configuration; null: its current one, or inside of a cluster that cluster.
        namespace: where the job is made; null: the context's.
        image: the container image, with Python, torch and nothing of this project.
        pvc: the claim of a volume that all pods may write, and this computer too; it holds paths.runs and paths.data.
        mount_path: where the volume is mounted, in the pods and on this computer.
        cpu: cores of each pod, such as '8' or 500m; null: the namespace's default. So is memory.
        memory: of each pod, such as 64Gi.
        gpus: of each pod; null: one for each rank where cluster.device=cuda.
        gpu_resource: what the cluster calls a GPU.
        shm_size: of /dev/shm, which counts as memory of the pod.
        run_as_user: the user id of the ranks, which must be able to write in paths.runs; null: yours.
        env_from: secret variables of the ranks, as SECRET/NAME: the key NAME of a Secret of the namespace becomes NAME.
        service_account: of the pods; null: the namespace's default.
        node_selector: labels that a node must have.
        tolerations: as a pod has them, such as [{key: nvidia.com/gpu, operator: Exists}].
        registry_logins: names of Secrets with a registry's login.
        labels: of the job, such as {kueue.x-k8s.io/queue-name: gpus}.
        runtime: the ClusterTrainingRuntime of a trainjob.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, hosts_are_granted=True)

    launcher: str = "kubernetes"
    nnodes: int = 1
    kind: str = "job"
    context: str | None = None
    namespace: str | None = None
    image: str | None = None
    pvc: str | None = None
    mount_path: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    shm_size: str = "1Gi"
    run_as_user: int | None = None
    env_from: list[str] = field(default_factory=list)
    service_account: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    registry_logins: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    runtime: str = "torch-distributed"

    def __post_init__(self) -> None:
        ClusterConfig.__post_init__(self)
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Yield a line for each value that no manifest can hold: the value seen and the form that it must have."""
        if self.kind not in _KINDS:
            yield f"cluster.kind={self.kind!r} is not an option; {suggestion(self.kind, _KINDS)}"
        for name, what in _NEEDED.items():
            if not getattr(self, name):
                yield f"cluster.{name} is not set, and pods need it: {what}"
        for name, pattern, words in ((name, *form) for names, form in _FORMS.items() for name in names):
            value = getattr(self, name)
            for text in value if isinstance(value, list) else [value] if value else []:
                if not re.fullmatch(pattern, text, re.ASCII):
                    yield f"cluster.{name}={text!r} must be {words}"
        if self.gpus is not None and self.gpus < 0:
            yield f"cluster.gpus={self.gpus} must be at least 0"
        if self.run_as_user is not None and not 0 <= self.run_as_user <= _LARGEST_ID:
            yield f"cluster.run_as_user={self.run_as_user} must be a user's id from 0 to {_LARGEST_ID}"


# ------------------------------------------------------------------------------------------------ the manifest (pure)
_KEPT_S = 3600  # how long an ended job is kept, so that its pods can be examined; TrainJobs have no such field
_GRACE_S = 60  # for a checkpoint, before SIGKILL
_PATCHED = (
    *("serviceAccountName", "nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "volumes"),
    "terminationGracePeriodSeconds",
)
"""The fields of its runtime's pods that a TrainJob may change."""


def _settings(cluster: Cluster) -> KubernetesConfig:
    return cast("KubernetesConfig", cluster.settings)


def _mount_path(cluster: Cluster) -> str:
    return str(_settings(cluster).mount_path)  # the settings refuse null


def manifest(cluster: Cluster, run_key: str, run_dir: Path, nonce: str) -> Object:
    """Return the manifest of a run's job. Raises UsageError: pods can't work in this run folder, or as this user.

    Both kinds run the same pod on each node: one agent, with its request in a file on the volume that all mount.
    """
    settings = _settings(cluster)
    _refuse_elsewhere("paths.runs", run_dir, _mount_path(cluster))
    if names := sorted({name for one in cluster.hosts for name in one.secrets}):  # many users may read a manifest
        raise UsageError(
            f"cluster.env holds secrets ({', '.join(names)}), which pods get from a Secret of the namespace alone: "
            f"kubectl create secret generic mine --from-env-file=FILE, then cluster.env_from=[mine/{names[0]}]"
        )
    if settings.run_as_user is None and os.getuid() == 0:
        raise UsageError(
            "this command runs as root, and so would the pods, which most clusters refuse; "
            "cluster.run_as_user=<the id of a user who may write in paths.runs>, or 0 where root is allowed"
        )
    kind, name = KINDS[settings.kind], f"paceline-{_word(run_key)}-{nonce}"
    template = _pod_template(cluster, name, run_dir / FOLDERS / nonce)
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": name, "labels": {**settings.labels, RUN: _label(run_key, run_dir)}},
        "spec": _trainjob(cluster, template) if settings.kind == "trainjob" else _indexed_job(cluster.nnodes, template),
    }


def _indexed_job(nnodes: int, template: Object) -> Object:
    """Return one pod a node, numbered by the API. No pod is retried alone, as the others would wait for it."""
    return {
        "completionMode": "Indexed",
        "completions": nnodes,
        "parallelism": nnodes,
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": template,
    }


def _trainjob(cluster: Cluster, template: Object) -> Object:
    """Return the runtime's pod with our container in it, and a patch for what a trainer has no field for."""
    pod = template["spec"]
    (container,) = pod["containers"]
    trainer = {
        "image": container["image"],
        "numNodes": cluster.nnodes,
        "numProcPerNode": cluster.hosts[0].nproc_per_node,
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
        "runtimeRef": {"name": _settings(cluster).runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "paceline/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        ],
    }


def _pod_template(cluster: Cluster, name: str, folder: Path) -> Object:
    settings = _settings(cluster)
    uid = os.getuid() if settings.run_as_user is None else settings.run_as_user
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
        **{field_name: value for field_name, value in chosen.items() if value},
        "securityContext": {
            "runAsNonRoot": uid != 0,
            "runAsUser": uid,
            "runAsGroup": os.getgid(),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.pvc}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}},
        ],
        "containers": [_container(cluster, folder)],
    }
    return {"metadata": {"labels": {JOB: name}}, "spec": spec}


def _container(cluster: Cluster, folder: Path) -> Object:
    host, settings = cluster.hosts[0], _settings(cluster)
    agent = [host.python or "python3", "-E", "-c", BOOTSTRAP]
    command = ["sh", "-c", 'exec "$@" < "$0"', f"{folder}/{REQUEST}", *agent]
    gpus = settings.gpus
    if gpus is None:
        gpus = host.nproc_per_node if cluster.device == "cuda" else 0
    limits = {
        "cpu": settings.cpu,
        "memory": settings.memory,
        settings.gpu_resource: str(gpus) if gpus else None,
    }
    resources = {name: value for name, value in limits.items() if value is not None}
    return {
        "name": "node",
        "image": settings.image,
        "command": [word.replace("$", "$$") for word in command],  # the API expands $(NAME) itself
        "env": _environment(settings),
        **({"resources": {"limits": resources, "requests": resources.copy()}} if resources else {}),
        "volumeMounts": [{"name": "runs", "mountPath": settings.mount_path}, {"name": "shm", "mountPath": "/dev/shm"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(settings: KubernetesConfig) -> list[Object]:
    """Return who the pod is, a home and a user's name, and the variables that come from Secrets, by name.

    torch's caches need home and user name, which an unknown user id doesn't have.
    """
    fields = {POD_NAME: "metadata.name", POD_IP: "status.podIP"}
    secrets = [place.partition("/") for place in settings.env_from]
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "paceline"},
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for secret, _, name in secrets),
    ]


# ------------------------------------------------------------------------------------------------------ the scheduler
class KubernetesScheduler(Scheduler):
    """Creates jobs through the cluster's API. A job has one life: it ends when its pods are taken away."""

    name, agent, folder, script, node_name = "Kubernetes", "kubernetes", FOLDERS, "job.yaml", "pod"
    requeues = False
    end_s = 75.0  # a pod has 60 s for its end
    settle_s = 10.0  # from a node's last report until the API knows what ended it
    _api: Api | None = None

    @property
    def api(self) -> Api:
        """The API, connected on first use, because rendering needs no cluster. Raises HostError."""
        if self._api is None:
            settings, connect_s = _settings(self.cluster), self.cluster.settings.connect_timeout_s
            self._api = Api(settings.kind, context=settings.context, namespace=settings.namespace, connect_s=connect_s)
        return self._api

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        if spec.pack is not None:
            _refuse_elsewhere("paths.data", spec.pack.path, _mount_path(cluster))
        return yaml_of(manifest(cluster, spec.run_key, spec.run_dir, nonce))

    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: JobRequest) -> GrantedJob:
        made = manifest(cluster, spec.run_key, spec.run_dir, folder.path.name)
        env_from = tuple(place.rpartition("/")[2] for place in _settings(cluster).env_from)
        folder.make(yaml_of(made), request._replace(env_from=env_from, masking_rules=rules()), cluster.nnodes)
        self.api.create(made)
        return self._granted(made["metadata"]["name"], folder)

    def _granted(self, name: str, folder: JobFolder) -> GrantedJob:
        kind, kubectl = self.api.kind.name, self.api.kubectl
        return GrantedJob(
            id=name,
            title=f"{kind} {name}",
            show_command=f"{kubectl} get pods -l {JOB}={name}",
            end_command=f"{kubectl} delete {kind.lower()} {name}",
            folder=folder,
            nnodes=self.cluster.nnodes,
        )

    def jobs(self, run_key: str, run_dir: Path) -> list[GrantedJob]:
        """Return the jobs with the run's label, the newest first."""
        names = [job["metadata"]["name"] for job in reversed(self.api.jobs(_label(run_key, run_dir)))]
        folders = run_dir / FOLDERS
        return [self._granted(name, JobFolder(folders / name.rpartition("-")[2], self.script)) for name in names]

    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        try:
            value, pods = self.api.get(job.id), [pod_of(pod) for pod in self.api.pods(job.id)]
        except UnansweredError as error:
            return JobState(
                is_unanswered=True,
                words=f"waiting for {job.title}: {error.what}",
                remains=error.what,
                outcome=Outcome(text=error.what),
            )
        is_waited_for = not job.is_started and sum(pod.phase == "Running" for pod in pods) < job.nnodes
        warnings = self.api.warnings(job.id) if is_waited_for else []
        return state_of(job, value, pods, before, self.api, warnings)

    def cancel(self, job: GrantedJob) -> None:
        self.api.delete(job.id)

    def rehearse(self) -> list[str]:
        mount_path, kind, claim = _mount_path(self.cluster), self.api.kind, str(_settings(self.cluster).pvc)
        made = manifest(self.cluster, "preflight", Path(mount_path), "rehearsal")
        self.api.create(made, dry_run=True)
        if not os.access(mount_path, os.W_OK | os.X_OK):
            raise HostError(
                f"cluster.mount_path={mount_path} isn't there on this computer, or can't be written",
                hint="mount the volume there; this command and the pods speak through it",
            )
        return [
            f"namespace {self.api.namespace} would take such a {kind.name}",
            f"cluster.pvc={claim}: {claim_words(self.api.claim(claim), self.cluster.nnodes)}",
            f"cluster.mount_path={mount_path} is there and can be written",
        ]


def yaml_of(value: Object) -> str:
    """Return a manifest as a file that kubectl takes."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120))


def _label(run_key: str, run_dir: Path) -> str:
    """Return the label of all jobs of one run folder."""
    return _word(journal.attempt_prefix(run_key, run_dir))


def _word(text: str) -> str:
    """Return the end of a text in the API's characters; names of pods may have 63 letters, 39 of them after it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-24:].strip("-")


def _refuse_elsewhere(name: str, path: Path, mount_path: str) -> None:
    if not path.is_relative_to(mount_path):
        raise UsageError(
            f"{name} is {path}, which is not on the volume that pods mount at cluster.mount_path={mount_path}; "
            f"mount the volume there on this computer too, and set {name} to a folder below it"
        )
