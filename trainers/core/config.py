"""The typed configuration of a training (standard library only). A group (model, optimizer, schedule, strategy) has
several options; each option is a module, with its settings in a dataclass derived from a base class here. The
controller registers these classes as Hydra schemas, and the node half reads ``RUN_DIR/config.json`` with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from trainers.core.errors import KEYED_UNLESS_DEFAULT
from trainers.core.errors import ConfigError as ConfigError
from trainers.core.errors import at_least as at_least
from trainers.core.errors import below_one as below_one
from trainers.core.errors import check_target as check_target
from trainers.core.errors import choice as choice
from trainers.core.errors import image_sides as image_sides
from trainers.core.errors import later_fields as later_fields

_METRIC = re.compile(r"[A-Za-z][\w-]*")


@dataclass(kw_only=True)
class TrainerConfig:
    """How long to train, in what batches, and how often to look.

    Attributes:
        epochs: passes over the train split.
        max_steps: optimizer steps after which the run ends, if its epochs haven't ended before; null: no such bound.
        global_batch_size: images of an optimizer step, over all ranks and micro-batches.
        accumulate_steps: micro-batches of each rank (with shards: of each part) in an optimizer step; saves memory, not
            time.
        clip_norm: largest norm of a step's gradients, taken together; larger ones are scaled down to it; 0: no limit.
        shards: number of equal parts of the global batch, a power of two. Runs with 1, 2, 4, … up to that number of
            ranks then have the same weights, bit for bit. 0: a part for each rank; the weights depend on their number.
        precision: of autocast: fp32, bf16, fp16, or auto: bf16 where the device computes in it, else fp32.
        compile: torch.compile the network's forward and backward pass of a step.
        compile_mode: default, or reduce-overhead, which replays CUDA graphs.
        deterministic: false lets cuDNN take the quickest algorithms; then two runs of a key may differ in their bits.
        loss: a class or function of your own, as package.module:name; null: cross-entropy.
        loss_args: its arguments by name.
        metrics: more metrics, each a function of your own: name in the record → package.module:name.
        label_smoothing: share of the target that is spread over all classes, from 0 to below 1.
        tta: views of an image whose logits are averaged in an evaluation: none, mirror or multicrop.
        log_every_steps: optimizer steps from one logged loss to the next.
        eval_every_epochs: epochs from one evaluation of the val split to the next.
        checkpoint_every_epochs: epochs from one checkpoint to the next.
        checkpoint_every_steps: more checkpoints, inside the epochs; null: none.
        checkpoint_every_minutes: the same by time, looked at whenever the loss is logged; null: none.
        keep_checkpoints: how many of the newest checkpoints stay.
        keep_best: keep the weights with the best val/accuracy as checkpoints/best.pt.
        patience: evaluations of the val split without a better val/accuracy after which the run ends; null: none do.
        ema: decay of a running average of the weights, such as 0.999, which is evaluated and saved in their place; 0:
            none.
        class_weights: a weight for each class in the loss, or balanced: each class counts as much; null: each image.
        sync_batchnorm: batch normalisation over the micro-batches of all ranks instead of each rank's own (GPUs only).
        skip_nonfinite: leave out updates with NaN or infinite gradients instead of stopping.
        freeze: patterns of parameter names, such as [conv1.*, layer1.*]: matching parameters stay as they are at the
            start, and so do the statistics of a batch normalisation that a pattern matches as a whole.
        digests: steps from one record of digests (of inputs, gradients, weights and buffers) to the next. `doit diff`
            finds by them where two runs begin to differ. 0: none.
    """

    epochs: int = 10
    max_steps: int | None = None
    global_batch_size: int = 128
    accumulate_steps: int = 1
    clip_norm: float = field(default=0.0, metadata=KEYED_UNLESS_DEFAULT)
    shards: int = field(default=0, metadata=KEYED_UNLESS_DEFAULT)
    precision: str = "auto"
    compile: bool = False
    compile_mode: str = "default"
    deterministic: bool = True
    loss: str | None = field(default=None, metadata=KEYED_UNLESS_DEFAULT)
    loss_args: dict[str, Any] = field(default_factory=dict, metadata=KEYED_UNLESS_DEFAULT)
    metrics: dict[str, str] = field(default_factory=dict, metadata=KEYED_UNLESS_DEFAULT)
    label_smoothing: float = 0.0
    tta: str = "none"
    log_every_steps: int = 10
    eval_every_epochs: int = 1
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: float | None = None
    keep_checkpoints: int = 2
    keep_best: bool = False
    skip_nonfinite: bool = False
    patience: int | None = field(default=None, metadata=KEYED_UNLESS_DEFAULT)
    ema: float = field(default=0.0, metadata=KEYED_UNLESS_DEFAULT)
    class_weights: Any = field(default=None, metadata=KEYED_UNLESS_DEFAULT)
    sync_batchnorm: bool = field(default=False, metadata=KEYED_UNLESS_DEFAULT)
    freeze: list[str] = field(default_factory=list, metadata=KEYED_UNLESS_DEFAULT)
    digests: int = field(default=0, metadata=KEYED_UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "log_every_steps", "eval_every_epochs"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("accumulate_steps", "checkpoint_every_epochs", "keep_checkpoints"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("max_steps", "checkpoint_every_steps", "patience"):
            if getattr(self, name) is not None:
                at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.checkpoint_every_minutes is not None and not self.checkpoint_every_minutes > 0:
            raise ConfigError(
                f"trainer.checkpoint_every_minutes={self.checkpoint_every_minutes} must be greater than 0"
            )
        choice("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        choice("trainer.compile_mode", self.compile_mode, ("default", "reduce-overhead"))
        if self.compile and self.compile_mode == "reduce-overhead" and self.accumulate_steps > 1:
            raise ConfigError(
                f"trainer.compile_mode=reduce-overhead can't go with trainer.accumulate_steps={self.accumulate_steps}: "
                "a replayed CUDA graph overwrites what the micro-batch before it left; take "
                "trainer.compile_mode=default, or trainer.accumulate_steps=1"
            )
        choice("trainer.tta", self.tta, ("none", "mirror", "multicrop"))
        at_least("trainer.clip_norm", self.clip_norm, 0)
        at_least("trainer.digests", self.digests, 0)
        below_one("trainer.ema", self.ema)
        self._check_class_weights()
        self._check_own()
        below_one("trainer.label_smoothing", self.label_smoothing)
        if not all(self.freeze):
            raise ConfigError(f"trainer.freeze={self.freeze} has an empty pattern; is a shell variable unset?")
        if self.shards < 0 or self.shards & (self.shards - 1):
            raise ConfigError(
                f"trainer.shards={self.shards} must be 0 (off) or a power of two, as gradients are added pairwise: "
                "2, 4, 8, 16, …"
            )

    def _check_class_weights(self) -> None:
        weights = self.class_weights
        if weights is None or weights == "balanced":
            return
        numbers = isinstance(weights, list) and all(type(item) in (int, float) and item >= 0 for item in weights)
        if not numbers or not any(weights):
            raise ConfigError(
                f"trainer.class_weights={weights!r} must be balanced, or a list with a number for each class, none "
                "below 0: [1, 2.5]"
            )

    def _check_own(self) -> None:
        """Check the metrics and the loss that are functions of the user's own."""
        for name, target in self.metrics.items():
            if not _METRIC.fullmatch(name) or name in ("loss", "accuracy"):
                raise ConfigError(f"trainer.metrics.{name}: choose another name, of letters, digits, - and _")
            check_target(f"trainer.metrics.{name}", target)
        if self.loss is None:
            if self.loss_args:
                raise ConfigError("trainer.loss_args are for a loss of your own: set trainer.loss too")
            return
        check_target("trainer.loss", self.loss)
        if self.label_smoothing or self.class_weights is not None:
            field_name = "label_smoothing" if self.label_smoothing else "class_weights"
            raise ConfigError(
                f"trainer.{field_name} belongs to cross-entropy, and trainer.loss={self.loss} has its own arguments "
                "(trainer.loss_args)"
            )

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError if ``world_size`` ranks cannot take equal blocks of 1, 2, 4, … of the ``shards`` parts."""
        if self.shards and self.shards % world_size:
            good = [str(1 << power) for power in range(self.shards.bit_length())]
            raise ConfigError(
                f"trainer.shards={self.shards} can't be shared evenly by {world_size} ranks; "
                f"numbers of ranks that can: {', '.join(good)}"
            )


OWN = "own"
"""The option of a group whose ``target`` names a user-defined class or function."""

_LARGEST_SEED = 2**63 - 1  # the largest seed of a torch.Generator
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(kw_only=True)
class Settings:
    """The settings of an option: fields with defaults, checked in ``__post_init__``. ``name``: of the option."""

    name: str

    def check(self, config: TrainConfig) -> None:
        """Refuse what does not go together with the rest of the configuration. Raises ConfigError."""


@dataclass(kw_only=True)
class DatasetConfig(Settings):
    """What to train on. `doit fetch` makes the splits and the normalisation, and writes them to the pack's manifest.

    Attributes:
        source: folder, archive, file:// or any fsspec URL with the files; null: the official addresses.
        holdout: images of the training set that become the test split (for sets without one).
        val_size: images of the training set that become the val split.
        crop_padding: pixels on each side by which the random crop may move; 0: no crop.
        crop_border: what the random crop sees beyond the edge: black, or reflect.
        flip: random horizontal mirroring.
        alternate_flip: draw the first epoch's mirroring alone; from then on an image is mirrored in every other epoch.
        random_resized_crop: smallest area of a crop of random size and proportions (3:4 to 4:3), as a share of the
            image's area, such as 0.08; 0: no such crop. It needs a pack that keeps the files (dataset.decoded_limit).
        augmentation: a class or function of your own, as package.module:name, that changes training images.
        augmentation_args: its arguments by name.
        cutout: side in pixels of a square, anywhere in the image, that is set to the mean colour; 0: none.
        normalise: by the mean and standard deviation of each channel over the train split.
    """

    source: str | None = None
    holdout: int = 0
    val_size: int = 0
    crop_padding: int = 0
    crop_border: str = "black"
    flip: bool = False
    alternate_flip: bool = False
    random_resized_crop: float = field(default=0.0, metadata=KEYED_UNLESS_DEFAULT)
    augmentation: str | None = field(default=None, metadata=KEYED_UNLESS_DEFAULT)
    augmentation_args: dict[str, Any] = field(default_factory=dict, metadata=KEYED_UNLESS_DEFAULT)
    cutout: int = 0
    normalise: bool = True

    def __post_init__(self) -> None:
        at_least("dataset.holdout", self.holdout, 0)
        at_least("dataset.val_size", self.val_size, 0)
        at_least("dataset.crop_padding", self.crop_padding, 0)
        at_least("dataset.cutout", self.cutout, 0)
        choice("dataset.crop_border", self.crop_border, ("black", "reflect"))
        if self.alternate_flip and not self.flip:
            raise ConfigError("dataset.alternate_flip=true needs dataset.flip=true")
        below_one("dataset.random_resized_crop", self.random_resized_crop)
        if self.augmentation is not None:
            check_target("dataset.augmentation", self.augmentation)
        elif self.augmentation_args:
            raise ConfigError("dataset.augmentation_args are for an augmentation of your own: set dataset.augmentation")


@dataclass(kw_only=True)
class ModelConfig(Settings):
    """Which network; channels, image size and class count come from the data."""


@dataclass(kw_only=True)
class InitConfig:
    """The weights that a run starts from; fresh ones, drawn from the seed, without ``weights`` and ``run``.

    Attributes:
        weights: the key of a finished run, a .pt or .pth file, the address of one (https:// or any fsspec URL), or,
            with model=torchvision, the name of weights that torchvision publishes: default, IMAGENET1K_V1.
        run: overrides of another run, such as 'experiment=digits seed=1', whose final weights are taken; that run is
            trained first if it isn't finished.
        sha256: the digest that the file must have; null: any. The file's digest is in the key in both cases.
    """

    weights: str | None = None
    run: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "run"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ConfigError(f"init.{name} is empty; is a shell variable unset?")
        if self.weights is not None and self.run is not None:
            raise ConfigError(
                f"init.weights={self.weights} and init.run={self.run!r}: a run starts from one; take one away"
            )
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ConfigError(f"init.sha256={self.sha256!r} must be 64 hex digits, as sha256sum prints them")

    @property
    def setting(self) -> str:
        """The setting as the user wrote it, such as ``init.run=...``; '' if the weights are fresh."""
        settings = [f"init.{name}={value}" for name, value in (("weights", self.weights), ("run", self.run)) if value]
        return settings[0] if settings else ""


@dataclass(kw_only=True)
class OptimizerConfig(Settings):
    """How a step changes the weights.

    ``elementwise``: True if an element's update depends on its own gradient and state alone, so that the optimizer can
    work on slices of tensors (strategy=fsdp).

    Attributes:
        lr: the learning rate, at the peak of the schedule.
        weight_decay: as in the optimizer of that name in torch.
        lr_scaling: multiplies lr with the world size: linear (Goyal et al. 2017), sqrt, or none. The global batch is
            configured, so none is right where the ranks change and the batch doesn't.
        decay_bias_and_norm: false spares what has one dimension from weight_decay: biases, and the weights of
            normalisation layers.
    """

    elementwise: ClassVar[bool] = False

    lr: float = 0.1
    weight_decay: float = 0.0
    lr_scaling: str = "none"
    decay_bias_and_norm: bool = field(default=True, metadata=KEYED_UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optimizer.lr={self.lr} must be greater than 0")
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        choice("optimizer.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))


@dataclass(kw_only=True)
class ScheduleConfig(Settings):
    """The learning rate over the run."""


@dataclass(kw_only=True)
class StrategyConfig(Settings):
    """How ranks work together.

    Attributes:
        backend: of the process group: gloo, nccl, or auto: nccl where every rank has a GPU, else gloo.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        choice("strategy.backend", self.backend, ("auto", "gloo", "nccl"))


@dataclass(frozen=True)
class Group:
    """The options of one group: each module of ``package`` that defines a dataclass derived from ``base``."""

    package: str
    base: type[Settings]


GROUPS = {
    "model": Group("trainers.models", ModelConfig),
    "optimizer": Group("trainers.optimizers", OptimizerConfig),
    "schedule": Group("trainers.schedules", ScheduleConfig),
    "strategy": Group("trainers.strategies", StrategyConfig),
}
"""The groups whose options are modules of the node half. The group dataset is not one of them: its modules belong to
the controller, which prepares the images."""


def installed_options(package: str) -> dict[str, str]:
    """Return name → module of the options that installed packages add to ``package`` through an entry point."""
    return {item.name: item.value for item in _entry_points().select(group=f"paceline.{package.rpartition('.')[2]}")}


@functools.cache  # reads the metadata of every installed distribution
def _entry_points() -> Any:
    from importlib.metadata import entry_points  # slow to import; only needed for a name that isn't built in

    return entry_points()


def option_names(folder: Path, base: type) -> list[str]:
    """Return the sorted names of a folder's modules that define a ``class …(<base>):``. Raises OSError."""
    line = re.compile(rf"^class\s+\w+\(\s*{base.__name__}\s*,?\s*\)", re.MULTILINE)
    files = [path for path in sorted(folder.glob("[!_]*.py")) if path.stem.isidentifier()]
    return [path.stem for path in files if line.search(path.read_text(encoding="utf-8", errors="replace"))]


@dataclass(kw_only=True)
class TrainConfig:
    """The part of config.json that the node half reads."""

    seed: int = 0
    dataset: DatasetConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    strategy: StrategyConfig
    init: InitConfig = field(default_factory=InitConfig)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.seed > _LARGEST_SEED:
            raise ConfigError(f"seed={self.seed} must be at most {_LARGEST_SEED}")
        for option in (self.dataset, self.model, self.optimizer, self.schedule, self.strategy):
            option.check(self)
        if self.trainer.shards:
            self._refuse_with_shards()

    def _refuse_with_shards(self) -> None:
        """Raise ConfigError for a setting by which the number of ranks would change the weights."""
        trainer = self.trainer
        compression = getattr(self.strategy, "compression", "none")
        refused = (  # rows of (is it set?, the setting as the user wrote it, what to take instead)
            (self.strategy.name != "ddp", f"strategy={self.strategy.name}", "strategy=ddp"),
            (compression != "none", "strategy.compression", "strategy.compression=none"),
            (trainer.compile, "trainer.compile=true", "trainer.compile=false"),
            (not trainer.deterministic, "trainer.deterministic=false", "trainer.deterministic=true"),
            (trainer.sync_batchnorm, "trainer.sync_batchnorm=true", "trainer.sync_batchnorm=false"),
            (self.optimizer.lr_scaling != "none", "optimizer.lr_scaling", "optimizer.lr_scaling=none"),
        )
        for is_set, setting, instead in refused:
            if is_set:
                raise ConfigError(
                    f"trainer.shards={trainer.shards} promises the same weights on any number of ranks, and {setting} "
                    f"makes them depend on it; take {instead}, or trainer.shards=0"
                )

    @property
    def targets(self) -> dict[str, str]:
        """User-defined classes and functions of the run: field → package.module:name."""
        groups = {"model": self.model, "optimizer": self.optimizer}
        targets = {f"{group}.target": getattr(item, "target", "") for group, item in groups.items() if item.name == OWN}
        if self.dataset.augmentation is not None:
            targets["dataset.augmentation"] = self.dataset.augmentation
        if self.trainer.loss is not None:
            targets["trainer.loss"] = self.trainer.loss
        return {**targets, **{f"trainer.metrics.{name}": target for name, target in self.trainer.metrics.items()}}


def parse(raw: Mapping[str, Any], settings: Callable[[str, str], type[Any]]) -> TrainConfig:
    """Type a resolved configuration; ``settings``: group, name → the option's settings class. Raises ConfigError."""
    values: dict[str, Any] = {"trainer": _typed("trainer", "default", TrainerConfig, _section(raw, "trainer"))}
    for group in ("dataset", *GROUPS):
        section = _section(raw, group)
        name = str(section.get("name"))
        values[group] = _typed(group, name, settings(group, name), section)
    init = _typed("init", "default", InitConfig, raw.get("init") or {})  # configs of old runs have no such section
    return TrainConfig(seed=raw.get("seed", 0), init=init, **values)


def _section(raw: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    section = raw.get(group)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{group} is missing: the configuration has no section of that name")
    return section


def _typed(group: str, name: str, settings: type[Any], section: Mapping[str, Any]) -> Any:
    names = {item.name for item in fields(settings)}
    for key in section:
        if key not in names:
            raise ConfigError(f"{group}.{key} is not a field of {group}={name}; it has: {', '.join(sorted(names))}")
    return settings(**section)
