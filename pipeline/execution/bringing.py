"""What comes before a run that starts from other weights: their file is fetched, or their run is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.build import RunConfig
from pipeline.core.errors import Killed, PacelineError, TrainingError
from pipeline.data import store, weights
from pipeline.execution import starting
from pipeline.execution.complete import train
from pipeline.execution.run import prepare, start_of
from pipeline.execution.work import Say


def bring(config: RunConfig, root: Path, *, argv: Sequence[str], say: Say) -> None:
    """Bring the weights that the run starts from here, if they aren't; of a run before it everything that it needs.

    Two commands that need the same run share it: the second waits for the first.

    Raises:
        DataError: an address gives nothing.
        TrainingError: the run before failed.
        Killed: stopped by Ctrl-C or a signal.
    """
    start = start_of(config, root)
    if start is None or start.path is not None:
        return
    if start.url is not None:
        fetch(config, start)
    elif config.parent is not None:
        try:
            _train_parent(config.parent, start.said, root, argv=argv, say=say)
        except Killed:
            raise
        except PacelineError as error:
            what = f"{start.said} failed, and this run starts from its weights: {error.what}"
            raise TrainingError(what, hint=error.hint) from error


def fetch(config: RunConfig, start: starting.Start) -> None:
    """Get the file from its address, if it has one. Raises DataError."""
    if start.url is not None:
        is_torchvisions = "://" not in str(config.train.init.weights)
        weights.fetch(start.url, config.data_dir, setting=start.said, hash_in_name=is_torchvisions)


def _train_parent(parent: RunConfig, said: str, root: Path, *, argv: Sequence[str], say: Say) -> None:
    bring(parent, root, argv=argv, say=say)
    run = prepare(parent, root, store.fetch(parent.train.dataset, parent.data_dir))
    if run is None:
        raise PacelineError("its weights vanished after they were brought here", hint="the same command again")
    if run.reason is not None:
        say(f"{said} comes first: run {run.key.short}")
        train(run, argv=argv, say=say)
        say(f"FINISHED {run.key.short}, whose weights are the next run's")
