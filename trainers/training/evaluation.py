"""The evaluation of a split: loss, accuracy and further metrics. The ranks divide the split; every image counts exactly
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.contract.beats import Phase
from trainers.data.augment import Normaliser, bordered
from trainers.data.pack import MappedPack, RowRequest
from trainers.data.randomness import Stream, key
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import pairwise_sum
from trainers.training.model_setup import autocast, seed_generators

_SMALLEST_BATCH = {"cuda": 256, "cpu": 128}  # on a CPU, larger batches take memory and gain no speed
_SHIFT_PIXELS = 1


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of evaluating one split."""

    loss: float  # mean cross-entropy, without label smoothing
    accuracy: float
    count: int
    predictions: list[int]  # classes, in split order
    more: Mapping[str, float] = field(default_factory=dict)  # means of further metrics

    def metrics(self, split: str) -> dict[str, float]:
        """Return the metrics under their names in metrics.jsonl, such as ``val/loss``."""
        values = {"loss": self.loss, "accuracy": self.accuracy, **self.more}
        return {f"{split}/{name}": value for name, value in values.items()}


def shard(start: int, stop: int, number: int, count: int) -> tuple[int, int]:
    """Return part ``number`` of ``count`` of [start, stop), half-open; sizes differ by at most one."""
    base, extra = divmod(stop - start, count)
    first = start + number * base + min(number, extra)
    return first, first + base + (number < extra)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a model on the splits of a pack."""

    model: nn.Module
    pack: MappedPack
    context: RankContext
    normalise: Normaliser
    precision: str
    batch_size: int  # smallest number of images in a rank's batch
    tta: str = "none"
    shards: int = 0  # number of parts in which a split is evaluated and summed; 0: one part per rank
    seed: int = 0  # of random numbers that the model draws
    # further metrics: logits [n, classes] and labels [n] → values [n]
    more: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)

    def evaluate(self, split: str) -> Evaluation:
        """Evaluate a split that is not empty. Leaves the model in evaluation mode; every rank gets the result."""
        totals, chosen = self.count_up(split)
        count = chosen.numel()
        loss, accuracy, *others = (total / count for total in self.context.read(totals))
        return Evaluation(
            loss=loss,
            accuracy=accuracy,
            count=count,
            predictions=chosen.tolist(),
            more=dict(zip(self.more, others, strict=True)),
        )

    @torch.inference_mode()
    def count_up(self, split: str) -> tuple[Tensor, Tensor]:
        """Sum the results of a split over all ranks, without waiting for the device. Returns float64 [2 + more], the
        sum of the losses, the number of correct predictions and the sums of further metrics; and int32 [count], the
        predicted classes.
        """
        context = self.context
        start, stop = self.pack.manifest.splits[split]
        count = stop - start
        # a row for each part, so that ``pairwise_sum`` adds them in one order on any number of ranks
        totals = torch.zeros(max(1, self.shards), 2 + len(self.more), dtype=torch.float64, device=context.device)
        chosen = torch.zeros(count, dtype=torch.int32, device=context.device)
        self.model.eval()
        if self.pack.row_reader is not None:
            self.pack.row_reader.expect(RowRequest(torch.arange(*ends)) for _, *ends in self._batches(start, stop))
        seeded = -1
        for part, begin, end in self._batches(start, stop):
            HEARTBEAT.enter(Phase.EVALUATING)
            # seed once per part: with shards, a part draws the same numbers on any number of ranks
            if part != seeded:
                seed_generators(context.device, key(self.seed, Stream.EVALUATION, part))
                seeded = part
            logits, labels = self._forward(begin, end)
            guesses, row = logits.argmax(1), part if self.shards else 0
            totals[row, 0] += functional.cross_entropy(logits, labels, reduction="sum")
            totals[row, 1] += (guesses == labels).sum()
            for column, metric in enumerate(self.more.values(), 2):
                totals[row, column] += metric(logits, labels).sum(dtype=torch.float64)
            chosen[begin - start : end - start] = guesses
        context.sum(totals)  # with shards, each rank has filled its own rows, and the others add zeros
        context.sum(chosen)  # each rank has filled its own part, and the others add zeros
        return pairwise_sum(totals), chosen

    def _batches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (part, begin, end) of this rank's batches: the part's number and a half-open range of the pack."""
        ranks, step = self.context.ranks, max(self.batch_size, _SMALLEST_BATCH[self.context.device.type])
        parts = self.shards or ranks.world_size
        parts_per_rank = parts // ranks.world_size
        for number in range(ranks.rank * parts_per_rank, (ranks.rank + 1) * parts_per_rank):
            first, last = shard(start, stop, number, parts)
            longest = -(-(stop - start) // parts)
            # the same number of batches on every rank, some of them empty: fsdp communicates in every forward pass
            for offset in range(0, longest, step):
                begin = min(first + offset, last)
                yield number, begin, min(begin + step, last)

    def _forward(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return float32 logits [n, classes] and labels [n] for one range of the pack."""
        pack, device = self.pack, self.context.device
        images, labels = pack.rows(torch.arange(begin, end, device=pack.labels.device), device)
        logits = torch.zeros((), device=device)
        with autocast(device, self.precision):
            for weight, view in views(images, self.tta):
                logits = logits + weight * self.model(self.normalise(view)).float()
        return logits, labels


def views(images: Tensor, tta: str) -> Iterator[tuple[float, Tensor]]:
    """Yield (weight, view) of uint8 images [N, C, H, W] for test-time augmentation (``tta``: trainer.tta). mirror: the
    image and its mirror image. multicrop: also both shifted by one pixel, up and left as well as down and right, at
    half the weight (arXiv 2404.00498).
    """
    if tta == "none":
        yield 1.0, images
        return
    shifted: list[Tensor] = []
    if tta == "multicrop":
        height, width = images.shape[2:]
        padded = bordered(images, _SHIFT_PIXELS, "reflect")
        shifted = [padded[..., start : start + height, start : start + width] for start in (0, 2 * _SHIFT_PIXELS)]
    for weight, view in [(0.25 if shifted else 0.5, images), *((0.125, item) for item in shifted)]:
        yield weight, view
        yield weight, view.flip(3)
