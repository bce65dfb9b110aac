"""What the API's refusals mean, and what helps. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cluster.launchers.kubernetes_manifest import Kind
from pipeline.cluster.launchers.kubernetes_pods import helps
from pipeline.core.errors import HostError

_FIELDS = {
    "image": "cluster.image",
    "resources": "cluster.cpu, cluster.memory, cluster.gpus, cluster.gpu_resource",
    "tolerations": "cluster.tolerations",
    "nodeSelector": "cluster.node_selector",
    "claimName": "cluster.pvc",
    "mountPath": "cluster.mount_path",
    "sizeLimit": "cluster.shm_size",
    "runAs": "cluster.run_as_user",
    "secretKeyRef": "cluster.env_from",
    "env": "cluster.env_from",
    "imagePullSecrets": "cluster.registry_logins",
    "serviceAccountName": "cluster.service_account",
    "labels": "cluster.labels",
    "runtimeRef": "cluster.runtime",
    "numNodes": "cluster.nnodes",
}
"""A part of a field's path → what sets it here."""


class UnansweredError(HostError):
    """The API can't be reached, or is too busy: it may answer later."""


class RefusalError(HostError):
    """What the API says no to, with the HTTP status."""

    def __init__(self, what: str, *, hint: str | None, status: int) -> None:
        super().__init__(what, hint=hint)
        self.status = status


def refused(
    status: int, reason: str, body: Any, kind: Kind, kubectl: str, served: Callable[[], Sequence[str]]
) -> HostError:
    """The refusal in the API's own words; an UnansweredError where the same question may be answered later.

    Args:
        body: the answer, which is a ``Status`` where the API itself has made it.
        kubectl: how a command for the same namespace begins.
        served: asked for other values of ``cluster.kind`` that the cluster knows.
    """
    said = _status(body)
    message = str(said.get("message") or reason).strip()
    if status == 401:
        what, hint = (
            "the cluster's API doesn't know who this is (401)",
            f"{kubectl} get pods, which may log you in again",
        )
    elif status == 404 and _names(said) in ("namespaces", "namespace"):
        what, hint = f"the cluster has no such namespace: {message}", "cluster.namespace=; kubectl get namespaces"
    elif status == 404 and not _names(said):
        others = [f"cluster.kind={name}" for name in served()] or ["cluster.kind=job"]
        what = f"the cluster doesn't know {kind.name} ({kind.api_version}): its operator isn't installed there"
        hint = f"{' or '.join(others)}, which it knows"
    elif status == 403:
        what = f"the cluster's API refuses it: {message}"
        hint = helps(message) or f"{kubectl} auth can-i create {kind.plural}.{kind.group} shows what you may"
    elif status == 422:
        what, hint = f"the cluster's API refuses the manifest: {_causes(said) or message}", _fields(said)
    elif status == 400 and "unknown field" in message:
        what = f"the {kind.name} of this cluster is another version: {message}"
        hint = "cluster.kind=job works on every cluster; Kubeflow Trainer has what is used here from 2.2 on"
    elif status == 429 or status >= 500:
        return UnansweredError(f"the cluster's API can't answer now ({status}): {message}")
    else:
        what, hint = f"the cluster's API answers {status}: {message}", ""
    return RefusalError(what, hint=hint or None, status=status)


def _status(body: Any) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) and value.get("kind") == "Status" else {}


def _names(said: dict[str, Any]) -> str:
    """The kind of the object that isn't there; '' where the whole resource isn't."""
    details = said.get("details") or {}
    return str(details.get("kind") or "") if details.get("name") else ""


def _causes(said: dict[str, Any]) -> str:
    causes = (said.get("details") or {}).get("causes") or []
    return "; ".join(f"{cause.get('field')}: {cause.get('message')}" for cause in causes)


def _fields(said: dict[str, Any]) -> str:
    """The settings from which the fields come that were refused."""
    causes = (said.get("details") or {}).get("causes") or []
    places = [str(cause.get("field")) for cause in causes]
    return ", ".join(dict.fromkeys(name for place in places for part, name in _FIELDS.items() if part in place))
