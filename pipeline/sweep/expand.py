"""The trials of a sweep, each with its run key, made from the command line; and the slots of the cluster.

A trial is one combination of the sweep's values. A slot is a part of the cluster on which one trial runs at a time.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.config import build, compose
from pipeline.config.build import RunConfig, stored_overrides
from pipeline.config.overrides.trials import Overrides, TrialComposer, jobs
from pipeline.config.schema import SweepConfig
from pipeline.config.step_source import StepSource, refuse_unused_steps
from pipeline.core.errors import UsageError
from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.printable import hydra_text
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from pipeline.data import store, trees
from pipeline.data.manifest import Pack
from pipeline.data.trees import Tree
from pipeline.execution.run import code_reader, prepare
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.steps import making
from pipeline.sweep.trial import Outcome, Trial


class Grid:
    """The trials of a sweep that are known in advance, in order (a TrialSource)."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials = trials
        self._next = 0

    @property
    def total(self) -> int:
        return len(self._trials)

    def next_trial(self) -> Trial | None:
        if self._next == len(self._trials):
            return None
        self._next += 1
        return self._trials[self._next - 1]

    def watch(self, running: Sequence[Trial]) -> None:
        """Do nothing: the trials of a grid are independent."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Do nothing: the trials of a grid are independent."""


_NOT_OF_THE_RUN = ("sweep.", "search=", "search.", "notify.", "hydra.")  # how overrides begin that make no other run


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space of a grid: all of its trials in order."""

    trials: tuple[Trial, ...]
    duplicates: int  # combinations that gave the same run as an earlier one
    slots: tuple[Cluster, ...]
    settings: SweepConfig

    @property
    def key(self) -> str:
        """A digest of the trials' keys, independent of their order; '' while data is missing."""
        digests = [trial.run.key.digest for trial in self.trials if trial.run is not None]
        return sha256_text(canonical_json(sorted(digests)))[:KEY_LENGTH] if len(digests) == len(self.trials) else ""

    @property
    def configurations_digest(self) -> str:
        """A digest of the search space: configurations and topologies, without code, data, environment."""
        digests = sorted(configuration_digest(trial.config) for trial in self.trials)
        return sha256_text(canonical_json(digests))[:KEY_LENGTH]


def configuration_digest(config: RunConfig) -> str:
    """Return a digest of one configuration and its topology."""
    return sha256_text(canonical_json([config.canonical, config.topology]))


def expand(words: Sequence[str], *, root: Path, local_gpus: int) -> Space:
    """Return all trials of a command line.

    ``words``: Hydra overrides with sweep values (comma lists, choice, range, glob), or ``sweep=NAME`` for a grid in
    conf/. ``local_gpus``: the number of this computer's GPUs. Raises UsageError: an invalid override or value.
    """
    return of_jobs(jobs(words), root=root, local_gpus=local_gpus)


def of_jobs(combinations: Sequence[Overrides], *, root: Path, local_gpus: int) -> Space:
    """Return the trials of combinations that Hydra has already expanded."""
    factory = TrialFactory(root=root, local_gpus=local_gpus)
    common = set(combinations[0]).intersection(*combinations[1:]) if combinations else set()
    for word in (word for job in combinations for word in job if word not in common):
        name = word.lstrip("+").partition("=")[0]
        if name.partition(".")[0] in ("paths", "tracking", "notify"):  # all trials would be the same run
            raise UsageError(
                f"{name} is no part of a run, so several values of it make no trials; "
                f"a text with a comma is written {name}=\"'a,b'\""
            )
    trials: list[Trial] = []
    seen: set[str] = set()
    with compose.hydra_ready():
        for job in combinations:
            chosen = tuple(word for word in job if word not in common)
            trial = factory.trial(len(trials), chosen, job)
            if trial.run is not None:
                identity = trial.run.key.digest
            else:  # without its data it has no key yet, so it is compared by its configuration and the data's inputs
                resolved = trial.config.resolved
                section = dict(resolved.get("program") or resolved["dataset"])
                inputs = [section.get("source"), section.get("data"), resolved.get("step")]
                identity = canonical_json([configuration_digest(trial.config), inputs])
            if identity not in seen:
                seen.add(identity)
                trials.append(trial)
    return Space(
        trials=tuple(trials),
        duplicates=len(combinations) - len(trials),
        slots=factory.slots(),
        settings=factory.settings,
    )


def make_step(config: RunConfig, say: Callable[[str], None], at_once: int = 1) -> bool:
    """Run the step whose output is a trial's data, if necessary. False: nothing was run."""
    return config.step is not None and config.step.path is None and config.step.make(say, at_once) > 0


def fetch(config: RunConfig, say: Callable[[str], None]) -> None:
    """Fetch the data set of a trial if it is missing."""
    if config.script is None and store.find(config.train.dataset, config.data_dir) is None:
        pack = store.fetch(config.train.dataset, config.data_dir)
        say(f"{pack.manifest.name}: {pack.manifest.count:,} images in {pack.path}")


class TrialFactory:
    """Creates the trials of one sweep from overrides. Use within ``compose.hydra_ready()``."""

    def __init__(self, *, root: Path, local_gpus: int) -> None:
        self._root, self._local_gpus = root, local_gpus
        self._composer = TrialComposer()
        self._sources = code_reader(root)
        self._settings: SweepConfig | None = None  # those of the first trial
        self._slots: dict[str, tuple[Cluster, ...]] = {}  # by the cluster section as JSON
        self._packs: dict[str, Pack | None] = {}  # by the data set's settings as JSON

    @property
    def settings(self) -> SweepConfig:
        assert self._settings is not None, "a sweep has at least one trial"
        return self._settings

    def slots(self) -> tuple[Cluster, ...]:
        """Return the parts of the cluster for concurrent trials; empty if the trials differ in their clusters."""
        if len(self._slots) == 1:
            return next(iter(self._slots.values()))
        if any(len(slots) > 1 for slots in self._slots.values()) and self.settings.slots != "auto":
            raise UsageError("sweep.nodes and sweep.slots need one cluster, and the trials differ in cluster")
        return ()

    def forget_packs(self) -> None:
        """Look up data packs again; call after one was fetched."""
        self._packs.clear()

    def trial(self, number: int, chosen: Overrides, overrides: Overrides) -> Trial:
        """Configure a trial for the first slot's hosts. ``chosen``: what distinguishes the trial. Raises UsageError."""
        try:
            return self._trial(number, chosen, overrides)
        except UsageError as error:
            if number == 0:  # probably wrong in all trials
                raise
            raise UsageError(f"trial {' '.join(chosen)}: {error.what}", hint=error.hint) from error

    def _trial(self, number: int, chosen: Overrides, overrides: Overrides) -> Trial:
        resolved = self._composer.resolve(overrides)

        def step(text: str, resolved: Mapping[str, Any]) -> StepSource:
            return making.data_step(text, resolved, self._root)

        whole_config = build.build(
            resolved, overrides, root=self._root, local_gpus=self._local_gpus, shares_batch=False, steps=step
        )
        refuse_unused_steps(resolved, whole_config.step)
        self._settings = self._settings or whole_config.sweep
        if whole_config.sweep != self._settings:
            raise UsageError("sweep.… says how the whole sweep runs; it can't differ from trial to trial")
        cluster_json = canonical_json(resolved["cluster"])
        if cluster_json not in self._slots:
            gpus = _gpu_names(self._local_gpus) if whole_config.cluster.device == "cuda" else []
            self._slots[cluster_json] = slots(whole_config.cluster, whole_config.sweep, gpus)
        cluster = self._slots[cluster_json][0]
        if whole_config.script is None:
            build.refuse_uneven(whole_config.train.trainer, cluster)
        # the stored configuration and overrides name the slot's hosts, so that `doit train` with them is the same run
        section = cluster_section(whole_config.resolved["cluster"], whole_config.cluster, cluster)
        hosts = host_overrides(whole_config.cluster, cluster)
        dropped = (*_NOT_OF_THE_RUN, *(f"{word.partition('=')[0]}=" for word in hosts))
        config = dataclasses.replace(
            whole_config,
            cluster=cluster,
            resolved={**whole_config.resolved, "cluster": section},
            overrides=(*(word for word in whole_config.overrides if not word.lstrip("+").startswith(dropped)), *hosts),
        )
        pack = self._pack(config)
        run = prepare(config, self._root, pack, self._sources) if pack is not None else None
        without_secrets = stored_overrides(chosen, resolved, config.secrets)
        return Trial(number=number, chosen=without_secrets, overrides=config.overrides, config=config, run=run)

    def _pack(self, config: RunConfig) -> Pack | Tree | None:
        """Return the trial's data; None if a step or a download has to make it first."""
        if config.step is not None and config.step.path is None:
            return None
        if config.script is not None:
            return trees.tree(config.script.data, config.data_dir)
        dataset_json = canonical_json([dataclasses.asdict(config.train.dataset), str(config.data_dir)])
        if dataset_json not in self._packs:
            self._packs[dataset_json] = store.find(config.train.dataset, config.data_dir)
        return self._packs[dataset_json]


def _gpu_names(count: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",")][:count]
    return [str(number) for number in range(count)]


# ----------------------------------------------------------------------------------------------- slots
_GPUS = "CUDA_VISIBLE_DEVICES"


def slots(cluster: Cluster, settings: SweepConfig, gpus: Sequence[str]) -> tuple[Cluster, ...]:
    """Return the part of the cluster for each slot; by default one slot with the whole cluster.

    ``sweep.nodes`` splits the hosts into groups. ``sweep.slots`` lets several trials share each group; each gets its
    own GPUs (numbered from 0 on the host) and a share of the cores. ``gpus``: those of this computer, as named by
    CUDA_VISIBLE_DEVICES. Raises UsageError: the groups don't fit, or a trial would have another key in another slot.
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
    has_gpus = bool(gpus) if _is_here(cluster) else True
    return tuple(_share_of_group(group, share, shares, gpus, has_gpus) for group in groups for share in range(shares))


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
    topologies = [[(host.nproc_per_node, dict(host.env)) for host in group] for group in groups]
    for group, topology in zip(groups, topologies, strict=True):
        if topology != topologies[0]:
            names = " and ".join(" + ".join(host.label for host in hosts) for hosts in (group, groups[0]))
            raise UsageError(
                f"sweep.nodes={nodes}: {names} differ in nproc_per_node or env, "
                "so a trial's key would depend on where it ran; give the hosts equal values"
            )
    return tuple(dataclasses.replace(cluster, hosts=group) for group in groups)


def _shares(cluster: Cluster, requested: Any, gpus: Sequence[str]) -> int:
    """Return how many trials share a group of hosts: ``sweep.slots`` checked; for auto, as many as have GPUs here."""
    if requested == "auto":
        if not _is_here(cluster) or any(_GPUS in host.env for host in cluster.hosts):
            return 1
        return max(1, len(gpus) // cluster.hosts[0].nproc_per_node)
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
        raise UsageError(f"sweep.slots={requested} must be a whole number from 1, or auto")
    need = requested * cluster.hosts[0].nproc_per_node
    if _is_here(cluster) and gpus and need > len(gpus) and requested > 1:
        raise UsageError(
            f"sweep.slots={requested} with {counted(cluster.hosts[0].nproc_per_node, 'rank')} each needs {need} GPUs, "
            f"there are {len(gpus)}; set cluster.nproc_per_node={max(1, len(gpus) // requested)}, or fewer slots"
        )
    return requested


def _is_here(cluster: Cluster) -> bool:
    return launchers.capabilities(cluster).is_this_computer


def _are_granted(cluster: Cluster) -> bool:
    return launchers.capabilities(cluster).hosts_are_granted


def _share_of_group(group: Cluster, share: int, shares: int, gpus: Sequence[str], has_gpus: bool) -> Cluster:
    """Return the hosts of a group, each with the GPUs of one of ``shares`` trials (``share`` counts from 0)."""
    hosts = []
    for host in group.hosts:
        numbers = range(share * host.nproc_per_node, (share + 1) * host.nproc_per_node)
        names = [gpus[number] if _is_here(group) and number < len(gpus) else str(number) for number in numbers]
        placement = {_GPUS: ",".join(names)} if has_gpus else {}
        hosts.append(dataclasses.replace(host, placement=placement, shared_by=shares))
    return dataclasses.replace(group, hosts=tuple(hosts))


def cluster_section(section: dict[str, Any], whole: Cluster, part: Cluster) -> dict[str, Any]:
    """Return the ``cluster`` section of config.json for a trial that uses ``part`` of the hosts of ``whole``."""
    if part.nnodes == whole.nnodes:
        return section
    if _are_granted(part):
        return {**section, "nnodes": part.nnodes}
    return {**section, "hostfile": None, "hosts": [_host_entry(host) for host in part.hosts]}


def host_overrides(whole: Cluster, part: Cluster) -> tuple[str, ...]:
    """Return the overrides that select ``part``'s hosts, to repeat a trial; empty for the whole cluster."""
    if part.nnodes == whole.nnodes:
        return ()
    return (f"cluster.nnodes={part.nnodes}",) if _are_granted(part) else _explicit_hosts(part)


def placed(config: RunConfig, part: Cluster) -> RunConfig:
    """Return the configuration of a trial, made for the first slot, for another slot. The trial's key is unchanged."""
    if [host.label for host in part.hosts] == [host.label for host in config.cluster.hosts]:
        return dataclasses.replace(config, cluster=part)  # only the GPUs differ
    # TrialFactory.trial has put words for the hosts of the first slot in place of the user's own
    kept = (word for word in config.overrides if not word.startswith(("cluster.hostfile=", "cluster.hosts=")))
    section = {**config.resolved["cluster"], "hostfile": None, "hosts": [_host_entry(host) for host in part.hosts]}
    return dataclasses.replace(
        config,
        cluster=part,
        resolved={**config.resolved, "cluster": section},
        overrides=(*kept, *_explicit_hosts(part)),
    )


def _explicit_hosts(part: Cluster) -> tuple[str, ...]:
    entries = (_host_entry(host).items() for host in part.hosts)
    hosts = [{name: value for name, value in entry if value not in (None, {})} for entry in entries]
    return ("cluster.hostfile=null", f"cluster.hosts={hydra_text(hosts)}")


def _host_entry(host: Host) -> dict[str, Any]:
    entry = dataclasses.asdict(host)
    return {name: value for name, value in entry.items() if name not in ("placement", "shared_by", "secrets")}
