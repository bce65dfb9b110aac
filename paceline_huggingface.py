"""Hugging Face's Trainer under Paceline: ``Trainer(…, callbacks=[PacelineCallback()])``.

It needs ``pip install transformers accelerate``. Where the script runs alone, checkpoints go to ``./checkpoints``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import paceline


class PacelineCallback(TrainerCallback):
    """Record what the Trainer logs, save into ``paceline.checkpoints()``, and stop with a checkpoint when asked to.

    That folder replaces the Trainer's ``output_dir``. A later attempt resumes with
    ``train(resume_from_checkpoint=FOLDER)``, where the script gets FOLDER by an argument ``{resume}``.
    """

    def __init__(self, every: int = 1) -> None:
        """``every``: after how many steps to check whether to stop; the ranks wait for each other to do so."""
        self.every = every

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        args.output_dir = str(paceline.checkpoints())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        paceline.log(state.global_step, **numbers)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and _on_any_rank(paceline.should_stop(), args.device):
            control.should_save = control.should_training_stop = True


def _on_any_rank(stop: bool, device: torch.device) -> bool:
    """Return ``stop`` of any rank on all ranks, which have to leave their loop at the same step."""
    if not (dist.is_available() and dist.is_initialized()):
        return stop
    flag = torch.tensor(int(stop), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
