"""Loss and accuracy of a whole split, shared out over the ranks; every image counts exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.augment import Normaliser
from trainers.data import Pack, take
from trainers.distributed import Node
from trainers.network import autocast

_SMALLEST_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """``loss`` is the mean cross-entropy (no label smoothing), ``predictions`` are classes in split order."""

    loss: float
    accuracy: float
    count: int
    predictions: list[int]

    def metrics(self, split: str) -> dict[str, float]:
        """As they stand in metrics.jsonl."""
        return {f"{split}/loss": self.loss, f"{split}/accuracy": self.accuracy}


def shard(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The half-open part of [start, stop) that belongs to a rank; sizes differ by at most one."""
    base, extra = divmod(stop - start, world_size)
    first = start + rank * base + min(rank, extra)
    return first, first + base + (rank < extra)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    pack: Pack,
    split: str,
    *,
    node: Node,
    normalise: Normaliser,
    precision: str,
    batch_size: int,
) -> Evaluation:
    """Evaluate a split that is not empty. Leaves the model in evaluation mode; every rank gets the result."""
    start, stop = pack.manifest.splits[split]
    count = stop - start
    first, last = shard(start, stop, node.ranks.rank, node.ranks.world_size)
    totals = torch.zeros(2, dtype=torch.float64, device=node.device)  # sum of losses, number correct
    chosen = torch.zeros(stop - start, dtype=torch.int32, device=node.device)
    model.eval()
    step = max(batch_size, _SMALLEST_BATCH)
    longest = -(-count // node.ranks.world_size)
    for offset in range(0, longest, step):  # as often on every rank: with fsdp a forward pass waits for the others'
        begin = min(first + offset, last)
        end = min(begin + step, last)
        logits, labels = _forward(model, pack, begin, end, node.device, normalise, precision)
        guesses = logits.argmax(1)
        totals[0] += functional.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (guesses == labels).sum()
        chosen[begin - start : end - start] = guesses
    node.sum(totals)
    node.sum(chosen)  # each rank filled its own part and left zeros elsewhere
    loss_sum, correct = totals.tolist()
    return Evaluation(loss=loss_sum / count, accuracy=correct / count, count=count, predictions=chosen.tolist())


def _forward(
    model: nn.Module,
    pack: Pack,
    begin: int,
    end: int,
    device: torch.device,
    normalise: Normaliser,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """float32 logits [n, classes] and labels [n] of one range of the pack."""
    index = torch.arange(begin, end, device=pack.images.device)
    images, labels = take(pack.images, index, device), take(pack.labels, index, device)
    with autocast(device, precision):
        logits: Tensor = model(normalise(images))
    return logits.float(), labels
