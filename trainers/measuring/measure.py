"""How fast the Trainer trains: ``torchrun … -m trainers.measuring.measure --config RUN_DIR/config.json``.

Blocks of the Trainer's own steps and of a plain PyTorch loop (``reference_loop``) take turns in one process, pair
by pair; then some steps are taken apart. Rank 0 writes RUN_DIR/measure.json. config.json is a training's, with a
section ``measure`` beside it: {"pairs": n, "block_s": seconds}.
"""

from __future__ import annotations

from pathlib import Path

from trainers.entry import leave, start


def _run(path: Path) -> None:
    from trainers.measuring.throughput import run  # torch only after what the ranks may import was settled

    run(path)


def main() -> None:
    start("trainers.measuring.measure", _run)


if __name__ == "__main__":
    main()
    leave()
