"""The measurement of the Trainer's steps, for ``trainers.measuring.measure``: timed in turns with a plain PyTorch loop
(``measure``), or traced by torch's profiler (``trace``)."""

from __future__ import annotations

import math
import platform
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from trainers.contract import run_folder
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import write_json
from trainers.core.options import load
from trainers.data.augment import EpochPlan
from trainers.data.pack import MappedPack, open_pack, prepare_for
from trainers.distributed.node_hardware import device_name
from trainers.distributed.process_group import RankContext, connect
from trainers.distributed.ranks import read_ranks
from trainers.distributed.resources import take_cores
from trainers.measuring.speeds import settle
from trainers.optimizers.adam import AdamConfig
from trainers.optimizers.sgd import SGDConfig
from trainers.training.loop import Trainer
from trainers.training.model_setup import fresh_network

_PAIRS, _BLOCK_S = 5, 2.0  # a pair: a block of steps by each loop, of about that duration
WARM_UP = {"cpu": 2, "cuda": 20}  # steps for cuDNN's and the allocator's warm-up
_FLOP_IMAGES = 2  # the smallest batch that batch normalisation accepts


class OwnLoop:
    """The Trainer's steps without evaluation, checkpoints and metrics.jsonl."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._plan: EpochPlan | None = None

    def run(self, steps: int) -> None:
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


def measure(path: Path, options: Mapping[str, Any]) -> None:
    """Measure with config.json at ``path``. ``options``: ``pairs``, ``block_s``. Raises ConfigError, TrainerError."""
    with prepared(path) as trainer:
        config, pack, context = trainer.config, trainer.pack, trainer.context
        ranks = f"{context.ranks.world_size} rank{'s' if context.ranks.world_size > 1 else ''}"
        trainer.say(f"{config.model.name} on {pack.manifest.name}: {ranks}, {context.backend}")
        own, plain = OwnLoop(trainer), ReferenceLoop(config, pack, context, precision=trainer.precision)
        pairs, steps = _pairs(own, plain, options.get("pairs", _PAIRS), options.get("block_s", _BLOCK_S))
        result = {**_surroundings(trainer), "steps_a_block": steps, "pairs": pairs}
        if context.is_rank_zero:
            write_json(path.parent / run_folder.THROUGHPUT, result)


@contextmanager
def prepared(path: Path) -> Iterator[Trainer]:
    """Return a context with a Trainer that is ready for its first step. Raises ConfigError, TrainerError."""
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
    """Time both loops ``count`` times; return the rates of each pair by name, and the steps of a block."""
    trainer = own.trainer
    context, batch = trainer.context, trainer.steps.global_batch_size
    for loop in (own, plain):
        timed(loop, WARM_UP[context.device.type], context)
    steps = max(1, math.ceil(block_s * 2 / timed(own, 2, context)))
    pairs = []
    for number in range(count):
        # swap the order in every pair, so that a drift of the host's speed affects both loops
        order: list[tuple[str, OwnLoop | ReferenceLoop]] = [("paceline", own), ("plain", plain)]
        seconds = {name: timed(loop, steps, context) for name, loop in (order if number % 2 == 0 else order[::-1])}
        rates = {f"{name}_images_per_s": steps * batch / seconds[name] for name, _ in order}
        pairs.append(rates)
        trainer.say(
            f"pair {number + 1}/{count}: Paceline {rates['paceline_images_per_s']:,.1f}, "
            f"reference loop {rates['plain_images_per_s']:,.1f} images/s"
        )
    return pairs, steps


def timed(loop: OwnLoop | ReferenceLoop, steps: int, context: RankContext) -> float:
    """Return the seconds of ``steps`` steps on the slowest rank, after a common start."""
    context.sum(torch.zeros(1, device=context.device))
    settle(context.device)
    began = time.perf_counter()
    loop.run(steps)
    settle(context.device)
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
        "hardware": describe_hardware(context.device, trainer.precision),
        "flop_per_image": flop_per_image(config, pack, context),
    }


TRACE = "trace.json.gz"
_STEPS = 5
_SHOWN = 15


def trace(path: Path, options: Mapping[str, Any]) -> None:
    """Trace ``steps`` steps with the configuration ``config.json`` at ``path``. Raises ConfigError, TrainerError."""
    steps = int(options.get("steps", _STEPS))
    with prepared(path) as trainer:
        context, loop = trainer.context, OwnLoop(trainer)
        loop.run(WARM_UP[context.device.type])
        settle(context.device)
        trainer.say(f"tracing {steps} steps of rank 0")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.device.type == "cuda" else [])]
        tracing = profile(activities=activities, record_shapes=True) if context.is_rank_zero else nullcontext()
        with tracing as tracer:
            for _ in range(steps):
                with record_function("paceline step"):
                    loop.run(1)
            settle(context.device)
        if tracer is not None:
            tracer.export_chrome_trace(str(path.parent / TRACE))
            rows = _longest(tracer, context.device, steps)
            trainer.say("\n".join([f"{'operation':<48}{'calls a step':>14}{'ms a step':>12}", *map(_line, rows)]))
            surroundings = describe_hardware(context.device, trainer.precision)
            write_json(
                path.parent / run_folder.PROFILE, {"version": 1, "steps": steps, "hardware": surroundings, "rows": rows}
            )


def _longest(tracer: profile, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Return the longest operations by their own time (on the GPU if there is one), in seconds per step."""
    rows = [
        {
            "name": item.key,
            "calls_a_step": item.count / steps,
            "self_s": (item.self_device_time_total if device.type == "cuda" else item.self_cpu_time_total)
            / 1e6
            / steps,
        }
        for item in tracer.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["self_s"])[:_SHOWN]


def _line(row: dict[str, Any]) -> str:
    return f"{row['name'][:46]:<48}{row['calls_a_step']:>14,.1f}{row['self_s'] * 1e3:>12,.3f}"


# GPU → dense peaks in 1e12 FLOP/s from the makers' data sheets: (bf16, TF32, fp32 without tensor cores); None: not
# supported. The first name that occurs in a device's name is used, so longer names come first.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float]], ...] = (
    ("B200", (2250.0, 1125.0, 75.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("H100 PCIe", (756.0, 378.0, 51.2)),
    ("H100 NVL", (835.0, 417.5, 60.0)),
    ("H100", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A30", (165.0, 82.0, 10.3)),
    ("A40", (149.7, 74.8, 37.4)),
    ("A10G", (70.0, 35.0, 31.2)),
    ("A10", (125.0, 62.5, 31.2)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("RTX 3090", (71.0, 35.6, 35.6)),
    ("V100", (None, None, 15.7)),
    ("T4", (None, None, 8.1)),
)


def peak_flop_per_s(name: str, precision: str, *, tf32: bool) -> float | None:
    """Return a device's dense peak, or None if it is unknown. ``name``: torch's; ``tf32``: fp32 computes in TF32."""
    if "MIG" in name:  # a slice of a GPU
        return None
    for gpu, (bf16, tensor32, fp32) in _PEAKS:
        if re.search(rf"\b{gpu}\b", name):
            peak = bf16 if precision == "bf16" else (tensor32 if tf32 and tensor32 else fp32)
            return None if peak is None else peak * 1e12
    return None


def describe_hardware(device: torch.device, precision: str) -> dict[str, Any]:
    """Return what a measurement depends on: device, its peak (FLOP/s, or None), threads and versions."""
    cuda = device.type == "cuda"
    name = device_name(device)
    tf32 = cuda and torch.backends.cudnn.allow_tf32
    return {
        "device": device.type,
        "name": name,
        "peak_flop_per_s": peak_flop_per_s(name, precision, tf32=tf32) if cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "system": platform.platform(),
    }


_LR_SHARE = 0.04  # of the configured learning rate, constant: the loss stays finite, and only speed is measured


class ReferenceLoop:
    """The same training as a plain PyTorch loop, with which the Trainer's speed is compared."""

    def __init__(self, config: TrainConfig, pack: MappedPack, context: RankContext, *, precision: str) -> None:
        if precision == "fp16":
            raise TrainerError("the reference loop knows fp32 and bf16; measure with trainer.precision=bf16")
        self.config, self.context, self.precision = config, context, precision
        start, stop = pack.manifest.splits["train"]
        if pack.places is not None:  # the pack has encoded image files
            raise TrainerError("the reference loop decodes no image files; a larger dataset.decoded_limit packs pixels")
        self.images = pack.images[start:stop].to(context.device, copy=True)
        self.labels = pack.labels[start:stop].to(context.device, copy=True)
        manifest, shape = pack.manifest, (1, pack.manifest.channels, 1, 1)
        normalises, device = config.dataset.normalise, context.device
        self.mean = torch.tensor(manifest.mean if normalises else (0.0,) * shape[1], device=device).view(shape) * 255
        self.std = torch.tensor(manifest.std if normalises else (1.0,) * shape[1], device=device).view(shape) * 255
        self.std[self.std == 0] = 1.0
        self.batch = config.trainer.global_batch_size // context.ranks.world_size
        self.model = _distributed(fresh_network(config.model, manifest, context, seed=config.seed), context)
        self.optimizer = _optimizer(config, self.model)
        self.order = torch.empty(0, dtype=torch.int64)
        self.step = 0
        self.model.train()

    def run(self, steps: int) -> None:
        """Train ``steps`` steps with cuDNN's fastest algorithms; return when they are queued on the device."""
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        cudnn.benchmark, cudnn.deterministic = True, False
        try:
            self._run(steps)
        finally:
            cudnn.benchmark, cudnn.deterministic = before

    def _run(self, steps: int) -> None:
        per_epoch = self.labels.numel() // self.config.trainer.global_batch_size
        for _ in range(steps):
            position = self.step % per_epoch
            if position == 0:
                generator = torch.Generator().manual_seed(self.step)  # the same order on all ranks
                self.order = torch.randperm(self.labels.numel(), generator=generator).to(self.context.device)
            first = (position * self.context.ranks.world_size + self.context.ranks.rank) * self.batch
            loss = self._train(self.order[first : first + self.batch])
            self.step += 1
            if self.step % self.config.trainer.log_every_steps == 0:
                loss.item()

    def _train(self, index: Tensor) -> Tensor:
        trainer = self.config.trainer
        images = ((self._augment(self.images[index]) - self.mean) / self.std).to(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.context.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(images)
            loss = functional.cross_entropy(logits, self.labels[index], label_smoothing=trainer.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _augment(self, images: Tensor) -> Tensor:
        padding, (count, channels, height, width) = self.config.dataset.crop_padding, images.shape
        if padding:
            padded = functional.pad(images, (padding,) * 4)
            corner = torch.randint(0, 2 * padding + 1, (2, count, 1), device=images.device)
            rows = (corner[0] + torch.arange(height, device=images.device)).view(count, 1, height, 1)
            columns = (corner[1] + torch.arange(width, device=images.device)).view(count, 1, 1, width)
            batch = torch.arange(count, device=images.device).view(count, 1, 1, 1)
            # all four indices broadcast to [count, channels, height, width]
            images = padded[batch, torch.arange(channels, device=images.device).view(1, -1, 1, 1), rows, columns]
        if self.config.dataset.flip:
            mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        return images


def _distributed(model: nn.Module, context: RankContext) -> nn.Module:
    if context.ranks.world_size == 1:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
        return DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            static_graph=True,
        )


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer of the configured kind, else AdamW; settings that cost no time stay defaults."""
    settings, lr = config.optimizer, config.optimizer.lr * _LR_SHARE
    decay = settings.weight_decay
    if isinstance(settings, SGDConfig):
        return torch.optim.SGD(
            model.parameters(),
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=decay,
            fused=True,
        )
    if isinstance(settings, AdamConfig):
        return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
