"""A data set of a person's own, as ``dataset.target`` names one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("small", "large")


def squares(count: int, source: Path | None = None) -> dict[str, Any]:
    """White squares of two sizes."""
    labels = np.arange(count) % 2
    images = np.zeros((count, 8, 8), dtype=np.uint8)
    for number, label in enumerate(labels):
        side = 2 + 4 * int(label)
        images[number, :side, :side] = 100 + number % 100
    if source is not None:
        images[:, 7, 7] = int(source.read_text())
    return {"images": images, "labels": labels, "classes": NAMES}


def nothing() -> None:
    """Returns what can't be taken."""


def failing() -> None:
    """Raises, in a library."""
    json.loads("no")


def leaving() -> None:
    """Ends the process."""
    sys.exit(3)


def closing() -> dict[str, Any]:
    """Closes what the process writes to."""
    sys.stdout = sys.stderr = None
    os.close(1)
    return squares(10)


def renamed(names: list[str]) -> dict[str, Any]:
    """With other names of classes."""
    return {**squares(10), "classes": names}


def more() -> dict[str, Any]:
    """With an array that nobody reads."""
    return {**squares(10), "picture": 1}
