"""Digests of inputs, gradients, weights and buffers (trainer.digests), by which `doit diff` finds the first step at
which two trainings differ. A digest is a sum over a tensor's bits, computed on its device; no step waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainers.core.files import write_atomic
from trainers.distributed.process_group import RankContext

INPUTS, GRADIENTS, WEIGHTS, BUFFERS = "inputs", "gradients", "weights", "buffers"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_MICRO_BATCH_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; keeps the digests of two micro-batches apart


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return the int64 scalar Σ (2i+1)·bitsᵢ of a tensor (of the local part of a DTensor), on its device.

    Odd factors are invertible modulo 2ⁿ, so a change of one element always shows, and so do exchanged elements.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    return (bits * _factors(bits)).sum(dtype=torch.int64)


_factors_by_type: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _factors(bits: Tensor) -> Tensor:
    """Return 1, 3, 5, … for the elements of ``bits``, from a table that grows with the largest tensor."""
    factors = _factors_by_type.get((bits.device, bits.dtype))
    if factors is None or len(factors) < len(bits):
        count = max(len(bits), 1024)
        factors = torch.arange(1, 2 * count, 2, dtype=torch.int64, device=bits.device).to(bits.dtype)
        _factors_by_type[bits.device, bits.dtype] = factors
    return factors[: len(bits)]


def state_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the weights and the buffers of a model by name."""
    return {WEIGHTS: dict(model.named_parameters()), BUFFERS: dict(model.named_buffers())}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


class TensorRecorder:
    """Interface of what receives the tensors of a step, one kind (such as GRADIENTS) after the other."""

    def record(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Record the tensors of one kind, by name; called in the order in which the step computes them."""


class Digests(TensorRecorder):
    """Digests of every ``every``-th step, on this rank. ``write`` is a collective call. The file has lines {"names":
    [[kind, name], …]}, and after each of them {"step", "rank", "digests": [a number per name]}.
    """

    def __init__(self, model: nn.Module, context: RankContext, path: Path, every: int) -> None:
        self.every = every
        self._model, self._context, self._path = model, context, path
        self._step: dict[tuple[str, str], Tensor] = {}  # (kind, name) → digest of the current step
        self._rows: list[tuple[int, Tensor]] = []  # (step, its digests), not written yet
        self._names: list[tuple[str, str]] = []  # (kind, name) of each digest of these rows
        self._written_names: list[tuple[str, str]] = []

    def begin(self, step: int) -> None:
        """Remove the lines behind ``step``, from which the training goes on."""
        if self._context.is_rank_zero and self._path.exists():
            lines = self._path.read_text().splitlines(keepends=True) if step else []
            # an earlier attempt may have died while it wrote the last line
            kept = [line for line in lines if line.endswith("\n") and json.loads(line).get("step", 0) <= step]
            write_atomic(self._path, lambda file: file.write("".join(kept).encode()))

    def is_due(self, step: int) -> bool:
        """Return True if the digests of ``step`` (from 1) are recorded."""
        return step % self.every == 0

    def record(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            value, before = digest(tensor), self._step.get((kind, name))
            self._step[kind, name] = value if before is None else before * _MICRO_BATCH_FACTOR + value

    def end(self, step: int) -> None:
        """Record the weights and buffers after ``step``, and complete the row of this step."""
        for kind, tensors in state_of(self._model).items():
            self.record(kind, tensors)
        names = [*self._step]
        if names != self._names:
            self.write()
            self._names = names
        self._rows.append((step, torch.stack([*self._step.values()])))
        self._step = {}

    def write(self) -> None:
        """Gather the rows of all ranks, and append a line per step and rank. Waits for the device."""
        if not self._rows:
            return
        table = self._context.gather(torch.cat([row for _, row in self._rows]))  # [ranks, steps × names]
        if table is not None:
            lines = [{"names": [list(name) for name in self._names]}] if self._written_names != self._names else []
            width = len(self._names)
            for number, (step, _) in enumerate(self._rows):
                for rank, row in enumerate(table[:, number * width : (number + 1) * width].tolist()):
                    lines.append({"step": step, "rank": rank, "digests": row})  # type: ignore[dict-item]
            with self._path.open("a") as file:
                file.write("".join(f"{json.dumps(line)}\n" for line in lines))
            self._written_names = self._names
        self._rows = []
