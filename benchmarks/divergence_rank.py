"""One rank of benchmarks/divergence.py: trains each run folder of JOBS in turn, and plants what the job says."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.contract import variables
from trainers.entry import leave
from trainers.training import step as steps
from trainers.training.loop import Trainer
from trainers.training.session import run


class Net(nn.Module):
    """Small, with batch statistics and dropout."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8))
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(8 * 7 * 7, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(self.second(self.first(images)).flatten(1)))
        return logits


def bump(tensor: Tensor, at: int) -> None:
    """Change one element by a unit in the last place, by no operator of torch; of a mask of 0 and 1 the other value."""
    count = tensor.numel()
    values = (ctypes.c_int32 * count).from_address(tensor.data_ptr())  # all are float32 and without gaps
    one = 0x3F800000
    values[at % count] ^= one if {*values[:64]} <= {0, one} else 1


class Planting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the result of the call ``number`` of an operator."""

    def __init__(self, operator: str, number: int, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._number, self._at = operator, number, at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == self._operator:
            if not self._number:
                found = result if isinstance(result, tuple) else (result,)
                bump([item for item in found if item is not None and item.numel()][-1], self._at)
            self._number -= 1
        return result


@contextmanager
def planted(plant: dict[str, Any] | None) -> Iterator[None]:
    """Plant in the step and on the rank that ``plant`` names, beneath what records the operators."""
    one_step, batch = Trainer._one_step, steps.training_batch  # type: ignore[attr-defined]

    def stepped(self: Trainer, plan: Any, position: int) -> None:
        if plant is None or (self.context.ranks.rank, self.step + 1) != (plant["rank"], plant["step"]):
            one_step(self, plan, position)
            return
        state, where, at = self.model.state_dict(keep_vars=True), plant["operator"], plant["at"]
        sync, finish = self.stepper.gradient_sync, self.stepper.gradient_sync.finish
        if where in ("weights", "buffers"):
            bump(state[plant["name"]], at)

        def loaded(*args: Any) -> Any:
            images, labels = batch(*args)
            bump(images, at)
            return images, labels

        def finished() -> None:
            finish()
            bump(state[plant["name"]].grad, at)

        if where == "inputs":
            steps.training_batch = loaded  # type: ignore[attr-defined]
        if where == "gradients":
            sync.finish = finished  # type: ignore[method-assign]
        with Planting(where, plant["number"], at) if "number" in plant else nullcontext():
            one_step(self, plan, position)
        steps.training_batch = batch  # type: ignore[attr-defined]
        sync.finish = finish  # type: ignore[method-assign]

    Trainer._one_step = stepped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._one_step = one_step  # type: ignore[method-assign]


if __name__ == "__main__":
    for job in json.loads(Path(os.environ["JOBS"]).read_text()):
        os.environ["MASTER_PORT"] = str(job["port"])
        os.environ.pop(variables.OPERATORS, None)
        if job["steps"]:
            os.environ[variables.OPERATORS] = job["steps"]
        with planted(job["plant"]):
            run(Path(job["folder"]) / "config.json")
    leave()
