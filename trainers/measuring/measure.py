"""Measure on all ranks: ``torchrun … -m trainers.measuring.measure --config RUN_DIR/config.json``.

A section of config.json says what:
- ``measure`` ({"pairs": n, "block_s": seconds}): blocks of the Trainer's own steps and of a plain PyTorch loop
  alternate in one process. Rank 0 writes RUN_DIR/measure.json.
- ``profile`` ({"steps": n}): rank 0 traces a few steps. It writes RUN_DIR/trace.json.gz (for ui.perfetto.dev or
  chrome://tracing), and RUN_DIR/profile.json with the longest operations.
- none of them: all ranks multiply matrices at the same time, as in a training; then all-reduces are timed within each
  node that has several ranks, and between each pair of nodes. Rank 0 writes RUN_DIR/host_speed.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainers.contract import run_folder
from trainers.entry import leave, start


def _run(path: Path) -> None:
    # these import torch: only after start has set sys.path
    from trainers.measuring import speeds, throughput

    config = json.loads(path.read_text(encoding="utf-8"))
    if "measure" in config:
        throughput.measure(path, config["measure"])
    elif "profile" in config:
        throughput.trace(path, config["profile"])
    else:
        speeds.run(config["strategy"]["backend"], path.parent / run_folder.HOST_SPEED)


def main() -> None:
    start("trainers.measuring.measure", _run)


if __name__ == "__main__":
    main()
    leave()
