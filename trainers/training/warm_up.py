"""What a process does before it looks for a checkpoint: passes that leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from trainers.core import garbage
from trainers.data.augment import EpochPlan
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.training.step import Stepper


def warm_up(stepper: Stepper, plan: Callable[[], EpochPlan], say: Callable[[str], None]) -> float:
    """The seconds that it took. Before a checkpoint is taken up, which may hold state that only these passes bring
    about. ``plan`` makes the plan of an epoch, where there are any passes.
    """
    garbage.resume()
    node, trainer = stepper.node, stepper.config.trainer
    whole = stepper.strategy.layout.name == "ddp" and node.ranks.world_size > 1
    if whole and node.device.type == "cpu" and not trainer.compile:
        HEARTBEAT.watch_gradients(stepper.model)
    if not stepper.warm_up_passes:
        return 0.0
    shown = plan()
    stepper.begin_training()
    began = time.perf_counter()
    stepper.warm_up(shown)
    if node.device.type == "cuda":
        torch.cuda.synchronize(node.device)
    seconds = time.perf_counter() - began
    if trainer.compile:
        say(f"compiled in {seconds:.1f} s")
    return seconds
