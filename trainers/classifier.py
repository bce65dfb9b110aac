"""The program that each rank of a built-in training runs: ``torchrun … -m trainers.classifier --config
RUN_DIR/config.json``, or ``python -m`` for one rank. It reads RUN_DIR/config.json and RUN_DIR/data/; rank 0 writes the
results into RUN_DIR (``trainers.contract.run_folder``)."""

from __future__ import annotations

import os
from pathlib import Path

from trainers.distributed.ranks import read_ranks
from trainers.entry import leave, start
from trainers.observation.processes import ObservedRank


def main() -> None:
    """Train, as the command line says. An error that the user can fix is one line on stderr per node, exit code 1."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read once by CUDA
    start("trainers.classifier", _run, "Train an image classifier.")


def _run(path: Path) -> None:
    from trainers.training.session import run  # imports torch: only after start has set sys.path

    ranks = read_ranks()
    observed = ObservedRank.of(path.parent, ranks.node_rank, ranks.local_rank)  # before a user's model is imported
    run(path, observed)


if __name__ == "__main__":
    main()
    leave()
