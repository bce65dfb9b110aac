"""The program that classifies image files with an exported network, for `doit predict`: ``python -P
trainers/predicting.py``. It reads a request from stdin, ``{"model": path, "images": [paths], "height", "width",
"channels", "resize", "top": number of classes}``. It writes a JSON list to stdout with an entry for each image:
``{"image": path, "top": [[class number, probability], …]}`` or ``{"image": path, "error": why}``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainers.data.image_files import BrokenImageError, Geometry, pixels


def main() -> None:
    """Answer the request. Raises the errors of torch.export.load: the file is no exported network."""
    request: dict[str, Any] = json.load(sys.stdin)
    network = torch.export.load(request["model"]).module()
    geometry = Geometry(**{name: request[name] for name in ("height", "width", "channels", "resize")})
    json.dump([classified(network, path, geometry, request["top"]) for path in request["images"]], sys.stdout)


def classified(network: nn.Module, path: str, geometry: Geometry, top: int) -> dict[str, Any]:
    """Return the most probable classes of one image, best first, or why it can't be read."""
    try:
        with Path(path).open("rb") as file:
            data = bytearray(pixels(file, geometry))
    except BrokenImageError as error:
        return {"image": path, "error": str(error)}
    except OSError as error:
        return {"image": path, "error": error.strerror or str(error)}
    image = torch.frombuffer(data, dtype=torch.uint8).reshape(1, geometry.channels, geometry.height, geometry.width)
    with torch.no_grad():
        probabilities = network(image)[0].softmax(dim=0)
    values, classes = probabilities.topk(min(top, len(probabilities)))
    return {"image": path, "top": [[int(number), float(value)] for number, value in zip(classes, values, strict=True)]}


if __name__ == "__main__":
    main()
