import pytest
import torch

from trainers.models.small_cnn import Dropout

LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_share_that_is_dropped_is_p_and_the_rest_is_scaled(layout: torch.memory_format) -> None:
    torch.manual_seed(3)
    ones = torch.ones(64, 32, 14, 14).contiguous(memory_format=layout).requires_grad_()
    dropped = Dropout(0.3)(ones)
    zeros = dropped == 0
    assert float(zeros.float().mean()) == pytest.approx(0.3, abs=0.005)
    assert zeros.float().mean((1, 2, 3)).std() < 0.02  # no image is special
    assert dropped[~zeros].eq(1 / 0.7).all()
    dropped.sum().backward()
    assert ones.grad is not None
    assert ones.grad.equal(dropped)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5, 5)])
def test_any_shape_works_and_the_generator_decides(shape: tuple[int, ...]) -> None:
    layer, values = Dropout(0.5), torch.ones(shape, dtype=torch.bfloat16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(torch.cat([layer(values).flatten() for _ in range(20)]))
    assert results[0].equal(results[1])
    assert not results[0].equal(results[2])


def test_evaluation_and_zero_change_nothing() -> None:
    values = torch.randn(4, 4)
    assert Dropout(0.5).eval()(values) is values
    assert Dropout(0.0)(values) is values
