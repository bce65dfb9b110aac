"""The digests of each operator of a few steps, by which `doit diff` names the operator at which two trainings part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from trainers.contract import run_folder, variables
from trainers.data.augment import EpochPlan
from trainers.training.digests import Witness, digest, state_of
from trainers.training.step import Stepper

_COLLECTIVES = ("c10d", "_c10d_functional")
_FSDP = "fsdp"  # copies into and out of buffers, of which a part is new memory


def wanted() -> Replay | None:
    """Return the replay that the environment asks for."""
    text = os.environ.get(variables.OPERATORS)
    return Replay(*map(int, text.split("-"))) if text else None


class Replay:
    """Records the steps ``first`` … ``last`` (from 1), and ends the training there."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.done = first, last, False
        self._lines: list[dict[str, Any]] = []

    def step(self, stepper: Stepper, run_dir: Path, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Run step ``step`` (from 0) of the run."""
        number = step + 1
        if number < self.first:
            return stepper(plan, step, position)
        recorder = _Recorder(number)
        _see(recorder, stepper)
        stepper.witness = recorder
        with ModuleTracker() as tracker:
            recorder.tracker = tracker
            with recorder:
                loss = stepper(plan, step, position)
        _see(recorder, stepper)
        self._lines += recorder.lines
        if number == self.last:
            path = run_dir / run_folder.OPERATORS.format(rank=stepper.context.ranks.rank)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in self._lines))
            self.done = True
        return loss


def _see(recorder: _Recorder, stepper: Stepper) -> None:
    for kind, tensors in state_of(stepper.model).items():
        recorder.see(kind, tensors)


class _Recorder(TorchDispatchMode, Witness):  # type: ignore[no-untyped-call]
    """Writes down every operator that torch calls, and the tensors that the step shows."""

    tracker: ModuleTracker

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._sees = step, False
        self.lines: list[dict[str, Any]] = []

    def see(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self._sees = True
        digests = {name: int(digest(item)) for name, item in tensors.items()}
        self._sees = False
        self.lines.append({"step": self._step, "kind": kind, "digests": digests})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._sees or func.namespace == _FSDP:
            return func(*args, **(kwargs or {}))
        collective = func.namespace in _COLLECTIVES
        # a collective may go on after its call, so what counts is what it is given
        seen = _digests(_given(func, args)) if collective else []
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not collective and "empty" not in name and not func.is_view:  # the content of new memory is anything
            seen = _digests(result)
        if seen:
            random = torch.Tag.nondeterministic_seeded in func.tags
            what = "communication" if collective else "randomness" if random else "arithmetic"
            self.lines.append(
                {"step": self._step, "operator": name, "module": self._module(), "cause": what, "digests": seen}
            )
        return result

    def _module(self) -> str:
        """Return the innermost module whose forward or backward pass this is, '' outside of the network."""
        inner = max(self.tracker.parents - {"Global"}, key=len, default="")
        return inner.partition(".")[2].removeprefix("module.")


def _given(func: Any, args: Any) -> list[Any]:
    named = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in named if not argument.name.startswith("output")]


def _digests(values: Any) -> list[int]:
    return [int(digest(item)) for item in tree_leaves(values) if isinstance(item, Tensor) and not item.is_sparse]
