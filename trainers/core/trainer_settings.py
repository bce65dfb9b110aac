"""The settings ``trainer.*`` of the built-in trainer. Standard library only, as the controller reads them, too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainers.core.fields import KEYED_UNLESS_DEFAULT, ConfigError, at_least, below_one, check_target, choice

_METRIC = re.compile(r"[A-Za-z][\w-]*")


@dataclass(kw_only=True)
class TrainerConfig:
    """How long to train, in what batches, and how often to look.

    Attributes:
        epochs: passes over the train split.
        max_steps: optimizer steps after which the run ends, if its epochs haven't ended before; null: no such bound.
        global_batch_size: images of an optimizer step, over all ranks and micro-batches.
        accumulate_steps: micro-batches of each rank in an optimizer step (with shards of each part): saves memory, not
            time.
        clip_norm: gradients of a step whose norm, all of them together, is larger are shortened to it; 0: never.
        shards: equal parts of the global batch, 2, 4, 8, …: any 1, 2, 4, … ranks up to that number then end with the
            same weights, bit for bit; 0: a part for each rank, and other weights with another number of ranks.
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
        freeze: patterns of parameter names, such as [conv1.*, layer1.*]: what they match stays as it is at the start,
            and so do the statistics of a batch normalisation that they match as a whole.
        digests: steps from one record of digests (of inputs, gradients, weights and buffers) to the next, by which
            `doit diff` finds where two runs part; 0: none.
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
        if numbers := [pattern for pattern in self.freeze if pattern.isdigit()]:
            raise ConfigError(
                f"trainer.freeze={self.freeze}: {numbers[0]} is no name of a parameter; {numbers[0]}.* are those of "
                f"module {numbers[0]}"
            )
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
        """Check the user-defined loss and metrics."""
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
