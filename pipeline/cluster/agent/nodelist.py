"""Slurm's short form of node names. Pure."""

from __future__ import annotations

import re


def expand(text: str) -> list[str]:
    """``node[001-003,7],gpu-a`` → node001, node002, node003, node7, gpu-a. Raises ValueError."""
    return [name for part in split(text) for name in expand_one(part)]


def split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]*\]|,)*", text):
        raise ValueError(f"brackets that don't match in {text!r}")
    return list(re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text))


def expand_one(part: str) -> list[str]:
    """One name with any number of brackets; the first bracket changes slowest."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    return [head + number + end for number in numbers(inside) for end in expand_one(tail)]


def numbers(ranges: str) -> list[str]:
    """``001-003,7`` → 001, 002, 003, 7: as wide as they are written."""
    found: list[str] = []
    for item in ranges.split(","):
        low, dash, high = item.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"{item!r} is no range of numbers")
        found += [str(value).zfill(len(low)) for value in range(int(low), int(high or low) + 1)]
    return found
