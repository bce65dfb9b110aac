import pytest
import torch

from trainers.config import ConfigError, ModelConfig, SmallCNNConfig
from trainers.models import ImageShape, build

CIFAR = ImageShape(channels=3, height=32, width=32, num_classes=10)


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


def test_resnet_takes_images_of_one_pixel() -> None:
    image = ImageShape(channels=1, height=1, width=1, num_classes=2)
    assert build(ModelConfig(name="resnet18"), image).eval()(torch.rand(1, 1, 1, 1)).shape == (1, 2)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model.name='vgg' is not an option; choose one of: small_cnn, resnet18"):
        build(ModelConfig(name="vgg"), CIFAR)
