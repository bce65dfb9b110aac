"""Generated images, for trying out a set-up at any size. An accuracy on them means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.data.base import Part, RawSet, Workspace, refuse_source
from trainers.core.config import DatasetConfig, at_least

_TRAIN, _TEST = 1, 2  # random streams of the seed


@dataclass(kw_only=True)
class SyntheticConfig(DatasetConfig):
    """Generated images; an accuracy on them means nothing.

    Attributes:
        size: images of the training set, before val_size is taken off.
        test_size: images of the test split.
        num_classes: classes.
        channels: channels of an image.
        image_size: height and width in pixels.
        generator_seed: seed of the images.
    """

    name: str = "synthetic"
    size: int = 2048
    test_size: int = 512
    num_classes: int = 10
    channels: int = 3
    image_size: int = 32
    generator_seed: int = 0

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        for name in ("size", "test_size", "num_classes", "channels", "image_size"):
            at_least(f"dataset.{name}", getattr(self, name), 1)


def local_inputs(config: DatasetConfig) -> list[Path]:
    """Return no files: the configuration defines the images."""
    refuse_source(config)
    return []


def load(config: SyntheticConfig, work: Workspace) -> RawSet:
    """Describe the images; they are generated block by block during packing."""
    return RawSet(
        train=_part(config, config.size, _TRAIN),
        test=_part(config, config.test_size, _TEST),
        shape=(config.channels, config.image_size, config.image_size),
        classes=tuple(str(index) for index in range(config.num_classes)),
        source=f"generated (seed {config.generator_seed}): an accuracy on these images means nothing",
        origin="generated",
        synthetic=True,
    )


def _part(config: SyntheticConfig, count: int, stream: int) -> Part:
    from pipeline.data.reading.patterns import generate  # late import: looking up a pack doesn't need numpy

    shape = (config.channels, config.image_size, config.image_size)
    settings = {"classes": config.num_classes, "seed": config.generator_seed, "stream": stream}
    return Part(count=count, blocks=lambda: generate(shape, count, **settings))
