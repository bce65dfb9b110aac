"""The program that extracts a data set of torchvision for `doit fetch`, in a process of its own because torchvision
imports torch: ``python -m trainers.data.torchvision_images REQUEST``, a JSON object with ``name`` (the class in
torchvision.datasets), ``root``, ``download`` and ``out`` (a folder). For each part (train, test) it writes PART.bin,
the image files one after the other, and at the end meta.json:
``{"classes": [names], "parts": {part: {"ends": [end of each file in PART.bin], "labels": [class numbers]}}}``."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from torchvision import datasets

_SELECTING_ARGUMENTS: Mapping[str, Mapping[str, Sequence[object]]] = {
    "train": {"train": (True,), "test": (False,)},
    "split": {"train": ("train", "trainval"), "test": ("test", "val")},
}
"""Argument of a class that selects a part → part → values to try; the first that the class accepts is used."""


def main(request: Mapping[str, Any]) -> None:
    """Extract the data set. Raises ValueError: no such class, or labels that are no numbers; and the class's errors."""
    name, out = request["name"], Path(request["out"])
    kind = getattr(datasets, name, None) if name in datasets.__all__ else None
    if kind is None:
        near = difflib.get_close_matches(name, datasets.__all__, n=3)
        raise ValueError(f"torchvision.datasets has no {name}{f'; did you mean {near[0]}?' if near else ''}")
    parameters = inspect.signature(kind).parameters
    # with Path as its loader, a class returns each image's path, and the file is copied without being decoded
    offered = {"root": request["root"], "download": request["download"], "loader": Path}
    arguments = {name: value for name, value in offered.items() if name in parameters}
    parts: dict[str, Any] = {}
    classes: Sequence[Any] = ()
    for part, dataset in _parts(kind, parameters, arguments).items():
        parts[part] = _write(dataset, out / f"{part}.bin")
        classes = classes or getattr(dataset, "classes", ())
    count = 1 + max(parts["train"]["labels"])  # some data sets name no classes, or other ones
    names = [_text(item) for item in classes] if len(classes) == count else [str(number) for number in range(count)]
    (out / "meta.json").write_text(json.dumps({"classes": names, "parts": parts}), encoding="utf-8")


def _parts(kind: Callable[..., Any], parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return part → data set; a class that knows no parts gives only train."""
    selecting = next((item for item in _SELECTING_ARGUMENTS if item in parameters), None)
    if selecting is None:
        return {"train": kind(**arguments)}
    return {
        part: _first(kind, arguments, selecting, values) for part, values in _SELECTING_ARGUMENTS[selecting].items()
    }


def _first(kind: Callable[..., Any], arguments: Mapping[str, Any], selecting: str, values: Sequence[object]) -> Any:
    """Make the data set with the first value of the argument ``selecting`` that the class accepts."""
    for value in values[:-1]:
        try:
            return kind(**arguments, **{selecting: value})
        except ValueError:
            continue
    return kind(**arguments, **{selecting: values[-1]})


def _write(dataset: Any, path: Path) -> dict[str, list[int]]:
    """Write the image files of one part to ``path``; return the end of each file there, and its label."""
    ends, labels, end = list[int](), list[int](), 0
    with path.open("wb") as file:
        for number in range(len(dataset)):
            image, label = dataset[number]
            if not hasattr(label, "__index__"):
                raise ValueError(
                    f"{type(dataset).__name__} has labels of {type(label).__name__}; wanted: class numbers"
                )
            content = _content(image)
            end += len(content)
            file.write(content)
            ends.append(end)
            labels.append(int(label))
    return {"ends": ends, "labels": labels}


def _content(image: Any) -> bytes:
    """Return the bytes of the image's file if the data set gave its path; else the pixels as PNG, which is lossless."""
    if isinstance(image, Path):
        return image.read_bytes()
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _text(item: Any) -> str:
    """Return a class's name; some data sets have tuples of synonyms."""
    return str(item[0]) if isinstance(item, tuple) else str(item)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception as error:  # classes raise any type; the user gets its message
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
