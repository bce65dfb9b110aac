"""The program that each rank of a measurement runs: ``torchrun … -m trainers.measuring.measure --config
RUN_DIR/config.json``.

The sections of config.json decide what is measured: with ``measure``, the Trainer's steps against a plain loop; with
``profile``, a trace of rank 0; with neither, the speeds of hosts. Rank 0 writes the results into RUN_DIR."""

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
