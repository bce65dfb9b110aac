"""One rank of benchmarks/training.py: ``torchrun … training_rank.py STYLE MODEL GLOBAL_BATCH STEPS PRECISION RUN_DIR``.

STYLE is paceline or one of benchmarks/plain_loop.py's, PRECISION fp32 or bf16. The last line of rank 0 is JSON: wall
and processor seconds of a step, the latter the sum over the ranks, without the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import plain_loop
import torch
import torch.distributed as dist

from trainers.core import options
from trainers.core.config import DatasetConfig, TrainConfig, TrainerConfig
from trainers.data.pack import MappedPack, open_pack
from trainers.distributed.process_group import connect
from trainers.distributed.resources import keep_freed_memory
from trainers.optimizers.sgd import SGDConfig
from trainers.schedules.constant import ConstantConfig
from trainers.strategies.ddp import DDPConfig
from trainers.training.loop import Trainer

WARMUP_STEPS = 3


class Stopwatch:
    """Starts at the end of the last warm-up step; ``tick`` after each step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.started = self.ended = (0.0, 0.0)

    def tick(self) -> None:
        self.done += 1
        now = (time.perf_counter(), time.process_time())
        if self.done == WARMUP_STEPS:
            self.started = now
        if self.done == WARMUP_STEPS + self.steps:
            self.ended = now

    def per_step(self) -> tuple[float, float]:
        """Wall and processor seconds of a step."""
        wall_s, cpu_s = (end - start for start, end in zip(self.started, self.ended, strict=True))
        return wall_s / self.steps, cpu_s / self.steps


class Timed(Trainer):
    """The real loop, logging included; the evaluation and checkpoint after its last step don't count."""

    stopwatch: Stopwatch

    def _after_step(self, epoch: int, position: int, began: float) -> None:
        if self.step < self.steps.total:
            super()._after_step(epoch, position, began)
        self.stopwatch.tick()


def paceline(given: argparse.Namespace, pack: MappedPack, stopwatch: Stopwatch) -> None:
    """What trainers.training.session does, up to the results."""
    steps = WARMUP_STEPS + stopwatch.steps
    config = TrainConfig(
        dataset=DatasetConfig(name="synthetic", crop_padding=plain_loop.PADDING, flip=True),
        model=options.settings("model", given.model)(),
        optimizer=SGDConfig(lr=0.01),
        schedule=ConstantConfig(),
        strategy=DDPConfig(),
        trainer=TrainerConfig(
            global_batch_size=given.global_batch,
            accumulate_steps=given.accumulate,
            shards=given.shards,
            epochs=10**6,
            max_steps=steps,
            precision=given.precision,
            eval_every_epochs=10**6,
            checkpoint_every_epochs=10**6,
        ),
    )
    trainer = Timed(config, pack, connect("gloo"), given.run_dir)
    trainer.stopwatch = stopwatch
    trainer.prepare()
    trainer.train()
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("style", choices=("paceline", *plain_loop.LOOPS))
    parser.add_argument("model")
    parser.add_argument("global_batch", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("precision", choices=("fp32", "bf16"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--accumulate", type=int, default=1, help="of Paceline's step: micro-batches of a rank")
    parser.add_argument("--shards", type=int, default=0, help="of Paceline's step: trainer.shards")
    given = parser.parse_args()
    pack, stopwatch = open_pack(given.run_dir / "data"), Stopwatch(given.steps)
    torch.set_num_threads(1)
    if given.style == "paceline":
        keep_freed_memory()
        paceline(given, pack, stopwatch)
    else:
        dist.init_process_group("gloo")
        batch = given.global_batch // dist.get_world_size()
        steps = WARMUP_STEPS + given.steps
        plain_loop.LOOPS[given.style](given.model, pack, batch, steps, stopwatch.tick, given.precision == "bf16")
    wall_s, cpu_s = stopwatch.per_step()
    total = torch.tensor([cpu_s], dtype=torch.float64)
    if dist.is_initialized():  # one rank of Paceline's has no process group
        dist.all_reduce(total)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"wall_s": wall_s, "cpu_s": total.item()}), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # gloo's threads abort the process now and then when it ends in order: nothing is left to do


if __name__ == "__main__":
    main()
