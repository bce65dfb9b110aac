"""A cluster with the kinds of jobs that Kubernetes knows, whose pods are processes of this machine.

Each container is the first process of a process-id namespace of its own, as in a real pod: SIGTERM ends it only if it
asks for that. All see this machine's files, which stands for the volume, and its loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes_operators import Object, Wanted, pods_of
from tests.waiting import wait_until

KINDS = {"jobs": "Job", "trainjobs": "TrainJob"}
GROUPS = ("batch/v1", "trainer.kubeflow.org/v1alpha1")
NAMESPACE = "lab"
GRACE_S = 5.0  # instead of what the pods say: a test doesn't wait for a minute
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


class RefusedError(Exception):
    """What the server answers instead: a Status."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.status = {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@dataclass
class FakeCluster:
    """One cluster with a namespace. ``groups`` are the APIs that it serves; ``unschedulable`` keeps a job's pods but
    the first from running, ``unpulled`` all of them; ``refusal`` answers the next manifests;
    ``busy`` is how many questions are put off, for an hour if one asks the server; ``page`` is what something else on
    the way answers instead."""

    folder: Path
    groups: list[str] = field(default_factory=lambda: list(GROUPS))
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    claims: dict[str, Object] = field(default_factory=dict)
    events: list[Object] = field(default_factory=list)
    unschedulable: str = ""
    unpulled: str = ""
    refusal: RefusedError | None = None
    busy: int = 0
    page: str = ""
    jobs: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    made: list[Object] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------- what a test does
    def evict(self, pod: str, reason: str = "EvictionByEvictionAPI", message: str = "Eviction API: evicting") -> None:
        """As a drained node or a more important pod does."""
        with self.lock:
            value = self.pods[pod]
            value["status"]["conditions"] = [{**_DISRUPTED, "reason": reason, "message": message}]
            self._delete_pod(value)

    def kill(self, pod: str, reason: str) -> None:
        """SIGKILL to a container, which ends for ``reason``."""
        with self.lock:
            self.pods[pod]["killed"] = reason
        os.kill(self._first(pod), signal.SIGKILL)

    def _first(self, pod: str) -> int:
        """The container's first process, as it is seen from here."""
        parent = self.processes[pod].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    # ----------------------------------------------------------------------------------------------- the API's verbs
    def create(self, plural: str, job: Object, *, keep: bool) -> Object:
        with self.lock:
            if self.refusal is not None:
                raise self.refusal
            name = job["metadata"]["name"]
            if name in self.jobs:
                raise RefusedError(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name, kind=plural)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            made = {**job, "status": {"conditions": []}}
            made["metadata"] = {**job["metadata"], "uid": f"uid-{len(self.made)}", "creationTimestamp": now}
            if keep:
                self.jobs[name] = made
                self.made.append(job)
                for wanted in pods_of(job):
                    self._create_pod(name, wanted)
            return made

    def delete(self, name: str) -> Object:
        with self.lock:
            job = self.jobs.pop(name)
            for pod in self._pods_of(name):
                self._delete_pod(pod)
            return job

    def _pods_of(self, job: str) -> list[Object]:
        return [pod for pod in list(self.pods.values()) if pod["job"] == job]

    # ------------------------------------------------------------------------------------------------- its kubelet
    def _create_pod(self, job: str, wanted: Wanted) -> None:
        status: Object = {"phase": "Pending", "conditions": []}
        pod: Object = {
            "metadata": {"name": wanted.name, "uid": f"uid-{wanted.name}", "labels": wanted.labels},
            "spec": {"containers": [wanted.container]},
            "status": status,
            "job": job,
        }
        self.pods[wanted.name] = pod
        if self.unschedulable and len(self._pods_of(job)) > 1:
            row = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.unschedulable}
            status["conditions"] = [row]
            return
        pod["spec"]["nodeName"] = f"machine{len(self._pods_of(job)) - 1}"
        if self.unpulled:
            waiting = {"reason": "ImagePullBackOff", "message": self.unpulled}
            status["containerStatuses"] = [{"state": {"waiting": waiting}}]
            return
        self._run(pod, wanted)

    def _run(self, pod: Object, wanted: Wanted) -> None:
        name = wanted.name
        environ = {"PATH": os.environ["PATH"], **wanted.environ}
        fields = {"metadata.name": name, "status.podIP": "127.0.0.1"}
        for row in wanted.container["env"]:
            source = row.get("valueFrom") or {}
            if "fieldRef" in source:
                environ[row["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                place = source["secretKeyRef"]
                environ[row["name"]] = self.secrets[place["name"]][place["key"]]
            else:
                environ[row["name"]] = row["value"]
        argv = [_expanded(word, environ) for word in wanted.container["command"]]
        with (self.folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                [*_APART, *argv], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = child
        pod["status"].update(phase="Running", podIP="127.0.0.1")
        threading.Thread(target=self._watch, args=(pod, child), daemon=True).start()

    def _watch(self, pod: Object, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        with self.lock:
            status, name = pod["status"], pod["metadata"]["name"]
            reason = pod.get("killed") or ("Error" if code else "Completed")
            message = "\n".join(self.log(name)[-4:]) if code else ""
            ended = {"exitCode": 137 if "killed" in pod else code, "reason": reason, "message": message}
            status["containerStatuses"] = [{"state": {"terminated": ended}}]
            status["phase"] = "Failed" if code else "Succeeded"
            if "deletionTimestamp" in pod["metadata"]:
                self.pods.pop(name, None)
            self._judge(pod["job"])

    def _judge(self, name: str) -> None:
        """The Job controller: one failed pod ends the job, which takes the others with it."""
        job, phases = self.jobs.get(name), [pod["status"]["phase"] for pod in self._pods_of(name)]
        if job is None or job["status"]["conditions"]:
            return
        if "Failed" in phases or len(phases) < len(pods_of(job)):
            row = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "Job has failed"}
            job["status"]["conditions"] = [row]
            for pod in self._pods_of(name):
                if pod["status"]["phase"] == "Running":
                    self._delete_pod(pod)
        elif set(phases) == {"Succeeded"}:
            job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]

    def _delete_pod(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if name not in self.processes or pod["status"]["phase"] in ("Failed", "Succeeded"):
            self.pods.pop(name, None)
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = "now"
            threading.Thread(target=self._end, args=(name,), daemon=True).start()

    def _end(self, name: str) -> None:
        child = self.processes[name]
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            with contextlib.suppress(OSError, IndexError):
                os.kill(self._first(name), number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
                return

    def log(self, pod: str) -> list[str]:
        return (self.folder / f"{pod}.log").read_text(errors="replace").splitlines()

    def end_all(self) -> None:
        """No job, pod or process is left."""
        with self.lock:
            self.unschedulable = self.unpulled = ""
            for name in list(self.jobs):
                self.delete(name)
            for pod in list(self.pods.values()):
                self._delete_pod(pod)
        wait_until(lambda: all(child.poll() is not None for child in self.processes.values()))


def _expanded(word: str, environ: dict[str, str]) -> str:
    """What the API makes of ``$(NAME)`` and ``$$`` in a command."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environ.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", one, word)
