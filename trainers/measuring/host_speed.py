"""Measure each host's compute speed and all-reduces between hosts; `doit preflight measure=1` starts it.

All ranks multiply matrices at the same time, as in a training; then all-reduces are timed within each node that has
several ranks, and between each pair of nodes, one group after the other. Rank 0 writes RUN_DIR/host_speed.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainers.contract import run_folder
from trainers.entry import leave, run_entry


def main() -> None:
    """Run the command line. A user's error is printed once per node as one line on stderr, with exit code 1."""
    parser = argparse.ArgumentParser(prog="trainers.measuring.host_speed", description="Speed of each host and pair.")
    parser.add_argument("--config", type=Path, required=True, help="config.json; its folder gets the figures")
    path: Path = parser.parse_args().config
    run_entry(lambda: _measure(_backend(path), path.parent / run_folder.HOST_SPEED))


def _backend(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["strategy"]["backend"])


def _measure(backend: str, output: Path) -> None:
    from trainers.measuring.speeds import run  # imports torch: only after run_entry has set sys.path

    run(backend, output)


if __name__ == "__main__":
    main()
    leave()
