"""gloo's TLS: its variables, and what is wrong with the files that the configuration names. Pure.

NCCL and torch's store have none, so gradients over NCCL and the addresses in the store stay in the clear.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster, NodeFacts

WARNED_DAYS = 90
_DAY_S = 86400.0
_VARIABLES = {
    "tls_certificate": "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT",
    "tls_key": "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
    "tls_ca": "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE",
}


def files(cluster: Cluster) -> dict[str, str]:
    """Setting → path on the hosts; empty: nothing is encrypted."""
    found = {name: getattr(cluster, name) for name in _VARIABLES}
    return {name: path for name, path in found.items() if path is not None}


def variables(cluster: Cluster, home: str) -> dict[str, str]:
    """The environment that lets gloo encrypt on a host with this home; empty where nothing is configured."""
    named = files(cluster)
    if not named:
        return {}
    paths = {_VARIABLES[name]: f"{home}{path[1:]}" if path[:2] == "~/" else path for name, path in named.items()}
    return {"GLOO_DEVICE_TRANSPORT": "TCP_TLS", **paths}


def refuse_nccl(cluster: Cluster, backend: str) -> None:
    """Raises UsageError: the gradients would travel in the clear all the same."""
    if files(cluster) and (backend == "nccl" or (backend == "auto" and cluster.device == "cuda")):
        raise UsageError(
            f"cluster.tls_certificate={cluster.tls_certificate}, but strategy.backend={backend} on GPUs is NCCL, which "
            "doesn't encrypt",
            hint="strategy.backend=gloo, or a network of the hosts' own and cluster.tls_certificate=null",
        )


def problems(cluster: Cluster, fact: NodeFacts) -> list[str]:
    """What keeps a host from encrypting with the files that it has."""
    told: Mapping[str, Mapping[str, Any]] = fact.extra.get("certificates", {})
    found = []
    for name, path in files(cluster).items():
        seen = told.get(name, {})
        if "error" in seen:
            found.append(f"cluster.{name}={path}: {seen['error']}")
        elif seen.get("until", fact.unix_time) < fact.unix_time:
            found.append(f"cluster.{name}={path} ended on {_day(seen['until'])}; put a new one there")
    return found


def warnings(cluster: Cluster, facts: Sequence[NodeFacts]) -> list[str]:
    """A line for each certificate that ends soon."""
    lines = []
    for fact in facts:
        for name, path in files(cluster).items():
            until = fact.extra.get("certificates", {}).get(name, {}).get("until")
            days = None if until is None else (until - fact.unix_time) / _DAY_S
            if days is not None and 0 <= days < WARNED_DAYS:
                end = f"ends in {int(days)} days, on {_day(until)}"
                lines.append(f"WARNING: {fact.host}: cluster.{name}={path} {end}; put a new one there before")
    return lines


def _day(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_time))
