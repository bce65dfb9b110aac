from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.core.config import ConfigError, ModelConfig
from trainers.models import ImageShape, build
from trainers.models.small_cnn import Dropout, Linear, SmallCNNConfig
from trainers.models.whitened_cnn import WhitenedCNNConfig, whitening_filters

CIFAR = ImageShape(channels=3, height=32, width=32, num_classes=10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_173_962), ("resnet50", 23_520_842)])
def test_residual_networks_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(item.numel() for item in build(ModelConfig(name=name), CIFAR).parameters()) == parameters


def test_small_cnn_is_the_network_of_the_mnist_example() -> None:
    image = ImageShape(channels=1, height=28, width=28, num_classes=10)
    assert sum(item.numel() for item in build(SmallCNNConfig(), image).parameters()) == 1_199_882


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 8, 8), (3, 32, 32), (1, 6, 6), (2, 7, 11)])
def test_small_cnn_fits_itself_to_the_images(channels: int, height: int, width: int) -> None:
    image = ImageShape(channels=channels, height=height, width=width, num_classes=5)
    logits = build(SmallCNNConfig(width=2, hidden=4), image)(torch.rand(2, channels, height, width))
    assert logits.shape == (2, 5)


@pytest.mark.parametrize("pixels", [1, 5])
def test_images_too_small_for_small_cnn_are_refused(pixels: int) -> None:
    image = ImageShape(channels=1, height=pixels, width=28, num_classes=2)
    with pytest.raises(ConfigError, match=f"at least 6×6 pixels, the data has {pixels}×28"):
        build(SmallCNNConfig(), image)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"model.name='vgg' is not an option; choose one of: own, resnet18, resnet50, small_cnn, "
    ):
        build(ModelConfig(name="vgg"), CIFAR)


def correlated_images() -> torch.Tensor:
    """Noise blurred over pixels and mixed over channels: no two values of a patch are independent."""
    noise = torch.rand(300, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.avg_pool2d(noise, 2, stride=1) - 0.5
    return 6 * images + 3 * images.mean(1, keepdim=True)


def test_whitened_patches_are_uncorrelated_with_variance_one() -> None:
    images = correlated_images()
    filters = whitening_filters(images)
    assert filters.shape == (24, 12)
    assert torch.equal(filters[12:], -filters[:12])
    answers = torch.nn.functional.conv2d(images, filters[:12].view(12, 3, 2, 2)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(answers @ answers.T / answers.shape[1], torch.eye(12), atol=0.02, rtol=0)
    turned = whitening_filters(-images)  # has the same covariance, so the same filters
    torch.testing.assert_close(turned, filters)


def test_the_whitening_is_no_training_but_lies_in_the_weights() -> None:
    model = build(WhitenedCNNConfig(), CIFAR)
    assert sum(item.numel() for item in model.parameters() if item.requires_grad) == 1_971_352
    model.calibrate(correlated_images())  # type: ignore[operator]
    filters = model.state_dict()["whitening.convolution.weight"]
    assert torch.equal(filters.flatten(1), whitening_filters(correlated_images()))
    assert not model.get_parameter("whitening.convolution.weight").requires_grad


def test_the_first_filters_of_the_whitened_cnn_pass_their_input_on() -> None:
    weight = build(WhitenedCNNConfig(width=4), CIFAR).get_parameter("blocks.1.conv1.weight")
    maps = torch.rand(1, 4, 5, 5)
    torch.testing.assert_close(torch.nn.functional.conv2d(maps, weight, padding=1)[:, :4], maps)


@pytest.mark.parametrize(("height", "width"), [(2, 2), (8, 8), (7, 33)])
def test_the_whitened_cnn_fits_itself_to_the_images(height: int, width: int) -> None:
    image = ImageShape(channels=1, height=height, width=width, num_classes=5)
    assert build(WhitenedCNNConfig(width=2), image)(torch.rand(2, 1, height, width)).shape == (2, 5)


def test_images_of_one_pixel_are_too_small_for_a_patch() -> None:
    image = ImageShape(channels=1, height=1, width=9, num_classes=2)
    with pytest.raises(ConfigError, match="at least 2×2 pixels, the data has 1×9"):
        build(WhitenedCNNConfig(), image)


@pytest.mark.parametrize("shape", [(8, 96), (2, 4, 96)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
def test_values_and_gradients_are_those_of_torch(bf16: bool, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, theirs = Linear(96, 32, bias=bias), nn.Linear(96, 32, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (ours, theirs):
        values = torch.linspace(-1, 1, 8 * 96).view(shape).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = layer(values)
        outputs.float().square().sum().backward()
        results.append([outputs, values.grad, *(item.grad for item in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-7 if bf16 else 1e-6, atol=2**-7 if bf16 else 1e-6)


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
