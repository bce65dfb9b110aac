"""Decide which trial starts on which slot and which is retried: pure decisions without clock, threads or files."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.cluster import launchers
from pipeline.config.build import RunConfig
from pipeline.config.schema import SweepConfig
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_quoted
from pipeline.core.specs import Cluster, Host, State
from pipeline.core.tables import counted
from pipeline.sweep.trial import Outcome, Trial, TrialSource

_GPUS = "CUDA_VISIBLE_DEVICES"


def slots(cluster: Cluster, settings: SweepConfig, gpus: Sequence[str]) -> tuple[Cluster, ...]:
    """Return the part of the cluster for each slot; by default one slot with the whole cluster.

    ``sweep.nodes`` splits the hosts into groups. ``sweep.slots`` lets several trials share each group: each gets its
    own GPUs (numbered from 0 on the host) and a share of the cores.

    Args:
        gpus: the local GPUs in the form of CUDA_VISIBLE_DEVICES, for ``cluster=local``.

    Raises:
        UsageError: the groups don't fit, or would give a trial another key in another slot.
    """
    groups = _groups(cluster, settings.nodes)
    shares = _shares(cluster, settings.slots, gpus)
    if shares == 1:
        return groups
    for host in cluster.hosts:
        if _GPUS in host.env:
            raise UsageError(
                f"sweep.slots deals out the GPUs of {host.label}, and cluster.env sets {_GPUS}={host.env[_GPUS]}; "
                "take it out of cluster.env (for cluster=local export it in the shell instead)"
            )
    on_gpus = bool(gpus) if _is_here(cluster) else True
    return tuple(_shared(group, part, shares, gpus, on_gpus) for group in groups for part in range(shares))


def _groups(cluster: Cluster, nodes: Any) -> tuple[Cluster, ...]:
    """Split the hosts in order into groups of ``nodes``; remaining hosts stay idle."""
    if nodes is None:
        return (cluster,)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= cluster.nnodes:
        raise UsageError(f"sweep.nodes={nodes} must lie between 1 and the cluster's {counted(cluster.nnodes, 'host')}")
    hosts = cluster.hosts
    if _are_granted(cluster):  # each slot is a separate scheduler job, whose hosts have no names yet
        return (dataclasses.replace(cluster, hosts=hosts[:nodes]),) * (len(hosts) // nodes)
    groups = [hosts[at : at + nodes] for at in range(0, len(hosts) - nodes + 1, nodes)]
    for group in groups[1:]:
        if _topology(group) != _topology(groups[0]):
            raise UsageError(
                f"sweep.nodes={nodes}: {_names(group)} and {_names(groups[0])} differ in nproc_per_node or env, "
                "so a trial's key would depend on where it ran; give the hosts equal values"
            )
    return tuple(dataclasses.replace(cluster, hosts=group) for group in groups)


def _shares(cluster: Cluster, wanted: Any, gpus: Sequence[str]) -> int:
    if wanted == "auto":
        if not _is_here(cluster) or any(_GPUS in host.env for host in cluster.hosts):
            return 1
        return max(1, len(gpus) // cluster.hosts[0].nproc_per_node)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"sweep.slots={wanted} must be a whole number from 1, or auto")
    need = wanted * cluster.hosts[0].nproc_per_node
    if _is_here(cluster) and gpus and need > len(gpus) and wanted > 1:
        raise UsageError(
            f"sweep.slots={wanted} with {counted(cluster.hosts[0].nproc_per_node, 'rank')} each needs {need} GPUs, "
            f"there are {len(gpus)}; set cluster.nproc_per_node={max(1, len(gpus) // wanted)}, or fewer slots"
        )
    return wanted


def _is_here(cluster: Cluster) -> bool:
    """Return True if the only host is this one, whose GPUs are known."""
    return launchers.capabilities(cluster).is_this_computer


def _are_granted(cluster: Cluster) -> bool:
    return launchers.capabilities(cluster).hosts_are_granted


def _shared(group: Cluster, part: int, shares: int, gpus: Sequence[str], on_gpus: bool) -> Cluster:
    hosts = []
    for host in group.hosts:
        mine = range(part * host.nproc_per_node, (part + 1) * host.nproc_per_node)
        names = [gpus[at] if _is_here(group) and at < len(gpus) else str(at) for at in mine]
        placement = {_GPUS: ",".join(names)} if on_gpus else {}
        hosts.append(dataclasses.replace(host, placement=placement, shared_by=shares))
    return dataclasses.replace(group, hosts=tuple(hosts))


def _topology(hosts: Sequence[Host]) -> list[Any]:
    return [(host.nproc_per_node, dict(host.env)) for host in hosts]


def _names(hosts: Sequence[Host]) -> str:
    return " + ".join(host.label for host in hosts)


def raw_cluster(raw: dict[str, Any], whole: Cluster, part: Cluster) -> dict[str, Any]:
    """Return the ``cluster`` section of config.json for a trial that uses ``part`` of the hosts of ``whole``."""
    if part.nnodes == whole.nnodes:
        return raw
    if _are_granted(part):
        return {**raw, "nnodes": part.nnodes}
    return {**raw, "hostfile": None, "hosts": [_entry(host) for host in part.hosts]}


def words(whole: Cluster, part: Cluster) -> tuple[str, ...]:
    """Return the overrides that select ``part``'s hosts, to repeat a trial; empty for the whole cluster."""
    if part.nnodes == whole.nnodes:
        return ()
    return (f"cluster.nnodes={part.nnodes}",) if _are_granted(part) else _host_words(part)


def placed(config: RunConfig, part: Cluster) -> RunConfig:
    """Move a trial that was configured for the first slot to another slot. Its key is unchanged."""
    if [host.label for host in part.hosts] == [host.label for host in config.cluster.hosts]:
        return dataclasses.replace(config, cluster=part)
    section = {**config.resolved["cluster"], "hostfile": None, "hosts": [_entry(host) for host in part.hosts]}
    return dataclasses.replace(
        config,
        cluster=part,
        resolved={**config.resolved, "cluster": section},
        overrides=(*config.overrides[: -len(_host_words(part))], *_host_words(part)),
    )


def _host_words(part: Cluster) -> tuple[str, ...]:
    entries = (", ".join(f"{name}: {_quoted(value)}" for name, value in _set(host)) for host in part.hosts)
    return ("cluster.hostfile=null", "cluster.hosts=[" + ", ".join(f"{{{entry}}}" for entry in entries) + "]")


def _entry(host: Host) -> dict[str, Any]:
    entry = dataclasses.asdict(host)
    return {name: value for name, value in entry.items() if name not in ("placement", "shared_by", "secrets")}


def _set(host: Host) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in _entry(host).items() if value not in (None, {})]


def _quoted(value: Any) -> str:
    """Write a value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_quoted(item)}" for name, item in value.items()) + "}"
    return hydra_quoted(value) if isinstance(value, str) else str(value)


TRANSIENT = ("host", "memory")
"""Causes of failures that a retry may not meet again."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A trial to start now. ``tried`` counts its earlier attempts in this command."""

    trial: Trial
    slot: int
    tried: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a trial. ``before``: the result existed already, nothing was started."""

    trial: Trial
    outcome: Outcome
    before: bool = False


class Schedule:
    """Assigns trials to slots: a slot takes the next trial as soon as it is free, without waiting for a batch.

    Args:
        settled: returns the result of a trial that needs no start (finished before, failed permanently), or None.
        most: so many trials are started, however often each is retried; None: all.
    """

    def __init__(
        self,
        source: TrialSource,
        *,
        slots: int,
        retries: int,
        settled: Callable[[Trial], Ended | None],
        most: int | None = None,
    ) -> None:
        self._source, self._retries, self._settled = source, retries, settled
        self._left = most  # None: any number
        self._free = deque(range(slots))
        self._slots = slots
        self._again: deque[tuple[Trial, int]] = deque()
        self._running: dict[int, Start] = {}
        self._exhausted = self._halted = False
        self.ended: list[Ended] = []

    def next(self) -> Start | None:
        """Return the next trial to start; None if there is none, no slot is free, or its run is in progress."""
        while self._free and not self._halted:
            trial, tried = self._take()
            if trial is None:
                return None
            if trial.key is not None and any(trial.key == other.key for other in self.running):
                self._again.appendleft((trial, tried))  # the same run: its result will hold for both
                return None
            known = self._settled(trial)
            if known is not None:
                self._tell(known)
                continue
            if self._left is not None and tried == 0:
                self._left -= 1
            start = Start(trial=trial, slot=self._free.popleft(), tried=tried)
            self._running[trial.number] = start
            return start
        return None

    def _take(self) -> tuple[Trial | None, int]:
        if self._again:
            return self._again.popleft()
        trial = None if self._exhausted or self._left == 0 else self._source.next_trial()
        self._exhausted = self._exhausted or trial is None
        return trial, 0

    @property
    def running(self) -> list[Trial]:
        """The trials in progress."""
        return [start.trial for start in self._running.values()]

    def freed(self, slot: int) -> None:
        """Mark a slot's hosts as free; its trial may still be completing."""
        if slot not in self._free:
            self._free.append(slot)

    def finished(self, start: Start, outcome: Outcome) -> bool:
        """Record the end of a trial; return True if it will be retried.

        A slot on which a host failed is given up, unless it is the last.
        """
        del self._running[start.trial.number]
        if outcome.cause == "host" and self._slots > 1:
            self._slots -= 1
            if start.slot in self._free:
                self._free.remove(start.slot)
        elif not any(other.slot == start.slot for other in self._running.values()):
            self.freed(start.slot)
        if outcome.state is State.FAILED and outcome.cause in TRANSIENT and start.tried < self._retries:
            self._again.append((start.trial, start.tried + 1))
            return True
        self._tell(Ended(trial=start.trial, outcome=outcome))
        return False

    @property
    def slots_left(self) -> int:
        """The number of slots that were not given up."""
        return self._slots

    def halt(self) -> None:
        """Start no more trials."""
        self._halted = True

    @property
    def done(self) -> bool:
        """True if nothing runs and nothing will be started."""
        return not self._running and (self._halted or (self._exhausted and not self._again))

    def _tell(self, ended: Ended) -> None:
        self.ended.append(ended)
        self._source.tell(ended.trial, ended.outcome)
