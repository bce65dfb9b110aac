"""The settings classes of the whole configuration (``RootConfig``), and checks of values in any section.

An option's settings class is in the option's own module (``OPTIONS``). ``compose.register`` gives them to Hydra.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.launchers.settings import MISSING, ClusterConfig
from pipeline.core import redact
from pipeline.core.errors import UsageError
from pipeline.core.options import Options, source_of_installed
from pipeline.data.datasets import DATASETS
from trainers.core import config as node
from trainers.core.config import ConfigError
from trainers.script.settings import ProgramConfig, ScriptConfig

if TYPE_CHECKING:  # it imports Hydra
    from pipeline.config.overrides.search_space import SearchSpace

_MAX_EXPERIMENT = 500  # characters: MLflow's limit


@dataclass(kw_only=True)
class TrackingConfig:
    """Where runs are recorded: MLflow, and other trackers.

    A tracker's module derives its settings from this class, and adds its own fields.

    Attributes:
        enabled: whether runs are recorded in MLflow.
        uri: a tracking server (http://host:5000) or database; null: the sqlite file mlflow.db in the project.
        experiment: the MLflow experiment that runs are recorded in.
        system_metrics: also record how busy each host is, every 10 s and in long runs less often: processor, memory,
            network, disk, GPUs.
        tensorboard: also write event files for TensorBoard into the run folder.
        tracker: another tracker: wandb, or that of an installed package; null: none.
    """

    # no setting: the Python package that the tracker needs (wandb), checked before a run begins; None: no further one
    package: ClassVar[str | None] = None

    enabled: bool = True
    uri: str | None = None
    experiment: str = "paceline"
    system_metrics: bool = True
    tensorboard: bool = False
    tracker: str | None = None

    def __post_init__(self) -> None:
        if self.experiment.strip() in ("", ".", "..") or len(self.experiment) > _MAX_EXPERIMENT:
            raise UsageError(
                f"tracking.experiment={self.experiment[:40]!r} is no name of an experiment: it is also that of a "
                f"folder, and has 1 to {_MAX_EXPERIMENT} characters",
                hint="tracking.experiment=paceline",
            )


@dataclass(kw_only=True)
class PathsConfig:
    """Folders, relative to the project unless absolute.

    Attributes:
        runs: the folder of run folders.
        data: the folder of data packs.
    """

    runs: str = "runs"
    data: str = "data"


@dataclass(kw_only=True)
class SearchConfig:
    """How a sweep chooses its trials instead of taking a whole grid; nothing here belongs to a run or its key.

    A sampler's module derives its settings from this class, and adds its own fields.

    Attributes:
        n_trials: trials in all, also over several calls; null (search=grid alone): every combination.
        seed: the sampler's seed.
        metric: the metric to optimise, by its name in result.json.
        direction: maximize or minimize.
        objectives: several metrics, each as "val/accuracy maximize"; replaces metric and direction.
        pruner: the rule that ends bad trials early: none, median or hyperband.
        startup_trials: median: the number of trials that run to their end before any is pruned.
        warmup_epochs: median: no trial is pruned up to this epoch.
        min_epochs: hyperband: the epoch at which trials are first compared.
        reduction_factor: hyperband: one in this many trials continues.
    """

    name: str = "none"
    n_trials: int | None = None
    seed: int = 0
    metric: str = "val/accuracy"
    direction: str = "maximize"
    objectives: list[str] = field(default_factory=list)
    pruner: str = "none"
    startup_trials: int = 5
    warmup_epochs: int = 1
    min_epochs: int = 1
    reduction_factor: int = 3

    def check(self, space: SearchSpace) -> None:
        """Refuse a space that the sampler can't search. Raises UsageError."""
        if self.n_trials is None:
            raise UsageError(f"search.n_trials=null: search={self.name} needs to know how many trials there shall be")

    def total(self, space: SearchSpace) -> int:
        """Return the number of trials."""
        return int(self.n_trials or 0)


@dataclass(kw_only=True)
class SweepConfig:
    """How a sweep's trials are run; nothing here belongs to a run or its key.

    Attributes:
        name: the sweep's name; null: its key.
        nodes: hosts of the cluster that one trial runs on; null: all of them.
        slots: trials at a time on the same hosts: a number, or auto (local: GPUs // nproc_per_node, else 1).
        retries: how often a trial is repeated after a lost host or a lack of memory.
    """

    name: str | None = None
    nodes: int | None = None
    slots: Any = "auto"
    retries: int = 1


@dataclass(kw_only=True)
class NotifyConfig:
    """Notifications when a run or a sweep ends, fails or stalls; nothing here belongs to a run or its key.

    Attributes:
        command: a program with its arguments, no shell; facts in PACELINE_… variables and, as JSON, on its stdin.
    """

    command: str | None = None

    def __post_init__(self) -> None:
        if self.command is None:
            return
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise UsageError(f"notify.command={self.command!r} can't be read: {error}") from error
        if not words:
            raise UsageError("notify.command is empty", hint="notify.command=null, or the path of a program")


@dataclass(kw_only=True)
class RootConfig:
    """The whole configuration of a run, and how a sweep over it runs.

    Attributes:
        seed: the seed of initial weights, order of samples, augmentation and dropout.
        step: fields of your own steps that replace those in conf/step: step.clean.args.rate=0.3.
    """

    seed: int = 0
    dataset: node.DatasetConfig = MISSING
    model: node.ModelConfig = MISSING
    optimizer: node.OptimizerConfig = MISSING
    schedule: node.ScheduleConfig = MISSING
    trainer: node.TrainerConfig = MISSING
    strategy: node.StrategyConfig = MISSING
    init: node.InitConfig = field(default_factory=node.InitConfig)
    program: ProgramConfig = MISSING
    cluster: ClusterConfig = MISSING
    tracking: TrackingConfig = MISSING
    paths: PathsConfig = field(default_factory=PathsConfig)
    search: SearchConfig = MISSING
    sweep: SweepConfig = field(default_factory=SweepConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    step: dict[str, Any] = field(default_factory=dict)


OPTIONS = {
    "dataset": DATASETS,
    **{group: Options(group, options.package, options.base) for group, options in node.GROUPS.items()},
    "cluster": LAUNCHERS,
    "search": Options("search", "pipeline.sweep.samplers", SearchConfig),
    "tracking": Options("tracking.tracker", "pipeline.tracking.trackers", TrackingConfig),
}
"""The options of each Hydra group. Each option has the schema ``schema/<group>/<option>``."""
PROGRAMS: dict[str, type[ProgramConfig]] = {"classifier": ProgramConfig, "script": ScriptConfig}
"""The options of the group ``program``, which aren't modules of one package."""


def installed_programs() -> dict[str, str]:
    """Return the files of the scripts that other packages offer as ``program=NAME``; '' for a missing file."""
    modules = node.installed_options("paceline.programs")
    return {name: str(source_of_installed(module) or "") for name, module in modules.items()}


# ------------------------------------------------------------------------------- values of any section
def typed(settings: type[Any], raw: Mapping[str, Any]) -> Any:
    """Return an instance of the class ``settings`` from the values in ``raw``. Raises UsageError: a wrong value."""
    # if cluster.launcher=NAME changed only the launcher, raw also has fields of the other launcher
    names = {item.name for item in fields(settings)}
    try:
        return settings(**{name: value for name, value in raw.items() if name in names})
    except ConfigError as error:
        raise UsageError(str(error)) from error


def leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs (field, value), ``("cluster.hosts[0].name", "gpu1")``, for all values but lists and mappings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{field}[{number}]")
    else:
        yield field, value


def texts(value: Any) -> Iterator[str]:
    """Yield every text in plain containers, at any depth."""
    return (inner for _, inner in leaves(value) if isinstance(inner, str))


def refuse_unprintable(resolved: Mapping[str, Any]) -> None:
    """Raise UsageError for control characters outside of ``program.args``; values of ``env`` are checked separately."""
    for name, value in _outside_env(resolved):
        if not isinstance(value, str):
            continue
        if not name.startswith("program.args") and any(mark < " " or mark == "\x7f" for mark in value):
            raise UsageError(f"{redact.mask_field(name, value)} holds a control character; take it out")
        encodable(name, value)


def refuse_non_finite(resolved: Mapping[str, Any]) -> None:
    """Raise UsageError for inf and NaN, from which no key can be computed."""
    for name, value in _outside_env(resolved):
        if isinstance(value, float) and not math.isfinite(value):
            if name.startswith("program.args"):
                raise UsageError(
                    f"{name}={value}: what was typed there (12e4567, inf) is read as a number, and no finite one; in "
                    "quotes it reaches the script as it is typed",
                    hint=f"\"{name}='TEXT'\"",
                )
            raise UsageError(f"{name}={value} must be a finite number")


def _outside_env(resolved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the ``leaves`` that are not in a section ``env``."""
    return ((field, value) for field, value in leaves(resolved) if "env" not in field.split("."))


def encodable(field: str, value: str) -> None:
    """Raise UsageError for a text that can't be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{field} is not text: it holds bytes that are not UTF-8") from error
