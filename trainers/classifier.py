"""Train an image classifier: ``torchrun … -m trainers.classifier --config RUN_DIR/config.json``.

Reads RUN_DIR/config.json and RUN_DIR/data/, writes the files of the run-folder contract into RUN_DIR
(rank 0). Also runs as ``python -m trainers.classifier``: then there is one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path


def main() -> None:
    """The command line. A user's error is one line on stderr, once a node, and exit code 1."""
    parser = argparse.ArgumentParser(prog="trainers.classifier", description="Train an image classifier.")
    parser.add_argument("--config", type=Path, required=True, help="config.json in the run folder")
    path: Path = parser.parse_args().config
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read once by CUDA
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # a node needs no numpy
    _train(path.resolve())


def _train(path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record  # torch only after the arguments hold

    from trainers.config import ConfigError
    from trainers.distributed import read_ranks
    from trainers.errors import TrainerError
    from trainers.session import run

    try:
        record(run)(path)  # writes what goes wrong to TORCHELASTIC_ERROR_FILE, where the agent finds it
    except (ConfigError, TrainerError) as error:
        if read_ranks().local_rank == 0:
            print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all results are on the disk; unloading torch would take every rank another half second
