"""The replay of a few steps that records a digest of each torch operator's results. `doit diff` starts it on two runs,
to find the first operator at which they differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from trainers.contract import run_folder, variables
from trainers.data.augment import EpochPlan
from trainers.training.digests import TensorRecorder, digest, state_of
from trainers.training.step import Stepper

_COLLECTIVES = ("c10d", "_c10d_functional")
_FSDP = "fsdp"  # not recorded: its buffers have parts that are never written, with arbitrary content


def requested_replay() -> Replay | None:
    """Return the replay that the environment variable OPERATORS requests (``FIRST-LAST``), or None."""
    steps = os.environ.get(variables.OPERATORS)
    return Replay(*map(int, steps.split("-"))) if steps else None


class Replay:
    """Records the steps ``first`` … ``last`` (from 1), and ends the training there."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.done = first, last, False
        self._lines: list[dict[str, Any]] = []

    def step(self, stepper: Stepper, run_dir: Path, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Run step ``step`` (from 0) of the run; record it if it is one of those, and write the file after the last."""
        number = step + 1
        if number < self.first:
            return stepper(plan, step, position)
        recorder = _Recorder(number)
        recorder.record_state(stepper.model)  # before the step, and below after it
        stepper.tensor_recorder = recorder
        with ModuleTracker() as tracker:
            recorder.tracker = tracker
            with recorder:
                loss = stepper(plan, step, position)
        recorder.record_state(stepper.model)
        self._lines += recorder.lines
        if number == self.last:
            path = run_dir / run_folder.OPERATORS.format(rank=stepper.context.ranks.rank)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in self._lines))
            self.done = True
        return loss


class _Recorder(TorchDispatchMode, TensorRecorder):  # type: ignore[no-untyped-call]
    """Records digests of the results of every torch operator, and of the tensors passed to ``record``."""

    tracker: ModuleTracker

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._is_recording = False  # the operators that compute a digest are not recorded themselves
        self.lines: list[dict[str, Any]] = []

    def record(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self._is_recording = True
        digests = {name: int(digest(item)) for name, item in tensors.items()}
        self._is_recording = False
        self.lines.append({"step": self._step, "kind": kind, "digests": digests})

    def record_state(self, model: nn.Module) -> None:
        """Record the model's weights and buffers."""
        for kind, tensors in state_of(model).items():
            self.record(kind, tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_recording or func.namespace == _FSDP:
            return func(*args, **(kwargs or {}))
        collective = func.namespace in _COLLECTIVES
        # a collective may still run after its call, so record its inputs instead of its results
        digests = _digests(_inputs(func, args)) if collective else []
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not collective and "empty" not in name and not func.is_view:  # new memory has arbitrary content
            digests = _digests(result)
        if digests:
            random = torch.Tag.nondeterministic_seeded in func.tags
            cause = "communication" if collective else "randomness" if random else "arithmetic"
            self.lines.append(
                {"step": self._step, "operator": name, "module": self._module(), "cause": cause, "digests": digests}
            )
        return result

    def _module(self) -> str:
        """Return the innermost module whose forward or backward pass this is, '' outside of the network."""
        inner = max(self.tracker.parents - {"Global"}, key=len, default="")
        return inner.partition(".")[2].removeprefix("module.")


def _inputs(func: Any, args: Any) -> list[Any]:
    named = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in named if not argument.name.startswith("output")]


def _digests(values: Any) -> list[int]:
    return [int(digest(item)) for item in tree_leaves(values) if isinstance(item, Tensor) and not item.is_sparse]
