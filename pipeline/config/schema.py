"""Typed schemas of every configuration group, registered with Hydra under the group ``schema``.

The training groups take their schemas from ``trainers.config``, so both halves read the same fields.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from trainers import config as node

MISSING: Any = "???"  # OmegaConf's own mark; importing it from there takes 0.1 s, which a finished run has no use for


@dataclass(kw_only=True)
class HostConfig:
    """One entry of ``cluster.hosts``; what is None is taken from the cluster."""

    name: str = MISSING
    port: int | None = None
    user: str | None = None
    address: str | None = None
    interface: str | None = None
    nproc_per_node: int | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ClusterConfig:
    """Which hosts, how many ranks on each, and how they are reached. Times in seconds."""

    launcher: str = "local"
    hosts: list[HostConfig] = field(default_factory=list)
    hostfile: str | None = None  # replaces `hosts`: one `user@host:port slots=N` a line
    nproc_per_node: Any = "auto"  # int or auto (local only: GPUs, or 2 CPU ranks); OmegaConf 2.3 fails on int | str
    ssh_config: str | None = None  # an ssh_config file besides your own ~/.ssh/config
    interface: str | None = None  # network interface for the collectives, on every host
    python: str | None = None  # interpreter on the hosts; None: the controller's where it exists, else python3
    workdir: str | None = None  # scratch folder on the hosts; None: ~/.cache/paceline
    env: dict[str, str] = field(default_factory=dict)
    rendezvous: str = "static"  # how ranks find each other: static, c10d, or file (a folder that all hosts share)
    rendezvous_dir: str | None = None  # that folder
    connect_timeout_s: float = 5.0
    lease_s: float = 600.0  # a host ends its part of a run when the controller is gone for this long
    max_restarts: int = 0  # further attempts, from the last checkpoint, when a run fails


@dataclass(kw_only=True)
class TrackingConfig:
    """Where MLflow keeps its records; uri None is a sqlite file in the project."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = "paceline"


@dataclass(kw_only=True)
class PathsConfig:
    """Folders, relative to the project unless absolute."""

    runs: str = "runs"
    data: str = "data"


@dataclass(kw_only=True)
class SearchConfig:
    """How a sweep chooses its trials instead of taking a whole grid; nothing here belongs to a run or its key."""

    name: str = "none"
    n_trials: int | None = None  # in all, also over several calls; None (grid alone): every combination
    seed: int = 0
    metric: str = "val/accuracy"
    direction: str = "maximize"
    objectives: list[str] = field(default_factory=list)  # several: "val/accuracy maximize"; replaces metric, direction
    pruner: str = "none"
    startup_trials: int = 5  # median: as many trials run to their end before any is pruned
    warmup_epochs: int = 1  # median: no trial is pruned for what it was up to this epoch
    min_epochs: int = 1  # hyperband: the first look at a trial
    reduction_factor: int = 3  # hyperband: one of so many goes on


@dataclass(kw_only=True)
class SweepConfig:
    """How a sweep's trials are run; nothing here belongs to a run or its key."""

    name: str | None = None  # what the sweep is called; None: by its content
    nodes: int | None = None  # hosts of the cluster that one trial runs on; None: all of them
    slots: Any = "auto"  # trials at a time on the same host(s): int, or auto (local: GPUs // nproc_per_node, else 1)
    retries: int = 1  # further tries of a trial that a lost host or a lack of memory has ended


@dataclass(kw_only=True)
class RootConfig:
    """The whole configuration of a run, and how a sweep over it runs."""

    seed: int = 0
    dataset: node.DatasetConfig = MISSING
    model: node.ModelConfig = MISSING
    optimizer: node.OptimizerConfig = MISSING
    schedule: node.ScheduleConfig = MISSING
    trainer: node.TrainerConfig = MISSING
    strategy: node.StrategyConfig = MISSING
    cluster: ClusterConfig = MISSING
    tracking: TrackingConfig = MISSING
    paths: PathsConfig = field(default_factory=PathsConfig)
    search: SearchConfig = MISSING
    sweep: SweepConfig = field(default_factory=SweepConfig)


@functools.cache  # a sweep composes each trial
def register() -> None:
    """Put all schemas into Hydra's store; calling it twice does no harm."""
    from hydra.core.config_store import ConfigStore

    store: Any = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    launcher = {"_target_": "hydra_plugins.paceline_launcher.PacelineLauncher"}
    store.store(group="hydra/launcher", name="paceline", node=launcher)
    store.store(group="schema", name="cluster", node=ClusterConfig)
    store.store(group="schema", name="tracking", node=TrackingConfig)
    store.store(group="schema", name="search", node=SearchConfig)
    for group, schemas in node.SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
