"""The launcher ``kubernetes``: hosts are the pods of one Job or TrainJob, which mount the volume with the run folders.

This module has the settings, the manifest, and the ``Scheduler``; ``kubernetes_api.py`` speaks to the cluster's API.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml  # type: ignore[import-untyped]

from pipeline.cluster.agent.requests import JobRequest
from pipeline.cluster.agent.schedulers import POD_IP, POD_NAME
from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import AttemptSpec, GrantedJob, JobState, Outcome, Scheduler
from pipeline.cluster.launchers.job_folder import REQUEST, JobFolder
from pipeline.cluster.launchers.kubernetes_api import (
    JOB,
    KINDS,
    RUN,
    Api,
    Object,
    Pod,
    UnansweredError,
    conditions,
    help_for,
    is_over,
    pod_of,
    waiting,
    why_it_ended,
)  # fmt: skip
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.errors import HostError, UsageError, suggestion
from pipeline.core.redact import rules
from pipeline.core.specs import Cluster
from pipeline.runs import journal
from trainers.core.config import ConfigError

# Settings → the form of their values, as a pattern and in words. Only values that the API would refuse without naming
# the setting, or that this launcher itself uses; the API checks the others.
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
_NEEDED = {
    "image": "a container image with Python and torch",
    "pvc": "the claim of the volume that holds paths.runs",
    "mount_path": "where that volume is mounted, here and in the pods",
}
_KINDS, _LARGEST_ID = ("job", "trainjob"), 2147483647
FOLDERS = "kubernetes"
"""The folder in a run folder that holds a folder for each job."""


@dataclass(kw_only=True)
class KubernetesConfig(ClusterConfig):
    """Settings of the pods.

    Attributes:
        nnodes: how many pods a job has; each is one node.
        kind: job (works on every cluster), or trainjob (Kubeflow Trainer from 2.2 on).
        context: of kubectl's configuration; null: its current one, or inside of a cluster that cluster.
        namespace: where the job is made; null: the context's.
        image: the container image, with Python and torch; nothing of this project needs to be in it.
        pvc: the claim of a volume that all pods may write, and this computer too; it holds paths.runs and paths.data.
        mount_path: where the volume is mounted, in the pods and on this computer.
        cpu: cores of each pod, such as '8' or 500m; null: the namespace's default.
        memory: of each pod, such as 64Gi; null: the namespace's default.
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
        if self.kind not in _KINDS:
            yield f"cluster.kind={self.kind!r} is not an option; {suggestion(self.kind, _KINDS)}"
        for name, what in _NEEDED.items():
            if not getattr(self, name):
                yield f"cluster.{name} is not set, and pods need it: {what}"
        for names, (pattern, form) in _FORMS.items():
            for name in names:
                setting = getattr(self, name)
                for value in setting if isinstance(setting, list) else [setting] if setting else []:
                    if not re.fullmatch(pattern, value, re.ASCII):
                        yield f"cluster.{name}={value!r} must be {form}"
        if self.gpus is not None and self.gpus < 0:
            yield f"cluster.gpus={self.gpus} must be at least 0"
        if self.run_as_user is not None and not 0 <= self.run_as_user <= _LARGEST_ID:
            yield f"cluster.run_as_user={self.run_as_user} must be a user's id from 0 to {_LARGEST_ID}"


# ------------------------------------------------------------------------------------------------ the manifest (pure)
_KEPT_S = 3600  # how long an ended job is kept, so that its pods can be examined; TrainJobs have no such field
_GRACE_S = 60  # for a checkpoint, before SIGKILL
_PATCHED = (  # the fields of its runtime's pods that a TrainJob may change
    *("serviceAccountName", "nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "volumes"),
    "terminationGracePeriodSeconds",
)


def _settings(cluster: Cluster) -> KubernetesConfig:
    return cast("KubernetesConfig", cluster.settings)


def manifest(cluster: Cluster, run_key: str, run_dir: Path, nonce: str) -> Object:
    """Return the manifest of a run's job. Raises UsageError: pods can't work in this run folder, or as this user."""
    settings = _settings(cluster)
    _refuse_elsewhere("paths.runs", run_dir, cluster)
    # many users of a cluster may read a manifest, so no secret may be in it
    if names := sorted({name for host in cluster.hosts for name in host.secrets}):
        raise UsageError(
            f"cluster.env holds secrets ({', '.join(names)}), which pods get from a Secret of the namespace alone: "
            f"kubectl create secret generic mine --from-env-file=FILE, then cluster.env_from=[mine/{names[0]}]"
        )
    if settings.run_as_user is None and os.getuid() == 0:
        raise UsageError(
            "this command runs as root, and so would the pods, which most clusters refuse; "
            "cluster.run_as_user=<the id of a user who may write in paths.runs>, or 0 where root is allowed"
        )
    kind, name = KINDS[settings.kind], f"paceline-{_name_part(run_key)}-{nonce}"
    template = _pod_template(cluster, name, run_dir / FOLDERS / nonce)
    # one pod a node, numbered by the API; no pod is retried alone (backoffLimit), as the others would wait for it
    count = {"completionMode": "Indexed", "completions": cluster.nnodes, "parallelism": cluster.nnodes}
    job = {**count, "backoffLimit": 0, "ttlSecondsAfterFinished": _KEPT_S, "template": template}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": name, "labels": {**settings.labels, RUN: _label(run_key, run_dir)}},
        "spec": _trainjob(cluster, template) if settings.kind == "trainjob" else job,
    }


def _trainjob(cluster: Cluster, template: Object) -> Object:
    """Return the ``spec`` of a TrainJob: our container in the pod of its runtime."""
    # a trainer has no field for some parts of the pod template; a patch of the runtime sets these
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
    """Return the template of a job's pods. ``name``: of the job. ``folder``: the job's folder on the volume."""
    settings = _settings(cluster)
    uid = os.getuid() if settings.run_as_user is None else settings.run_as_user
    optional_fields = {
        "serviceAccountName": settings.service_account,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(item) for item in settings.tolerations],
        "imagePullSecrets": [{"name": login} for login in settings.registry_logins],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # nothing in the pod speaks to the API
        "terminationGracePeriodSeconds": _GRACE_S,
        **{field_name: value for field_name, value in optional_fields.items() if value},
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
    default_gpus = host.nproc_per_node if cluster.device == "cuda" else 0
    gpus = default_gpus if settings.gpus is None else settings.gpus
    limits = {"cpu": settings.cpu, "memory": settings.memory, settings.gpu_resource: str(gpus) if gpus else None}
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
    """Return the variables of a pod: its name and address, HOME and USER for torch's caches, and those from Secrets."""
    fields = {POD_NAME: "metadata.name", POD_IP: "status.podIP"}
    secrets = [entry.partition("/") for entry in settings.env_from]
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "paceline"},
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for secret, _, name in secrets),
    ]


# ------------------------------------------------------------------------------------------------------ the scheduler
class KubernetesScheduler(Scheduler):
    """Creates jobs through the cluster's API. A job is never requeued: it ends when its pods are taken away."""

    name, agent, folder, script, node_prefix = "Kubernetes", "kubernetes", FOLDERS, "job.yaml", "pod"
    requeues = False
    end_s = 75.0  # a pod has _GRACE_S for its end
    settle_s = 10.0  # from a node's last report until the API knows what ended it

    @cached_property
    def api(self) -> Api:
        """The API, connected on first use, because rendering needs no cluster. Raises HostError."""
        settings, connect_s = _settings(self.cluster), self.cluster.settings.connect_timeout_s
        return Api(settings.kind, context=settings.context, namespace=settings.namespace, connect_s=connect_s)

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        if spec.pack is not None:
            _refuse_elsewhere("paths.data", spec.pack.path, cluster)
        return yaml_of(manifest(cluster, spec.run_key, spec.run_dir, nonce))

    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: JobRequest) -> GrantedJob:
        job = manifest(cluster, spec.run_key, spec.run_dir, folder.path.name)
        # Pods get secrets from the cluster; their agents mask the values of the variables with these names.
        env_from = tuple(entry.rpartition("/")[2] for entry in _settings(cluster).env_from)
        folder.make(yaml_of(job), request._replace(env_from=env_from, masking_rules=rules()), cluster.nnodes)
        self.api.create(job)
        return self._granted(job["metadata"]["name"], folder)

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
        names = [job["metadata"]["name"] for job in reversed(self.api.jobs(_label(run_key, run_dir)))]
        folders = run_dir / FOLDERS
        return [self._granted(name, JobFolder(folders / name.rpartition("-")[2], self.script)) for name in names]

    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        try:
            shown, pods = self.api.get(job.id), [pod_of(pod) for pod in self.api.pods(job.id)]
        except UnansweredError as error:
            words, outcome = f"waiting for {job.title}: {error.what}", Outcome(text=error.what)
            return JobState(is_unanswered=True, words=words, remains=error.what, outcome=outcome)
        # events explain why pods don't start; later nobody needs them
        is_starting = not job.is_started and sum(pod.phase == "Running" for pod in pods) < job.nnodes
        warnings = self.api.warnings(job.id) if is_starting else []
        return _state_of(job, shown, pods, before, self.api.kubectl, warnings)

    def cancel(self, job: GrantedJob) -> None:
        self.api.delete(job.id)

    def rehearse(self) -> list[str]:
        mount_path, claim = str(_settings(self.cluster).mount_path), str(_settings(self.cluster).pvc)
        self.api.create(manifest(self.cluster, "preflight", Path(mount_path), "rehearsal"), dry_run=True)
        if not os.access(mount_path, os.W_OK | os.X_OK):
            raise HostError(
                f"cluster.mount_path={mount_path} isn't there on this computer, or can't be written",
                hint="mount the volume there; this command and the pods speak through it",
            )
        return [
            f"namespace {self.api.namespace} would take such a {self.api.kind.name}",
            f"cluster.pvc={claim}: {_claim_words(self.api.claim(claim), self.cluster.nnodes)}",
            f"cluster.mount_path={mount_path} is there and can be written",
        ]


@dataclass(frozen=True, kw_only=True)
class _PodsState(JobState):
    """A job's state with all pods that it ever had, each as last seen; the API soon forgets a pod that ended."""

    pods: tuple[Pod, ...] = ()


def _state_of(
    job: GrantedJob,
    shown: Object | None,
    pods_now: Sequence[Pod],
    before: JobState | None,
    kubectl: str,
    warnings: Sequence[str],
) -> _PodsState:
    """Return the state of ``job``, which the API shows as ``shown`` (None: no such job) with the pods ``pods_now``.

    ``before``: an earlier state. ``warnings``: events about the job, the newest last.
    """
    seen = before.pods if isinstance(before, _PodsState) else ()
    pods = tuple({pod.uid: pod for pod in (*seen, *pods_now)}.values())
    # what the agents have reported: the nodes' names (pod name → pod0, …), and when the newest start ended on them
    facts = job.folder.facts(job.restart, job.nnodes)
    labels = {fact["host"]: f"pod{number}" for number, fact in enumerate(facts) if len(facts) == job.nnodes}
    run_ids = [order.start.run_id for order in job.folder.orders() if order.start is not None]
    reports = [job.folder.end_of(number, run_ids[-1]) for number in range(job.nnodes)] if run_ids else []
    end_times = {name: report.now for name, report in zip(labels, reports, strict=False) if report is not None}
    # the pod that ended first has caused the end of the others
    outcome = why_it_ended(sorted(pods, key=lambda pod: end_times.get(pod.name, math.inf)), pods_now, labels)
    silent = [pod for pod in pods_now if pod.phase == "Succeeded" and pod.name not in end_times]
    why_gone = outcome.text or (f"{silent[0].title} ended without a word" if silent else "")
    is_deleted = shown is None or bool(shown["metadata"].get("deletionTimestamp"))
    has_ended = shown is None or is_over(shown)
    # one pod that has ended or will end is enough: the ranks can't go on without it
    is_broken = any(pod.taken or pod.code or pod.leaving or pod.phase in ("Failed", "Succeeded") for pod in pods_now)
    over = has_ended or is_broken or bool(outcome.text)
    error = _ended_early(job, shown, pods_now, outcome, kubectl) if over and not job.is_started else None
    if is_deleted:
        outcome = Outcome(text=f"{job.title} was deleted", hint="the same command creates another one")
        why_gone = f"was taken away: {job.title} was deleted"
    suspended = conditions(shown or {}).get("Suspended")
    why = suspended or waiting(pods_now, job.nnodes, warnings)
    words, hint = f"waiting for {job.title}: {why}", "" if suspended else help_for(why)
    remaining = ", ".join(pod.title for pod in pods_now)
    return _PodsState(
        words=words,
        warning=f"{words}; {hint}" if hint else "",
        is_running=not over,
        is_over=over,
        is_idle=has_ended or not any(pod.phase == "Running" for pod in pods_now),
        # A node without a report, or ended by a signal from outside, was lost; the API will soon tell why.
        is_settled=bool(outcome.text) or all(report is not None and not report.was_terminated for report in reports),
        why_gone=why_gone,
        remains=f"{remaining} goes on; {kubectl} delete pods --force -l {JOB}={job.id}" if remaining else "",
        outcome=outcome,
        error=error,
        nodes={pod.name: pod.node for pod in pods},
        pods=pods,
    )


def _ended_early(
    job: GrantedJob, shown: Object | None, pods: Sequence[Pod], outcome: Outcome, kubectl: str
) -> HostError:
    """Return the error of a job that ended before anything was started in it."""
    if shown is None:
        return HostError(
            f"{job.title} was deleted before the run began",
            hint=f"the same command creates another one; {kubectl} get events shows who may have done it",
        )
    lines = [line for pod in pods if pod.code for line in pod.last_words.splitlines()]
    printed = list(dict.fromkeys([line for line in lines if line.startswith(SAYS)] or lines))[-4:]
    why = outcome.text or "; ".join(filter(None, conditions(shown).values())) or "it doesn't say why"
    hint = outcome.hint if outcome.cause == "memory" else None
    if any(re.search(r"(cannot|can't) open|/request: No such file", line) for line in printed):
        hint = "cluster.pvc= the volume that holds paths.runs, cluster.mount_path= where it is mounted on this computer"
    elif any("not found" in line or "No such file" in line for line in printed):
        hint = "cluster.python=<an interpreter that the image has>"
    text = f"{job.title} ended before the run began: {why}"
    return HostError("\n".join([text, *(f"  {line}" for line in printed)]), hint=hint)


def yaml_of(value: Object) -> str:
    """Return a manifest as a file that kubectl takes."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120))


def _claim_words(claim: Object | None, nnodes: int) -> str:
    """Return the state of a volume claim (None: it may not be read), and whether pods on several nodes may share it."""
    if claim is None:
        return "may not be looked at"
    modes = (claim.get("spec") or {}).get("accessModes") or []
    is_unshared = nnodes > 1 and "ReadWriteMany" not in modes
    warning = "; pods on several nodes can't share it, which takes ReadWriteMany" if is_unshared else ""
    return f"{(claim.get('status') or {}).get('phase') or 'not bound'}, {', '.join(modes)}{warning}"


def _label(run_key: str, run_dir: Path) -> str:
    """Return the label by which the jobs of a run folder are found."""
    return _name_part(journal.attempt_prefix(run_key, run_dir))


def _name_part(text: str) -> str:
    """Return the end of a text in characters that a name in the API may have."""
    # 24 of them: a pod's name has at most 63, and the other parts of it take up to 39
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-24:].strip("-")


def _refuse_elsewhere(name: str, path: Path, cluster: Cluster) -> None:
    mount_path = str(_settings(cluster).mount_path)  # the settings refuse null
    if not path.is_relative_to(mount_path):
        raise UsageError(
            f"{name} is {path}, which is not on the volume that pods mount at cluster.mount_path={mount_path}; "
            f"mount the volume there on this computer too, and set {name} to a folder below it"
        )
