"""The command line that node modules share: ``--config RUN_DIR/config.json``, a user's error as one line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from trainers.core import garbage
from trainers.distributed.isolation import leave_snapshot_and_installed


def start(program: str, run: Callable[[Path], None], description: str | None = None) -> None:
    """Call ``run`` with the path of config.json; what a person can fix is said once a node, with exit code 1."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", type=Path, required=True, help="config.json in the run folder")
    path: Path = parser.parse_args().config
    leave_snapshot_and_installed()
    garbage.pause()
    from torch.distributed.elastic.multiprocessing.errors import record  # torch only after the arguments hold

    from trainers.core.config import ConfigError
    from trainers.core.errors import TrainerError
    from trainers.distributed.process_group import read_ranks

    try:
        record(run)(path.resolve())  # writes what goes wrong to TORCHELASTIC_ERROR_FILE, where the agent finds it
    except (ConfigError, TrainerError) as error:
        if read_ranks().local_rank == 0:
            print(f"paceline: error: {error}", file=sys.stderr, flush=True)
        leave(1)
    except Exception:
        traceback.print_exc()
        leave(1)


def leave(code: int = 0) -> None:
    """End the process now: all results are on the disk, or the error is said.

    Unloading torch would take every rank another half second, and now and then a thread of gloo's aborts a process
    that ends in order, so that what has succeeded would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
