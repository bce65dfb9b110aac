"""``dataset=torchvision``: any labelled data set of torchvision.datasets.

A separate process reads it, because torchvision imports torch. That process leaves in a folder one file of concatenated
images per split, and meta.json: {"classes": names, "parts": {split: {"ends": [offset], "labels": [class number]}}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.processes import process
from pipeline.data.base import ImageFilesConfig, ImageItem, ImageSource, Workspace
from pipeline.data.sources.source import files_below, local_path
from trainers.core.config import ConfigError, DatasetConfig
from trainers.core.errors import install

_READER = "trainers.data.torchvision_images"


@dataclass(kw_only=True)
class TorchvisionDatasetConfig(ImageFilesConfig):
    """A class of torchvision.datasets whose labels are class numbers, such as FashionMNIST, Food101 or SVHN.

    source is the ``root`` that the class gets; without it torchvision downloads the set.

    Attributes:
        class_name: the class (``dataset.class=`` says the same).
    """

    name: str = "torchvision"
    class_name: str = ""

    def __post_init__(self) -> None:
        ImageFilesConfig.__post_init__(self)
        if not self.class_name.isidentifier():
            raise ConfigError(f"dataset.class={self.class_name} must name a class of torchvision, as FashionMNIST")


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    path = local_path(config.source)
    if path is None and config.source is None:
        return []
    if path is None or not path.is_dir():
        raise DataError(
            f"dataset.source={config.source} is no folder; wanted: the root of torchvision's class",
            hint="leave dataset.source out to download",
        )
    return files_below(path)


def load(config: TorchvisionDatasetConfig, work: Workspace) -> ImageSource:
    if find_spec("torchvision") is None:
        raise DataError("dataset=torchvision needs torchvision, which isn't here", hint=install("torchvision"))
    root, out = local_path(config.source) or work.downloads, work.folder / "read"
    out.mkdir()
    work.downloads.mkdir(parents=True, exist_ok=True)
    request = {"name": config.class_name, "root": str(root), "download": config.source is None, "out": str(out)}
    work.report(f"reading torchvision's {config.class_name}", 0, None)
    command = [sys.executable, "-m", _READER, json.dumps(request)]
    done = process.run(command, env=process.child_environment())
    if done.code != 0:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.code}"])[-1]
        raise DataError(f"dataset.class={config.class_name} can't be read: {reason}", hint="dataset.source=<its root>")
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    return ImageSource(
        parts={name: partial(_items, out / f"{name}.bin", name, part) for name, part in meta["parts"].items()},
        classes=tuple(meta["classes"]),
        description=f"torchvision's {config.class_name}",
        origin=f"torchvision's {config.class_name}",
    )


def _items(path: Path, name: str, part: Mapping[str, list[int]]) -> Iterator[ImageItem]:
    begin = 0
    with path.open("rb") as file:
        for number, (end, label) in enumerate(zip(part["ends"], part["labels"], strict=True)):
            yield ImageItem(f"{name}[{number}]", partial(BytesIO, file.read(end - begin)), label)
            begin = end
