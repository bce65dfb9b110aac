"""The typed training configuration, read by both halves (standard library only).

The controller registers these dataclasses as Hydra schemas, so a wrong key or type is refused before
anything starts; the node half reads the same dataclasses back from ``RUN_DIR/config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration value that cannot work; the text names the field, the value and the valid ones."""


def _choice(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ConfigError(f"{name}={value!r} is not an option; choose one of: {', '.join(options)}")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise ConfigError(f"{name}={value} must be at least {low}")


# --------------------------------------------------------------------------------------- dataset
@dataclass(kw_only=True)
class DatasetConfig:
    """What to train on. Splits and normalisation are made by `doit fetch` and stand in the pack's manifest.

    Sizes count images. ``crop_padding`` and ``cutout`` are in pixels (0 switches them off). ``alternate_flip``
    draws only the first epoch's mirroring; from then on an image is mirrored in every other epoch.
    """

    name: str = "digits"
    source: str | None = None  # folder, archive, file:// or any fsspec URL; None = the official addresses
    holdout: int = 0  # images of the training set that become the test split (for sets without one)
    val_size: int = 0  # images of the training set that become the val split
    crop_padding: int = 0
    crop_border: str = "black"  # what the random crop sees beyond the edge: black, or reflect
    flip: bool = False  # random horizontal flip
    alternate_flip: bool = False
    cutout: int = 0  # side of a square that is set to the mean colour, anywhere in the image
    normalise: bool = True  # by the per-channel mean and std of the train split

    def __post_init__(self) -> None:
        _at_least("dataset.holdout", self.holdout, 0)
        _at_least("dataset.val_size", self.val_size, 0)
        _at_least("dataset.crop_padding", self.crop_padding, 0)
        _at_least("dataset.cutout", self.cutout, 0)
        _choice("dataset.crop_border", self.crop_border, ("black", "reflect"))
        if self.alternate_flip and not self.flip:
            raise ConfigError("dataset.alternate_flip=true needs dataset.flip=true")


@dataclass(kw_only=True)
class SyntheticConfig(DatasetConfig):
    """Generated images; an accuracy on them means nothing."""

    name: str = "synthetic"
    size: int = 2048  # images in the training set, before val_size is taken off
    test_size: int = 512
    num_classes: int = 10
    channels: int = 3
    image_size: int = 32  # pixels, height = width
    generator_seed: int = 0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        for name in ("size", "test_size", "num_classes", "channels", "image_size"):
            _at_least(f"dataset.{name}", getattr(self, name), 1)


# ----------------------------------------------------------------------------------------- model
@dataclass(kw_only=True)
class ModelConfig:
    """Which network; channels, image size and class count come from the data."""

    name: str = "small_cnn"


@dataclass(kw_only=True)
class SmallCNNConfig(ModelConfig):
    """Two convolutions and two dense layers, after the PyTorch MNIST example."""

    name: str = "small_cnn"
    width: int = 32  # filters of the first convolution; the second has twice as many
    hidden: int = 128
    dropout: float = 0.25  # after the convolutions; twice this before the last layer

    def __post_init__(self) -> None:
        _at_least("model.width", self.width, 1)
        _at_least("model.hidden", self.hidden, 1)
        if not 0 <= self.dropout < 0.5:
            raise ConfigError(f"model.dropout={self.dropout} must lie in [0, 0.5)")


@dataclass(kw_only=True)
class WhitenedCNNConfig(ModelConfig):
    """Six convolutions behind a fixed whitening layer, for short trainings on small images."""

    name: str = "whitened_cnn"
    width: int = 64  # filters of the first block; the other two have four times as many

    def __post_init__(self) -> None:
        _at_least("model.width", self.width, 1)


# ------------------------------------------------------------------------- optimizer and schedule
@dataclass(kw_only=True)
class OptimizerConfig:
    """``lr_scaling`` multiplies lr with the world size: none (the default; the global batch is
    configured, so its meaning doesn't change with the ranks), linear (Goyal et al. 2017) or sqrt."""

    name: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    lr_scaling: str = "none"

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optimizer.lr={self.lr} must be greater than 0")
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        _choice("optimizer.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum} must lie in [0, 1)")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov=true needs optimizer.momentum greater than 0")


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    name: str = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must lie in [0, 1)")


@dataclass(kw_only=True)
class MuonConfig(OptimizerConfig):
    """Orthogonalised momentum for convolution filters and hidden matrices (Jordan 2024); for the last matrix (the
    head) and everything with one dimension SGD with Nesterov momentum and rates of their own.

    ``lr`` is the share of a filter bank's length that one step moves it. The schedule acts on all three rates.
    ``weight_decay`` takes that share off head and biases in a step at the peak of the schedule.
    """

    name: str = "muon"
    lr: float = 0.24
    momentum: float = 0.6
    iterations: int = 3  # of Newton-Schulz
    head_lr: float = 0.02
    bias_lr: float = 100.0
    sgd_momentum: float = 0.85

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        for name in ("momentum", "sgd_momentum"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must lie in (0, 1)")
        for name in ("head_lr", "bias_lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be greater than 0")
        _at_least("optimizer.iterations", self.iterations, 1)


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate over the run; ``constant`` has nothing to set."""

    name: str = "constant"


@dataclass(kw_only=True)
class StepScheduleConfig(ScheduleConfig):
    """lr × gamma after every ``step_epochs`` epochs."""

    name: str = "step"
    step_epochs: int = 10
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _at_least("schedule.step_epochs", self.step_epochs, 1)


@dataclass(kw_only=True)
class OneCycleScheduleConfig(ScheduleConfig):
    """Smith & Topin 2017: up to lr over ``warmup`` of all steps, then down to nearly zero."""

    name: str = "one_cycle"
    warmup: float = 0.25
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        if not 0 < self.warmup < 1:
            raise ConfigError(f"schedule.warmup={self.warmup} must lie in (0, 1)")


@dataclass(kw_only=True)
class TriangleScheduleConfig(ScheduleConfig):
    """In a straight line from ``start`` × lr up to lr over ``warmup`` of all steps, then down to ``end`` × lr."""

    name: str = "triangle"
    warmup: float = 0.2  # 0: down from the first step
    start: float = 0.2
    end: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"schedule.warmup={self.warmup} must lie in [0, 1)")
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name}={getattr(self, name)} must lie in [0, 1]")


# --------------------------------------------------------------------------- trainer and strategy
@dataclass(kw_only=True)
class TrainerConfig:
    """``epochs`` bounds the run, ``max_steps`` too where it is set (the smaller bound wins).
    ``global_batch_size`` counts images over all ranks and micro-batches of an optimizer step.
    ``precision`` is that of autocast; auto is bf16 where the device computes in it, else fp32.
    ``compile_mode=reduce-overhead`` replays CUDA graphs."""

    epochs: int = 10
    max_steps: int | None = None
    global_batch_size: int = 128
    accumulate_steps: int = 1  # micro-batches of each rank in an optimizer step: saves memory, not time
    precision: str = "auto"
    compile: bool = False  # torch.compile the network's forward and backward pass of a step
    compile_mode: str = "default"
    label_smoothing: float = 0.0
    tta: str = "none"  # views of an image whose logits are averaged in an evaluation
    log_every_steps: int = 10
    eval_every_epochs: int = 1
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None  # more checkpoints, inside the epochs
    checkpoint_every_minutes: float | None = None  # looked at whenever the loss is logged
    keep_checkpoints: int = 2
    keep_best: bool = False  # the weights with the best val/accuracy stay as checkpoints/best.pt
    skip_nonfinite: bool = False  # leave out updates with NaN or infinite gradients instead of stopping

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "log_every_steps", "eval_every_epochs"):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("accumulate_steps", "checkpoint_every_epochs", "keep_checkpoints"):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("max_steps", "checkpoint_every_steps"):
            if getattr(self, name) is not None:
                _at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.checkpoint_every_minutes is not None and not self.checkpoint_every_minutes > 0:
            raise ConfigError(
                f"trainer.checkpoint_every_minutes={self.checkpoint_every_minutes} must be greater than 0"
            )
        _choice("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        _choice("trainer.compile_mode", self.compile_mode, ("default", "reduce-overhead"))
        _choice("trainer.tta", self.tta, ("none", "mirror", "multicrop"))
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"trainer.label_smoothing={self.label_smoothing} must lie in [0, 1)")


@dataclass(kw_only=True)
class StrategyConfig:
    """How ranks work together: ``name`` is ddp, fsdp or auto (docs/training.md).

    ``backend=auto`` takes nccl where every rank has a GPU, else gloo.
    """

    name: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        _choice("strategy.backend", self.backend, ("auto", "gloo", "nccl", "mpi"))


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """Every rank has the whole model. ``compression`` is for links that are slower than the backward pass.

    fp16 and bf16 send gradients in half the bytes, rounded to 11 and 8 bits; powersgd sends two thin matrices of
    ``powersgd_rank`` columns for each large one, from step ``powersgd_start_step`` on (none of them before it).
    """

    name: str = "ddp"
    compression: str = "none"
    powersgd_rank: int = 2
    powersgd_start_step: int = 100

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        _choice("strategy.compression", self.compression, ("none", "fp16", "bf16", "powersgd"))
        if self.compression == "bf16" and self.backend in ("gloo", "mpi"):
            raise ConfigError(
                f"strategy.compression=bf16 needs the backend nccl, and this is strategy.backend={self.backend}; "
                "choose strategy.compression=fp16"
            )
        _at_least("strategy.powersgd_rank", self.powersgd_rank, 1)
        _at_least("strategy.powersgd_start_step", self.powersgd_start_step, 0)


# ------------------------------------------------------------------------------------ the whole
SCHEMAS: dict[str, dict[str, type]] = {
    "dataset": {
        "cifar10": DatasetConfig,
        "mnist": DatasetConfig,
        "digits": DatasetConfig,
        "arrays": DatasetConfig,
        "synthetic": SyntheticConfig,
    },
    "model": {
        "small_cnn": SmallCNNConfig,
        "whitened_cnn": WhitenedCNNConfig,
        "resnet18": ModelConfig,
        "resnet50": ModelConfig,
    },
    "optimizer": {"sgd": SGDConfig, "adam": AdamConfig, "muon": MuonConfig},
    "schedule": {
        "constant": ScheduleConfig,
        "step": StepScheduleConfig,
        "one_cycle": OneCycleScheduleConfig,
        "triangle": TriangleScheduleConfig,
    },
    "trainer": {"default": TrainerConfig},
    "strategy": {"ddp": DDPConfig, "fsdp": StrategyConfig, "auto": StrategyConfig},
}
"""group → name → schema. The name is the option of the Hydra group and the ``name`` field inside it."""


@dataclass(kw_only=True)
class TrainConfig:
    """Everything the node half reads of config.json."""

    seed: int = 0
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=SmallCNNConfig)
    optimizer: OptimizerConfig = field(default_factory=SGDConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=DDPConfig)

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        skips = self.trainer.skip_nonfinite or self.trainer.precision == "fp16"
        if skips and isinstance(self.strategy, DDPConfig) and self.strategy.compression == "powersgd":
            raise ConfigError(  # what it didn't send it sends later, so a NaN would stay for ever
                "strategy.compression=powersgd can't leave out a step, as trainer.skip_nonfinite=true and "
                "trainer.precision=fp16 do; choose strategy.compression=fp16, or precision bf16 without skipping"
            )


def parse(raw: dict[str, Any]) -> TrainConfig:
    """Type a resolved configuration; what belongs to the controller (cluster, tracking, paths) is skipped.

    Raises:
        ConfigError: a group names no known option, a field is unknown or a value cannot work.
    """
    values: dict[str, Any] = {"seed": raw.get("seed", 0)}
    for group, schemas in SCHEMAS.items():
        section = raw.get(group)
        if not isinstance(section, dict):
            raise ConfigError(f"{group} is missing; choose one of: {', '.join(schemas)}")
        name = "default" if group == "trainer" else str(section.get("name"))
        _choice(f"{group}.name", name, tuple(schemas))
        known = {item.name for item in fields(schemas[name])}
        for key in section:
            if key not in known:
                fields_text = ", ".join(sorted(known))
                raise ConfigError(f"{group}.{key} is not a field of {group}={name}; it has: {fields_text}")
        values[group] = schemas[name](**section)
    return TrainConfig(**values)


def load(path: Path) -> TrainConfig:
    """Read ``config.json`` of a run folder. Raises ConfigError or OSError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return parse(raw)
