"""Measure all-reduce bandwidth and check the sums: ``torchrun … -m trainers.measuring.allreduce [--max-bytes 1G]``.

First every rank sends its identity through an all-gather. Then all-reduces are timed from the smallest to the
largest message, and with more than two nodes also between each pair of them. Rank 0 prints the tables, and with
``--config RUN_DIR/config.json`` (how `doit allreduce` starts it) writes RUN_DIR/allreduce.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.core.errors import TrainerError
from trainers.entry import leave, run_entry

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main() -> None:
    """Run the command line. A user's error is printed once per node as one line on stderr, with exit code 1."""
    parser = argparse.ArgumentParser(
        prog="trainers.measuring.allreduce", description="All-reduce bandwidth of these ranks."
    )
    parser.add_argument("--config", type=Path, help="config.json whose section `allreduce` holds the options below")
    parser.add_argument("--min-bytes", type=size_bytes, help="smallest message (8)")
    parser.add_argument("--max-bytes", type=size_bytes, help="largest message (1G; over gloo 64M)")
    parser.add_argument("--iterations", type=int, help="measurements a size (20)")
    parser.add_argument("--backend", help="auto, gloo or nccl")
    parser.add_argument("--output", type=Path, help="where rank 0 writes the figures as JSON")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    config, output = given.pop("config", None), given.pop("output", None)
    run_entry(lambda: _run(given, config, output))


def _run(given: dict[str, Any], config: Path | None, output: Path | None) -> None:
    from trainers.measuring.bandwidth import Settings, run  # imports torch: only after run_entry has set sys.path

    settings = Settings(**{**(read(config) if config else {}), **given})
    run(settings, output or (config.parent / run_folder.ALLREDUCE if config else None))


def size_bytes(text: str) -> int:
    """Convert ``64M`` to 67108864; K, M and G are powers of 1024. Raises ValueError."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in _UNITS or not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{text!r} is no size; write 8, 64K, 16M or 1G")
    return int(number) * _UNITS[unit]


def read(path: Path) -> dict[str, Any]:
    """Read the options from config.json. Raises TrainerError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path} cannot be read: {error}") from error
    return {"backend": raw.get("strategy", {}).get("backend", "auto"), **raw.get("allreduce", {})}


if __name__ == "__main__":
    main()
    leave()
