"""Extract a labelled data set of torchvision, in a separate process. ``python -m trainers.data.torchvision_images
REQUEST``: a JSON object with ``name``, ``root``, ``download`` and ``out``, a folder. For each part it writes PART.bin,
the files one after the other, and last meta.json: the end of each file, its label, and the classes."""

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

_WAYS: Mapping[str, Mapping[str, Sequence[object]]] = {
    "train": {"train": (True,), "test": (False,)},
    "split": {"train": ("train", "trainval"), "test": ("test", "val")},
}
"""Argument that selects a part → part → values, of which the first that the class accepts is used."""


def main(request: Mapping[str, Any]) -> None:
    """Raises ValueError: no such class, or its labels are no class numbers. Errors of the class pass through."""
    name, out = request["name"], Path(request["out"])
    kind = getattr(datasets, name, None) if name in datasets.__all__ else None
    if kind is None:
        near = difflib.get_close_matches(name, datasets.__all__, n=3)
        raise ValueError(f"torchvision.datasets has no {name}{f'; did you mean {near[0]}?' if near else ''}")
    known = inspect.signature(kind).parameters
    # with Path as its loader, a class gives each image's path, and the file is copied without being decoded
    offered = {"root": request["root"], "download": request["download"], "loader": Path}
    given = {argument: value for argument, value in offered.items() if argument in known}
    parts: dict[str, Any] = {}
    classes: Sequence[Any] = ()
    for part, made in _parts(kind, known, given).items():
        parts[part] = _write(made, out / f"{part}.bin")
        classes = classes or getattr(made, "classes", ())
    count = 1 + max(parts["train"]["labels"])
    names = [_text(item) for item in classes] if len(classes) == count else [str(number) for number in range(count)]
    (out / "meta.json").write_text(json.dumps({"classes": names, "parts": parts}), encoding="utf-8")


def _parts(kind: Callable[..., Any], known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    argument = next((item for item in _WAYS if item in known), None)
    if argument is None:
        return {"train": kind(**given)}
    return {part: _first(kind, given, argument, values) for part, values in _WAYS[argument].items()}


def _first(kind: Callable[..., Any], given: Mapping[str, Any], argument: str, values: Sequence[object]) -> Any:
    for value in values[:-1]:
        try:
            return kind(**given, **{argument: value})
        except ValueError:
            continue
    return kind(**given, **{argument: values[-1]})


def _write(made: Any, path: Path) -> dict[str, list[int]]:
    ends, labels, end = list[int](), list[int](), 0
    with path.open("wb") as file:
        for number in range(len(made)):
            image, label = made[number]
            if not hasattr(label, "__index__"):
                raise ValueError(f"{type(made).__name__} has labels of {type(label).__name__}; wanted: class numbers")
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
    return str(item[0]) if isinstance(item, tuple) else str(item)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception as error:  # classes raise any type; the user gets its message
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
