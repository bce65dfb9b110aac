"""Digests of tensors, and of the steps of real ranks."""

from __future__ import annotations

import pytest
import torch

from pipeline.core.errors import PacelineError
from pipeline.reproduction import divergence
from tests.trainers.ranks import call_on_ranks
from tests.trainers.tiny_runs import MakeRun
from trainers.training.digests import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_one_bit_and_an_exchange_of_two_elements_change_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]).to(dtype)
    other, exchanged = tensor.clone(), tensor.clone()
    other.view(torch.uint8)[-1] ^= 1
    exchanged[0], exchanged[1] = tensor[1], tensor[0]
    assert len({int(digest(item)) for item in (tensor, other, exchanged)}) == 3
    assert int(digest(tensor)) == int(digest(tensor.clone()))


def test_the_digest_does_not_depend_on_the_memory_layout() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert int(digest(tensor)) == int(digest(tensor.to(memory_format=torch.channels_last)))


def test_two_ranks_note_every_nth_step_and_equal_runs_are_equal(make_run: MakeRun) -> None:
    runs = [make_run(name, trainer__digests=4, trainer__max_steps=9) for name in ("one", "other")]
    for run_dir in runs:
        call_on_ranks("tests.trainers.test_exactness:record_samples", run_dir)
    one, other = map(divergence.read, runs)
    assert {step: sorted(ranks) for step, ranks in one.items()} == {4: [0, 1], 8: [0, 1]}
    assert divergence.first_difference(one, other) == (None, (4, 8))
    kinds = {kind for kind, _ in one[4][0]}
    assert kinds == {"inputs", "gradients", "weights"}
    inputs = [one[4][rank]["inputs", "images"] for rank in (0, 1)]
    weights = [one[4][rank]["weights", "classifier.1.weight"] for rank in (0, 1)]
    assert inputs[0] != inputs[1]
    assert weights[0] == weights[1]
    changed = {**other, 8: {**other[8], 1: {**other[8][1], ("weights", "classifier.1.bias"): 7}}}
    difference, _ = divergence.first_difference(one, changed)
    assert difference is not None
    assert divergence.difference_line(difference) == "step 8 (equal at step 4), rank 1: weights (classifier.1.bias)"


def test_runs_without_digests_or_of_other_ranks_are_refused(make_run: MakeRun) -> None:
    with pytest.raises(PacelineError, match="run none has no digests"):
        divergence.read(make_run("none"))
    row = {("weights", "a"): 1}
    with pytest.raises(PacelineError, match="step 4 has digests of 1 and 2 ranks"):
        divergence.first_difference({4: {0: row}}, {4: {0: row, 1: row}})
    with pytest.raises(PacelineError, match="no step of both has digests"):
        divergence.first_difference({4: {0: row}}, {5: {0: row}})
    with pytest.raises(PacelineError, match="weights a is in one of the two networks only"):
        divergence.first_difference({4: {0: row}}, {4: {0: {("weights", "b"): 1}}})
