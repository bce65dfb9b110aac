"""Throughput of the Trainer against a plain PyTorch loop, for ``trainers.measuring.measure``.

Blocks of both loops' steps alternate in one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trainers.contract import run_folder
from trainers.core.config import TrainConfig
from trainers.core.files import write_json
from trainers.core.options import load
from trainers.data.augment import EpochPlan
from trainers.data.pack import MappedPack, open_pack, prepare_for
from trainers.distributed.connecting import connect
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import read_ranks
from trainers.distributed.resources import take_cores
from trainers.measuring import bandwidth, hardware
from trainers.measuring.reference_loop import ReferenceLoop
from trainers.training.loop import Trainer
from trainers.training.model_setup import fresh_network

_PAIRS, _BLOCK_S = 5, 2.0
WARM_UP = {"cpu": 2, "cuda": 20}  # steps for cuDNN's and the allocator's warm-up
_FLOP_IMAGES = 2  # the smallest batch that batch normalisation accepts


class Loop(Protocol):
    """A loop that can be timed."""

    def run(self, steps: int) -> None: ...


class OwnLoop:
    """The Trainer's steps without evaluation, checkpoints and metrics.jsonl."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._plan: EpochPlan | None = None

    def run(self, steps: int) -> None:
        """Train ``steps`` steps; losses are read as often as in a training."""
        trainer = self.trainer
        for _ in range(steps):
            epoch, position = trainer.steps.place(trainer.step)
            if self._plan is None or position == 0:
                self._plan = trainer.plan(epoch, position)
                trainer.stepper.begin_training()
            trainer._one_step(self._plan, position)
            trainer.step += 1
            if position + 1 == trainer.steps.per_epoch or trainer.step % trainer.config.trainer.log_every_steps == 0:
                trainer.losses.read(trainer.step)


def run(path: Path, options: Mapping[str, Any]) -> None:
    """Measure with the configuration ``config.json`` at ``path``. Raises ConfigError, TrainerError.

    Args:
        options: ``pairs`` (how many blocks of each loop) and ``block_s`` (seconds of a block).
    """
    with prepared(path) as trainer:
        config, pack, context = trainer.config, trainer.pack, trainer.context
        ranks = f"{context.ranks.world_size} rank{'s' if context.ranks.world_size > 1 else ''}"
        trainer.say(f"{config.model.name} on {pack.manifest.name}: {ranks}, {context.backend}")
        own, plain = OwnLoop(trainer), ReferenceLoop(config, pack, context, precision=trainer.precision)
        pairs, steps = _pairs(own, plain, options.get("pairs", _PAIRS), options.get("block_s", _BLOCK_S))
        result = {
            **_surroundings(trainer),
            "steps_a_block": steps,
            "pairs": pairs,
        }
        if context.is_rank_zero:
            write_json(path.parent / run_folder.THROUGHPUT, result)


@contextmanager
def prepared(path: Path) -> Iterator[Trainer]:
    """Return a context with a Trainer that is ready for its first step.

    Raises:
        ConfigError, TrainerError: as a training does.
    """
    config = load(path)
    take_cores(read_ranks())
    pack = open_pack(path.parent / "data")
    with connect(config.strategy.backend) as context:
        trainer = Trainer(
            config, prepare_for(pack, context.device, config.dataset.random_resized_crop), context, path.parent
        )
        trainer.prepare()
        yield trainer
        trainer.close()


def _pairs(own: OwnLoop, plain: ReferenceLoop, count: int, block_s: float) -> tuple[list[dict[str, float]], int]:
    """Return images per second of both loops per pair, and the steps per block."""
    trainer = own.trainer
    context, batch = trainer.context, trainer.steps.global_batch_size
    for loop in (own, plain):
        timed(loop, WARM_UP[context.device.type], context)
    steps = max(1, math.ceil(block_s * 2 / timed(own, 2, context)))
    pairs = []
    for number in range(count):
        # swap the order in every pair, so that a drift of the host's speed affects both loops
        order: list[tuple[str, Loop]] = [("paceline", own), ("plain", plain)]
        seconds = {name: timed(loop, steps, context) for name, loop in (order if number % 2 == 0 else order[::-1])}
        rates = {f"{name}_images_per_s": steps * batch / seconds[name] for name, _ in order}
        pairs.append(rates)
        trainer.say(
            f"pair {number + 1}/{count}: Paceline {rates['paceline_images_per_s']:,.1f}, "
            f"reference loop {rates['plain_images_per_s']:,.1f} images/s"
        )
    return pairs, steps


def timed(loop: Loop, steps: int, context: RankContext) -> float:
    """Return the seconds of ``steps`` steps on the slowest rank, after a common start."""
    context.sum(torch.zeros(1, device=context.device))
    bandwidth.settle(context.device)
    began = time.perf_counter()
    loop.run(steps)
    bandwidth.settle(context.device)
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=context.device)
    if context.ranks.world_size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def flop_per_image(config: TrainConfig, pack: MappedPack, context: RankContext) -> float:
    """Count the floating-point operations of forward and backward pass per image (a multiply-add counts as two)."""
    network = fresh_network(config.model, pack.manifest, context, seed=0)
    manifest = pack.manifest
    images = torch.zeros(_FLOP_IMAGES, manifest.channels, manifest.height, manifest.width, device=context.device)
    labels = torch.zeros(_FLOP_IMAGES, dtype=torch.int64, device=context.device)
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / _FLOP_IMAGES


def _surroundings(trainer: Trainer) -> dict[str, Any]:
    config, pack, context = trainer.config, trainer.pack, trainer.context
    return {
        "version": 1,
        "unix_time": time.time(),
        "model": config.model.name,
        "parameters": sum(item.numel() for item in trainer.model.parameters()),
        "dataset": pack.manifest.name,
        "dataset_digest": pack.manifest.digest,
        "synthetic": pack.manifest.synthetic,
        "precision": trainer.precision,
        "global_batch_size": config.trainer.global_batch_size,
        "world_size": context.ranks.world_size,
        "nnodes": context.ranks.nnodes,
        "backend": context.backend,
        "hardware": hardware.describe(context.device, trainer.precision),
        "flop_per_image": flop_per_image(config, pack, context),
    }
