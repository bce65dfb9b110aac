"""The cluster's API through its official client: what is asked of it, and what its refusals mean."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pipeline.cluster.launchers.kubernetes_errors import RefusalError, UnansweredError, refused
from pipeline.cluster.launchers.kubernetes_manifest import JOB, KINDS, RUN, Kind, Manifest
from pipeline.core.errors import HostError, suggestion
from pipeline.core.printable import printable
from trainers.core.installer import install

Object = dict[str, Any]
T = TypeVar("T")

_READ_S = 30.0
_SHOWN = 100  # characters of an answer that isn't understood
_LOG_LINES = 20


class Api:
    """One namespace of one cluster, and one kind of job in it.

    Args:
        context: of kubectl's configuration; None: its current one, or the cluster around this pod.
        namespace: None: the context's.
        connect_s: how long the server may take to be reached.
    """

    def __init__(self, kind: str, *, context: str | None, namespace: str | None, connect_s: float) -> None:
        self.kind: Kind = KINDS[kind]
        self._context, self._timeout = context, (connect_s, _READ_S)
        client, own = _connected(context)
        self.namespace = namespace or own
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        self._core, self._custom = CoreV1Api(client), CustomObjectsApi(client)
        self._server = client.configuration.host

    @property
    def kubectl(self) -> str:
        """How a person's command for this namespace begins."""
        context = f" --context {self._context}" if self._context else ""
        return f"kubectl{context} -n {self.namespace}"

    # -------------------------------------------------------------------------------------- jobs
    def create(self, manifest: Manifest, *, dry_run: bool = False) -> None:
        """Raises HostError: it is refused. ``dry_run``: everything but that it is kept."""
        kind = self.kind
        options: Object = {"field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        create = self._custom.create_namespaced_custom_object
        self._ask(lambda: create(*self._place(kind), manifest, **self._raw(), **options), "metadata")

    def get(self, name: str) -> Object | None:
        """The job; None: there is none of that name. Raises HostError."""
        get = self._custom.get_namespaced_custom_object
        try:
            return self._ask(lambda: get(*self._place(self.kind), name, **self._raw()), "metadata")
        except RefusalError as error:
            if error.status == 404:
                return None
            raise

    def jobs(self, run: str) -> list[Object]:
        """The jobs that are labelled for this run, the newest last. Raises HostError."""
        listed = self._custom.list_namespaced_custom_object
        selector = f"{RUN}={run}"
        jobs = self._items(lambda: listed(*self._place(self.kind), label_selector=selector, **self._raw()))
        return sorted(jobs, key=lambda job: str(job["metadata"].get("creationTimestamp")))

    def delete(self, name: str) -> None:
        """Let the API end a job and its pods; one that is gone is no error. Raises HostError."""
        delete = self._custom.delete_namespaced_custom_object
        try:
            self._do(lambda: delete(*self._place(self.kind), name, propagation_policy="Background", **self._raw()))
        except RefusalError as error:
            if error.status != 404:
                raise

    def _place(self, kind: Kind) -> tuple[str, str, str, str]:
        return kind.group, kind.version, self.namespace, kind.plural

    # -------------------------------------------------------------------------------- what it makes
    def pods(self, job: str) -> list[Object]:
        """A job's pods. Raises HostError."""
        listed, selector = self._core.list_namespaced_pod, f"{JOB}={job}"
        return self._items(lambda: listed(self.namespace, label_selector=selector, **self._raw()))

    def warnings(self, job: str) -> list[str]:
        """What the API's events complain of in a job and what it made, the newest last; [] where they can't be read."""
        listed = self._core.list_namespaced_event
        try:
            rows = self._items(lambda: listed(self.namespace, field_selector="type=Warning", **self._raw()))
        except HostError:
            return []
        mine = [row for row in rows if ((row.get("involvedObject") or {}).get("name") or "").startswith(job)]
        mine.sort(key=lambda row: str(row.get("lastTimestamp") or row.get("eventTime") or ""))
        return [f"{row.get('reason')}: {' '.join((row.get('message') or '').split())}" for row in mine]

    def log(self, pod: str) -> list[str]:
        """The last lines that a pod has printed; [] where they can't be read."""
        read = self._core.read_namespaced_pod_log
        try:
            answer = self._do(lambda: read(pod, self.namespace, tail_lines=_LOG_LINES, **self._raw()))
        except HostError:
            return []
        return [line for line in bytes(answer.data).decode(errors="replace").splitlines() if line.strip()]

    def claim(self, name: str) -> Object | None:
        """A volume claim; None: it may not be read. Raises HostError: there is none of that name."""
        read = self._core.read_namespaced_persistent_volume_claim
        try:
            return self._ask(lambda: read(name, self.namespace, **self._raw()), "spec")
        except RefusalError as error:
            if error.status == 403:
                return None
            if error.status != 404:
                raise
            raise HostError(
                f"cluster.pvc={name} is not in namespace {self.namespace}",
                hint=f"{self.kubectl} get pvc shows the claims that are",
            ) from error

    def served(self) -> list[str]:
        """The names for ``cluster.kind=`` of which the cluster knows the resource; [] where it doesn't tell."""
        from kubernetes.client import ApisApi
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = json.loads(ApisApi(self._core.api_client).get_api_versions(**self._raw()).data)
        except (ApiException, HTTPError, ValueError):
            return []
        known = {version["groupVersion"] for group in answer["groups"] for version in group["versions"]}
        return [name for name, kind in KINDS.items() if kind.api_version in known]

    def _raw(self) -> Object:
        """The answer as it came: the client's models refuse what a newer server has."""
        return {"_preload_content": False, "_request_timeout": self._timeout}

    def _items(self, ask: Callable[[], Any]) -> list[Object]:
        items: list[Object] | None = self._ask(ask, "items")["items"]
        return items or []

    def _ask(self, ask: Callable[[], Any], holds: str) -> Object:
        """The object that the API answers with, which has the field ``holds``. Raises RefusalError, UnansweredError:
        also where something else answers, such as a proxy's page of login."""
        said = bytes(self._do(ask).data).decode(errors="replace")
        try:
            answer = json.loads(said)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or holds not in answer:
            raise UnansweredError(
                f"{self._server} doesn't answer as a cluster's API: {printable(' '.join(said.split()))[:_SHOWN]}",
                hint=f"{self.kubectl} get pods, which may log you in again; a proxy on the way is named by HTTPS_PROXY",
            )
        return answer

    def _do(self, ask: Callable[[], T]) -> T:
        """Raises RefusalError, UnansweredError."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return ask()
        except ApiException as error:
            raise refused(
                int(error.status or 0), str(error.reason), error.body, self.kind, self.kubectl, self.served
            ) from error
        except HTTPError as error:
            raise UnansweredError(
                f"the cluster's API server {self._server} can't be reached: {_reason(error)}",
                hint=f"{self.kubectl} get pods shows whether it answers; cluster.context= names another cluster",
            ) from error


def _reason(error: Exception) -> str:
    """urllib3 hides what happened behind the address and the number of tries."""
    return str(getattr(error, "reason", None) or error).rpartition(">: ")[2]


def _connected(context: str | None) -> tuple[Any, str]:
    """A client and the namespace that its configuration names. Raises HostError."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise HostError(
            f"cluster.launcher=kubernetes needs the package kubernetes, which is not installed here ({error})",
            hint=install("kubernetes"),
        ) from error
    from urllib3 import Retry

    settings = client.Configuration()
    settings.retries = Retry(1, respect_retry_after_header=False)  # it would sleep for as long as the server likes
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if not any(Path(file).expanduser().is_file() for file in files.split(os.pathsep)):
        if "KUBERNETES_SERVICE_HOST" not in os.environ or context is not None:
            raise HostError(
                f"kubectl's configuration {files} isn't there, so no cluster is known",
                hint="your cluster's login command writes it; KUBECONFIG=<file> names another one",
            )
        config.load_incluster_config(client_configuration=settings)
        return client.ApiClient(settings), _own_namespace()
    return client.ApiClient(settings), _load(config, files, context, settings)


def _load(config: Any, files: str, context: str | None, settings: Any) -> str:
    """Read kubectl's configuration into ``settings``; the namespace that it names. Raises HostError.

    Args:
        config: the client's module.
    """
    try:
        known, current = config.list_kube_config_contexts(files)
        rows = {row["name"]: row["context"] for row in known}
        if context is not None and context not in rows:
            raise HostError(f"cluster.context={context} is not in {files}; {suggestion(context, rows)}")
        with _complaints() as failed:
            config.load_kube_config(files, context=context, client_configuration=settings)
        if failed:
            raise HostError(
                f"the login that kubectl's configuration {files} names failed: {'; '.join(failed)}",
                hint="kubectl get pods, which may log you in again",
            )
        if not "".join(settings.api_key.values()).isprintable():  # the client's own error would show it
            raise HostError(
                f"kubectl's configuration {files} has a token that no request can carry: it holds a line break or such",
                hint="kubectl config set-credentials NAME --token=<the token on one line>",
            )
    except HostError:
        raise
    except Exception as error:  # the loader lets whatever a damaged file causes through
        said = " ".join(str(error).split())
        raise HostError(f"kubectl's configuration {files} can't be used: {said}", hint="kubectl config view") from error
    chosen: Object = rows[context] if context is not None else current["context"]
    return str(chosen.get("namespace") or "default")


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the client logs meanwhile: a login program that fails is an error line there, and then it asks as nobody."""
    said = list[str]()
    heard, root = logging.Handler(logging.ERROR), logging.getLogger()
    heard.emit = lambda record: said.append(printable(" ".join(record.getMessage().split())))  # type: ignore[method-assign]
    root.addHandler(heard)
    try:
        yield said
    finally:
        root.removeHandler(heard)


def _own_namespace() -> str:
    """That of the pod around this process."""
    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
