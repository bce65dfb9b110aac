"""Hosts that Kubernetes grants: the pods of one job, which mount the volume that holds the folder of runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.kubernetes_api import Api
from pipeline.cluster.launchers.kubernetes_job import PodsJob, release, vanish
from pipeline.cluster.launchers.kubernetes_manifest import FOLDERS, MANIFEST, Manifest, PodJob, manifest, text
from pipeline.cluster.launchers.kubernetes_pods import claimed
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.core.errors import HostError, PacelineError, UsageError
from pipeline.core.redact import rules
from pipeline.core.specs import Cluster
from pipeline.runs import attempts
from trainers.core.config import ConfigError


@dataclass(kw_only=True)
class KubernetesConfig(ClusterConfig):
    """Of what the pods are made.

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
        from pipeline.cluster.launchers.kubernetes_rules import problems  # settings are read without their module

        if found := problems(self):
            raise ConfigError("\n".join(found))


class KubernetesLauncher(GrantedLauncher):
    """Creates one job for an attempt, or finds the one that an earlier command has created for the same run."""

    scheduler = "kubernetes_pod"
    _api: Api | None = None

    @property
    def api(self) -> Api:
        """Made when first needed: rendering asks nobody. Raises HostError."""
        if self._api is None:
            settings, connect_s = self.cluster.settings, self.cluster.connect_timeout_s
            self._api = Api(settings.kind, context=settings.context, namespace=settings.namespace, connect_s=connect_s)
        return self._api

    def submission(self, spec: AttemptSpec) -> str:
        return text(self._manifest(spec.run_key, spec.run_dir, "<random>"))

    def _manifest(self, run_key: str, run_dir: Path, nonce: str) -> Manifest:
        """Raises UsageError: pods can't work in this run folder, or as this user."""
        host, settings = self.cluster.hosts[0], self.cluster.settings
        _refuse_elsewhere("paths.runs", run_dir, settings.mount_path)
        _refuse_secrets(self.cluster)
        gpus = host.nproc_per_node if self.cluster.device == "cuda" else 0
        return manifest(
            PodJob(
                name=f"paceline-{_word(run_key)}-{nonce}",
                run=_label(run_key, run_dir),
                folder=str(run_dir / FOLDERS / nonce),
                python=host.python or "python3",
                nnodes=self.cluster.nnodes,
                nproc_per_node=host.nproc_per_node,
                gpus=gpus if settings.gpus is None else settings.gpus,
                uid=_user(settings.run_as_user, os.getuid()),
                gid=os.getgid(),
                settings=settings,
            )
        )

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> Cluster:
        if spec.pack is not None:
            _refuse_elsewhere("paths.data", spec.pack.path, self.cluster.settings.mount_path)
        write, run = partial(self._manifest, spec.run_key, spec.run_dir), _label(spec.run_key, spec.run_dir)
        write("check")  # before anybody is asked
        request = {
            **self.request(spec, modules),
            "env_from": [place.rpartition("/")[2] for place in self.cluster.settings.env_from],
            "hide": rules(),
        }
        job = self._job = PodsJob(self.api, write, run=run, run_dir=spec.run_dir, nnodes=self.cluster.nnodes)
        found = job.find(say)
        if not found:
            job.submit(request, say)
        while not job.wait(say, check):
            job.submit(request, say)
        say(job.described())
        return self.named([f"pod{number}" for number in range(self.cluster.nnodes)])

    def rehearse(self) -> list[str]:
        settings, kind = self.cluster.settings, self.api.kind
        self.api.create(self._manifest("preflight", Path(settings.mount_path), "rehearsal"), dry_run=True)
        _refuse_absent(settings.mount_path)
        return [
            f"namespace {self.api.namespace} would take such a {kind.name}",
            f"cluster.pvc={settings.pvc}: {claimed(self.api.claim(settings.pvc), self.cluster.nnodes)}",
            f"cluster.mount_path={settings.mount_path} is there and can be written",
        ]

    def cancel_all(self, run_key: str, run_dir: Path) -> dict[str, str]:
        for folder in (run_dir / FOLDERS).glob("*"):  # also where the API doesn't answer
            JobFolder(folder, MANIFEST).leave()
        try:
            names = [job["metadata"]["name"] for job in self.api.jobs(_label(run_key, run_dir))]
            for name in names:
                self.api.delete(name)
            return vanish(self.api, names)
        except PacelineError as error:
            return {"Kubernetes": error.what}

    def let_go(self) -> None:
        """The job is deleted too."""
        if isinstance(self._job, PodsJob):
            with contextlib.suppress(HostError):  # what is over is in nobody's way; its time to live ends it
                release(self.api, self._job.folder, self._job.name)


def _label(run_key: str, run_dir: Path) -> str:
    """What all jobs of one run folder are labelled with."""
    return _word(attempts.prefix(run_key, run_dir))


def _word(text: str) -> str:
    """The end of a text without what can't stand in the API's names; those of pods are 39 letters longer, of 63."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-24:].strip("-")


def _refuse_elsewhere(name: str, path: Path, mount_path: str) -> None:
    if not path.is_relative_to(mount_path):
        raise UsageError(
            f"{name} is {path}, which is not on the volume that pods mount at cluster.mount_path={mount_path}; "
            f"mount the volume there on this computer too, and set {name} to a folder below it"
        )


def _refuse_absent(mount_path: str) -> None:
    if not os.access(mount_path, os.W_OK | os.X_OK):
        raise HostError(
            f"cluster.mount_path={mount_path} isn't there on this computer, or can't be written",
            hint="mount the volume there; this command and the pods speak through it",
        )


def _refuse_secrets(cluster: Cluster) -> None:
    """A manifest is read by many, so values are kept out of it and of the files beside it."""
    names = sorted({name for host in cluster.hosts for name in host.secrets})
    if names:
        raise UsageError(
            f"cluster.env holds secrets ({', '.join(names)}), which pods get from a Secret of the namespace alone: "
            f"kubectl create secret generic mine --from-env-file=FILE, then cluster.env_from=[mine/{names[0]}]"
        )


def _user(chosen: int | None, own: int) -> int:
    if chosen is None and own == 0:
        raise UsageError(
            "this command runs as root, and so would the pods, which most clusters refuse; "
            "cluster.run_as_user=<the id of a user who may write in paths.runs>, or 0 where root is allowed"
        )
    return own if chosen is None else chosen
