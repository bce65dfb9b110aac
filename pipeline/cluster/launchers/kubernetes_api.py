"""The API of a Kubernetes cluster, through its official client, for the launcher ``kubernetes``.

``Api`` sends requests about jobs, pods and volume claims. The functions below it are pure: they turn refusals into
errors with a fix, and the objects of the API into the state of a job.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import urllib3

from pipeline.cluster.launchers.base import Outcome
from pipeline.core.errors import HostError, suggestion
from pipeline.core.printable import printable
from trainers.core.errors import install

Object = dict[str, Any]
"""A resource, as the API reads and writes it."""

RUN, JOB = "paceline/run", "paceline/job"
"""Labels: of a job, which run it is for; of its pods, the job's name."""

_READ_S = 30.0


class Kind(NamedTuple):
    """A resource of the API that runs a number of pods to their end."""

    name: str
    group: str
    version: str

    @property
    def plural(self) -> str:
        return f"{self.name.lower()}s"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


KINDS = {"job": Kind("Job", "batch", "v1"), "trainjob": Kind("TrainJob", "trainer.kubeflow.org", "v1alpha1")}
"""``cluster.kind=`` → the resource."""


class UnansweredError(HostError):
    """The API can't be reached, or is too busy; it may answer later."""


class RefusalError(HostError):
    """The API refuses a request, with this HTTP status."""

    def __init__(self, what: str, *, hint: str | None, status: int) -> None:
        super().__init__(what, hint=hint)
        self.status = status


class Api:
    """Requests to one namespace of one cluster, about one kind of job. Every method may raise HostError.

    ``context``: of kubectl's configuration; None: its current one, or in a pod the cluster around it. ``namespace``
    None: the context's. ``connect_s``: time limit for reaching the server.
    """

    def __init__(self, kind: str, *, context: str | None, namespace: str | None, connect_s: float) -> None:
        self.kind: Kind = KINDS[kind]
        self._context, self._timeout = context, (connect_s, _READ_S)
        self._library = _kubernetes()
        client, default_namespace = _connected(self._library.client, self._library.config, context)
        self.namespace = namespace or default_namespace
        self._core, self._custom = self._library.client.CoreV1Api(client), self._library.client.CustomObjectsApi(client)
        self._server = client.configuration.host
        self._jobs_path = (self.kind.group, self.kind.version, self.namespace, self.kind.plural)

    @property
    def kubectl(self) -> str:
        """The first words of a kubectl command for this namespace."""
        context = f" --context {self._context}" if self._context else ""
        return f"kubectl{context} -n {self.namespace}"

    def create(self, manifest: Object, *, dry_run: bool = False) -> None:
        """Create a job; with ``dry_run`` only check that it would be accepted."""
        options = {"field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        self._object("metadata", self._custom.create_namespaced_custom_object, *self._jobs_path, manifest, **options)

    def get(self, name: str) -> Object | None:
        """Return the job; None: there is none of that name."""
        try:
            return self._object("metadata", self._custom.get_namespaced_custom_object, *self._jobs_path, name)
        except RefusalError as error:
            if error.status == 404:
                return None
            raise

    def jobs(self, run: str) -> list[Object]:
        """Return the jobs that are labelled for this run, the newest last."""
        list_objects = self._custom.list_namespaced_custom_object
        jobs = self._items(list_objects, *self._jobs_path, label_selector=f"{RUN}={run}")
        return sorted(jobs, key=lambda job: str(job["metadata"].get("creationTimestamp")))

    def delete(self, name: str) -> None:
        """End a job and its pods; one that is gone is no error."""
        delete = self._custom.delete_namespaced_custom_object
        try:
            self._call(delete, *self._jobs_path, name, propagation_policy="Background")
        except RefusalError as error:
            if error.status != 404:
                raise

    def pods(self, job: str) -> list[Object]:
        """Return a job's pods."""
        return self._items(self._core.list_namespaced_pod, self.namespace, label_selector=f"{JOB}={job}")

    def warnings(self, job: str) -> list[str]:
        """Return the warnings among the events of a job and its pods, the newest last; [] where they can't be read."""
        try:
            rows = self._items(self._core.list_namespaced_event, self.namespace, field_selector="type=Warning")
        except HostError:
            return []
        of_job = [row for row in rows if ((row.get("involvedObject") or {}).get("name") or "").startswith(job)]
        of_job.sort(key=lambda row: str(row.get("lastTimestamp") or row.get("eventTime") or ""))
        return [f"{row.get('reason')}: {' '.join((row.get('message') or '').split())}" for row in of_job]

    def claim(self, name: str) -> Object | None:
        """Return a volume claim; None: it may not be read."""
        try:
            return self._object("spec", self._core.read_namespaced_persistent_volume_claim, name, self.namespace)
        except RefusalError as error:
            if error.status == 403:
                return None
            if error.status != 404:
                raise
            raise HostError(
                f"cluster.pvc={name} is not in namespace {self.namespace}",
                hint=f"{self.kubectl} get pvc shows the claims that are",
            ) from error

    def _items(self, method: Callable[..., Any], *args: Any, **options: Any) -> list[Object]:
        items: list[Object] | None = self._object("items", method, *args, **options)["items"]
        return items or []

    def _object(self, field: str, method: Callable[..., Any], *args: Any, **options: Any) -> Object:
        """Return the object in the answer, which must have this field. Raises UnansweredError: a proxy's login page."""
        text = self._call(method, *args, **options)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or field not in answer:
            raise UnansweredError(
                f"{self._server} doesn't answer as a cluster's API: {printable(' '.join(text.split()))[:100]}",
                hint=f"{self.kubectl} get pods, which may log you in again; a proxy on the way is named by HTTPS_PROXY",
            )
        return answer

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> str:
        """Return the text of the answer, because the client's own models refuse fields of newer servers."""
        try:
            answer = method(*args, **options, _preload_content=False, _request_timeout=self._timeout)
        except self._library.client.exceptions.ApiException as error:
            raise refusal(int(error.status or 0), str(error.reason), error.body, self.kind, self.kubectl) from error
        except urllib3.exceptions.HTTPError as error:
            # urllib3 hides the reason behind the address and the number of tries
            reason = str(getattr(error, "reason", None) or error).rpartition(">: ")[2]
            raise UnansweredError(
                f"the cluster's API server {self._server} can't be reached: {reason}",
                hint=f"{self.kubectl} get pods shows whether it answers; cluster.context= names another cluster",
            ) from error
        return bytes(answer.data).decode(errors="replace")


# --------------------------------------------------------------------------------------------------- the connection
def _kubernetes() -> Any:
    try:
        import kubernetes  # here, because it is an extra
    except ImportError as error:
        raise HostError(
            f"cluster.launcher=kubernetes needs the package kubernetes, which is not installed here ({error})",
            hint=install("kubernetes"),
        ) from error
    return kubernetes


def _connected(client: Any, config: Any, context: str | None) -> tuple[Any, str]:
    """Return the client for a context of kubectl, and the namespace that this context has."""
    settings = client.Configuration()
    settings.retries = urllib3.Retry(1, respect_retry_after_header=False)  # else the server decides how long it sleeps
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
        return client.ApiClient(settings), _load(config, files, context, settings)
    if "KUBERNETES_SERVICE_HOST" not in os.environ or context is not None:
        raise HostError(
            f"kubectl's configuration {files} isn't there, so no cluster is known",
            hint="your cluster's login command writes it; KUBECONFIG=<file> names another one",
        )
    config.load_incluster_config(client_configuration=settings)
    file = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # of the pod around this process
    namespace = file.read_text(encoding="utf-8").strip() if file.is_file() else "default"
    return client.ApiClient(settings), namespace


def _load(config: Any, files: str, context: str | None, settings: Any) -> str:
    """Load kubectl's configuration into ``settings``; return the namespace of the context."""
    try:
        rows, current = config.list_kube_config_contexts(files)
        contexts = {row["name"]: row["context"] for row in rows}
        if context is not None and context not in contexts:
            raise HostError(f"cluster.context={context} is not in {files}; {suggestion(context, contexts)}")
        with _logged_errors() as errors:  # the client only logs the errors of a login program
            config.load_kube_config(files, context=context, client_configuration=settings)
        if errors:
            raise HostError(
                f"the login that kubectl's configuration {files} names failed: {'; '.join(errors)}",
                hint="kubectl get pods, which may log you in again",
            )
        if not "".join(settings.api_key.values()).isprintable():  # the client's own error would show the token
            raise HostError(
                f"kubectl's configuration {files} has a token that no request can carry: it holds a line break or such",
                hint="kubectl config set-credentials NAME --token=<the token on one line>",
            )
    except HostError:
        raise
    except Exception as error:  # the loader passes on whatever a damaged file causes
        reason = " ".join(str(error).split())
        raise HostError(
            f"kubectl's configuration {files} can't be used: {reason}", hint="kubectl config view"
        ) from error
    chosen: Object = contexts[context] if context is not None else current["context"]
    return str(chosen.get("namespace") or "default")


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect the errors that are logged while the block runs."""
    errors = list[str]()
    handler, root = logging.Handler(logging.ERROR), logging.getLogger()
    handler.emit = lambda record: errors.append(printable(" ".join(record.getMessage().split())))  # type: ignore[method-assign]
    root.addHandler(handler)
    try:
        yield errors
    finally:
        root.removeHandler(handler)


# ---------------------------------------------------------------------------------- the meaning of refusals (pure)
_FIELDS = {
    "image": "cluster.image",
    "resources": "cluster.cpu, cluster.memory, cluster.gpus, cluster.gpu_resource",
    "tolerations": "cluster.tolerations",
    "nodeSelector": "cluster.node_selector",
    "claimName": "cluster.pvc",
    "mountPath": "cluster.mount_path",
    "sizeLimit": "cluster.shm_size",
    "runAs": "cluster.run_as_user",
    "env": "cluster.env_from",
    "imagePullSecrets": "cluster.registry_logins",
    "serviceAccountName": "cluster.service_account",
    "labels": "cluster.labels",
    "runtimeRef": "cluster.runtime",
    "numNodes": "cluster.nnodes",
}
"""A part of a field's path → the setting of that field."""

_STUCK = {
    "ImagePull": "cluster.image=, and cluster.registry_logins= for a registry that wants a login",
    "InvalidImageName": "cluster.image=",
    "CreateContainerConfigError": "cluster.env_from=, cluster.run_as_user=",
    "CreateContainerError": "kubectl describe pod shows more",
    "CrashLoopBackOff": "kubectl logs shows what it prints",
    "persistentvolumeclaim": "cluster.pvc=; kubectl get pvc shows yours",
    "FailedMount": "cluster.pvc=; kubectl get pvc shows yours",
    "affinity/selector": "cluster.node_selector=; kubectl get nodes --show-labels",
    "untolerated taint": "cluster.tolerations=",
    "exceeded quota": "cluster.cpu=, cluster.memory= and cluster.gpus= within what kubectl describe quota shows",
    "must specify": "cluster.cpu= and cluster.memory=, which the quota of this namespace asks for",
    "violates PodSecurity": "cluster.run_as_user= another than 0",
    "serviceaccount": "cluster.service_account=; kubectl get serviceaccounts shows yours",
}
"""Words in the reason why a pod may never start → what helps."""


def help_for(reason: str) -> str:
    """Return what helps where a pod may wait for ever for this reason; '': it may only take its time."""
    return next((hint for words, hint in _STUCK.items() if words in reason), "")


def refusal(status: int, reason: str, body: Any, kind: Kind, kubectl: str) -> HostError:
    """Return the refusal in the API's own words; an UnansweredError if the same request may succeed later.

    ``body``: the answer, a ``Status`` if the API itself has made it.
    """
    try:
        value = json.loads(body)
    except (TypeError, ValueError):
        value = None
    answer = value if isinstance(value, dict) and value.get("kind") == "Status" else {}
    message, details = str(answer.get("message") or reason).strip(), answer.get("details") or {}
    # on status 404: the kind of the absent object; "": the cluster doesn't know this kind at all
    absent = str(details.get("kind") or "") if details.get("name") else ""
    causes = [(str(cause.get("field")), cause.get("message")) for cause in details.get("causes") or []]
    if status == 401:
        what = "the cluster's API doesn't know who this is (401)"
        hint = f"{kubectl} get pods, which may log you in again"
    elif status == 404 and absent in ("namespaces", "namespace"):
        what, hint = f"the cluster has no such namespace: {message}", "cluster.namespace=; kubectl get namespaces"
    elif status == 404 and not absent:
        what = f"the cluster doesn't know {kind.name} ({kind.api_version}): its operator isn't installed there"
        hint = "cluster.kind=job works on every cluster"
    elif status == 403:
        what = f"the cluster's API refuses it: {message}"
        hint = help_for(message) or f"{kubectl} auth can-i create {kind.plural}.{kind.group} shows what you may"
    elif status == 422:
        words = "; ".join(f"{field}: {why}" for field, why in causes)
        what = f"the cluster's API refuses the manifest: {words or message}"
        hint = ", ".join(dict.fromkeys(name for field, _ in causes for part, name in _FIELDS.items() if part in field))
    elif status == 400 and "unknown field" in message:
        what = f"the {kind.name} of this cluster is another version: {message}"
        hint = "cluster.kind=job works on every cluster; Kubeflow Trainer has what is used here from 2.2 on"
    elif status == 429 or status >= 500:
        return UnansweredError(f"the cluster's API can't answer now ({status}): {message}")
    else:
        what, hint = f"the cluster's API answers {status}: {message}", ""
    return RefusalError(what, hint=hint or None, status=status)


# ----------------------------------------------------------------------------- a job and its pods as the API shows them
_STARTING = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a job; "" for what the API doesn't say."""

    name: str
    uid: str
    node: str = ""
    phase: str = ""
    waits: str = ""  # why it doesn't run yet
    end_reason: str = ""  # why its container ended,
    code: int = 0  # with which exit code,
    last_words: str = ""  # and what it printed last
    taken: str = ""  # why it is taken off its node; "": it isn't
    leaving: bool = False  # it is about to be deleted, perhaps only because its job has failed

    @property
    def title(self) -> str:
        """``pod NAME on NODE``."""
        return f"pod {self.name}" + (f" on {self.node}" if self.node else "")


def pod_of(shown: Mapping[str, Any]) -> Pod:
    """Read one pod as the API shows it."""
    meta, spec, status = shown["metadata"], shown.get("spec") or {}, shown.get("status") or {}
    states = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    waiting_states = [(state.get("state") or {}).get("waiting") or {} for state in states]
    rows = {(row["type"], row["status"]): row for row in status.get("conditions") or []}
    # a container that can't start, or a pod for which there is no node
    waits = [state for state in waiting_states if state.get("reason") and state["reason"] not in _STARTING]
    waits += [row for row in [rows.get(("PodScheduled", "False"))] if row]
    # a failed pod has a reason only if the cluster ended it: Evicted, Preempting, NodeShutdown, NodeLost, …
    is_taken = status.get("phase") == "Failed" and status.get("reason")
    why_taken = rows.get(("DisruptionTarget", "True")) or (status if is_taken else {})
    # the last container that ended, now or before the kubelet restarted it
    ends = [(state.get(name) or {}).get("terminated") for state in reversed(states) for name in ("state", "lastState")]
    terminated: Mapping[str, Any] = next(filter(None, ends), {})
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "",
        waits=_words(waits[0]) if waits else "",
        end_reason=terminated.get("reason") or "",
        code=int(terminated.get("exitCode") or 0),
        last_words=(terminated.get("message") or "").strip(),
        taken=_words(why_taken),
        leaving=bool(meta.get("deletionTimestamp")),
    )


def _words(state: Mapping[str, Any]) -> str:
    """Return ``reason: message`` of a state or condition in the API."""
    reason, message = state.get("reason") or "", printable(" ".join((state.get("message") or "").split()))
    return f"{reason}: {message}" if reason and message else reason or message


def waiting(pods: Sequence[Pod], nnodes: int, warnings: Sequence[str]) -> str:
    """Return why a job doesn't run yet, in a few words; ``warnings`` are those of the API's events, the newest last."""
    running = sum(pod.phase == "Running" for pod in pods)
    for pod in pods:
        if pod.waits:
            return f"{running} of {nnodes} pods run; {pod.title}: {pod.waits}"
    if len(pods) < nnodes or running < nnodes:
        why = f": {warnings[-1]}" if warnings else ""
        return f"{running} of {nnodes} pods run, {len(pods)} were made{why}"
    return f"all {nnodes} pods run; their agents have not answered yet"


def conditions(shown: Mapping[str, Any]) -> dict[str, str]:
    """Return the conditions of a job that are true: type → reason and message."""
    rows = (shown.get("status") or {}).get("conditions") or []
    return {row["type"]: _words(row) for row in rows if row["status"] == "True"}


def is_over(shown: Mapping[str, Any]) -> bool:
    """Return True if a job of any kind won't run any more."""
    ends = ("Complete", "Failed", "FailureTarget")
    return bool(shown["metadata"].get("deletionTimestamp")) or not conditions(shown).keys().isdisjoint(ends)


def why_it_ended(before: Sequence[Pod], now: Sequence[Pod], labels: Mapping[str, str]) -> Outcome:
    """Return why an attempt failed, by what became of its pods since ``before``; an empty Outcome if nothing did.

    ``labels``: a pod's name → the name of its node in this run.
    """
    current = {pod.uid: pod for pod in now}
    gone = [old for old in before if old.uid not in current]
    pods = [current[old.uid] for old in before if old.uid in current]
    deleted = [*gone, *(pod for pod in pods if pod.leaving)]
    # A job that fails because of one pod deletes the others, so a pod that was only deleted is the last explanation.
    outcomes = itertools.chain(
        (_taken_away(pod, pod.taken, labels) for pod in [*pods, *gone] if pod.taken),
        (_ended_badly(pod, labels) for pod in pods if pod.code and not pod.leaving),
        (_taken_away(pod, "it was deleted", labels) for pod in deleted),
    )
    return next(outcomes, Outcome())


def _taken_away(pod: Pod, why: str, labels: Mapping[str, str]) -> Outcome:
    text = f"{_who(pod, labels)} was taken away ({why}); another job takes the place of this one, and the run will "
    return Outcome(text=f"{text}start again in it", again=True)


def _ended_badly(pod: Pod, labels: Mapping[str, str]) -> Outcome:
    if pod.end_reason == "OOMKilled":
        return Outcome(
            text=f"{_who(pod, labels)} was out of memory (OOMKilled)",
            hint="cluster.memory=<memory of each node>, or a smaller trainer.global_batch_size",
            cause="memory",
        )
    last_words = f": {pod.last_words.splitlines()[-1]}" if pod.last_words else ""
    return Outcome(
        text=f"{_who(pod, labels)} ended with exit code {pod.code} ({pod.end_reason}){last_words}",
        hint="the same command again",
        cause="host",
    )


def _who(pod: Pod, labels: Mapping[str, str]) -> str:
    return f"{labels[pod.name]}, {pod.title}," if pod.name in labels else pod.title
