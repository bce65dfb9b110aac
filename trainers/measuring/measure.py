"""Measure training throughput: ``torchrun … -m trainers.measuring.measure --config RUN_DIR/config.json``.

Blocks of the Trainer's own steps and of a plain PyTorch loop (``reference_loop``) alternate in one process; then the
parts of some steps are timed. Rank 0 writes RUN_DIR/measure.json. config.json is that of a training with an
additional section ``measure``: {"pairs": n, "block_s": seconds}.
"""

from __future__ import annotations

from pathlib import Path

from trainers.entry import leave, start


def _run(path: Path) -> None:
    from trainers.measuring.throughput import run  # imports torch: only after start has set sys.path

    run(path)


def main() -> None:
    start("trainers.measuring.measure", _run)


if __name__ == "__main__":
    main()
    leave()
