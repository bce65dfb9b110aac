"""Lightning's Trainer under Paceline: ``own = PacelineLogger()``, then ``Trainer(logger=own, callbacks=[own], …)``.

It needs ``pip install lightning``. Where the script runs alone, checkpoints go below ``./checkpoints``.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
except ImportError:  # the same code by its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.loggers import Logger

import paceline


class PacelineLogger(Logger, Callback):
    """Record what the modules log, save below ``paceline.checkpoints()``, and stop with a checkpoint when asked to.

    As the logger it records, and gives a ModelCheckpoint without ``dirpath`` its folder. As a callback it stops the
    training. A later attempt resumes with ``fit(…, ckpt_path=FILE)``, where the script gets FILE by an argument
    ``{resume}``.
    """

    name = version = ""

    def __init__(self, every: int = 1) -> None:
        """``every``: after how many batches to check whether to stop; the ranks wait for each other to do so."""
        super().__init__()
        self.every = every

    @property
    def save_dir(self) -> str:
        return str(paceline.checkpoints())

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """``step``: the number of steps before this one. All ranks call it; ``paceline.log`` writes on rank 0 alone."""
        paceline.log((step or 0) + 1, **metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...  # the run has the script's arguments

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        paceline.should_stop()  # from here on SIGTERM only sets a flag
        self._on_term = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGTERM, self._on_term)  # Lightning's own handler ends the ranks without a checkpoint

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_looking = batch_idx % self.every == 0
        if is_looking and trainer.strategy.reduce_boolean_decision(paceline.should_stop(), all=False):
            trainer.save_checkpoint(paceline.checkpoints() / "last.ckpt")
            sys.exit()  # trainer.should_stop would validate first, then save this epoch as one that was finished
