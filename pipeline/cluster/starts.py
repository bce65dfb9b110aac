"""Starts of a run that nobody has seen the end of: the plan of each, and the way to its hosts.

plan.json and config.json tell of the newest start alone, and a run may go on on other hosts than it began on: its key
doesn't hold their names. So each start whose hosts have copies of the run folder leaves attempts/N/start-*.json before
anything is started, and the file goes once all that the start has left there is here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.core.specs import Cluster, Host, LaunchPlan, NodePlan, Outputs
from pipeline.runs import attempts

_CONNECT_S = 5.0  # to hosts that this command doesn't name: it must not wait long for one that is gone for good
_OF_CLUSTER = ("launcher", "ssh_config", "workdir", "lease_s")
_OF_HOST = ("name", "port", "user", "python")
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, PacelineError)


@dataclass(frozen=True, kw_only=True)
class Start:
    """``cluster`` reaches the hosts of ``plan`` with what was configured then (None: a scheduler granted them);
    ``heard`` is the unix time at which a command last followed it."""

    plan: LaunchPlan
    cluster: Cluster | None
    heard: float

    @property
    def lease_ends(self) -> float:
        """Unix time after which none of its ranks trains any more, if no command has followed it since."""
        return self.heard + self.plan.lease_s


def note(plan: LaunchPlan, cluster: Cluster, run_dir: Path) -> None:
    """Write down that ``plan`` is about to start, and how its hosts are reached. No secret is among it."""
    granted = launchers.capabilities(cluster).hosts_are_granted
    path = _path(plan.run_id, run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"plan": dataclasses.asdict(plan), "cluster": None if granted else _way(cluster)})


def followed(run_id: str, run_dir: Path) -> None:
    """A command follows the start just now, which renews the lease of its hosts."""
    with suppress(OSError):  # one that began under an earlier version has no file
        os.utime(_path(run_id, run_dir))


def forget(run_id: str, run_dir: Path) -> None:
    """All that the start has left on its hosts is here."""
    _path(run_id, run_dir).unlink(missing_ok=True)


def is_noted(run_id: str, run_dir: Path) -> bool:
    """Whether something of it may still be on its hosts."""
    return _path(run_id, run_dir).is_file()


def unended(run_dir: Path) -> list[Start]:
    """The oldest first; what is damaged is passed over."""
    found = [start for path in run_dir.glob("attempts/*/start-*.json") if (start := _read(path)) is not None]
    order = {run_id: number for number, run_id in enumerate(attempts.known(run_dir))}
    return sorted(found, key=lambda start: (start.plan.attempt, order.get(start.plan.run_id, len(order))))


def plan_of(value: Mapping[str, Any]) -> LaunchPlan:
    """From its JSON. Raises KeyError, TypeError, ValueError, AttributeError: it is damaged."""
    nodes = tuple(NodePlan(**node) for node in value["nodes"])
    outputs: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value["outputs"].items()
    }
    return LaunchPlan(**{**value, "nodes": nodes, "outputs": Outputs(**outputs)})


def _path(run_id: str, run_dir: Path) -> Path:
    _, attempt, nonce = run_id.rsplit("-", 2)
    return run_dir / "attempts" / attempt / f"start-{nonce}.json"


def _read(path: Path) -> Start | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        cluster = None if value["cluster"] is None else _cluster(value["cluster"])
        return Start(plan=plan_of(value["plan"]), cluster=cluster, heard=path.stat().st_mtime)
    except _DAMAGE:
        return None


def _way(cluster: Cluster) -> dict[str, Any]:
    hosts = [{name: getattr(host, name) for name in _OF_HOST} for host in cluster.hosts]
    common = {field.name for field in dataclasses.fields(ClusterConfig)}
    own = {} if cluster.settings is None else vars(cluster.settings)
    settings = {name: value for name, value in own.items() if name not in common and value is not None}
    return {**{name: getattr(cluster, name) for name in _OF_CLUSTER}, "hosts": hosts, "settings": settings}


def _cluster(value: Mapping[str, Any]) -> Cluster:
    hosts = tuple(Host(**host) for host in value["hosts"])
    settings = launchers.LAUNCHERS.settings(value["launcher"])(**value["settings"])
    return Cluster(**{**value, "hosts": hosts, "settings": settings}, connect_timeout_s=_CONNECT_S)
