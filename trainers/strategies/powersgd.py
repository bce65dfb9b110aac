"""Gradient compression by torch's PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), made resumable.

Annotations are not postponed: DistributedDataParallel compares those of a hook with its own types.
"""

import socket

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from trainers.core.errors import TrainerError, install

_SEED = 20190531
_PLAIN, _COMPRESSING = 0, 2  # values of PowerSGDState.iter; torch's start_powerSGD_iter must be at least 2
_EPSILON = 1e-20  # keeps a column of zeros from becoming 0 / 0
_SPARK = 1e-15  # share of the first factor added in each step: a power iteration cannot leave all zeros


class PowerSGD:
    """torch's state of PowerSGD, in a form that a checkpoint can hold.

    The last warm-up pass runs compressed, so that torch creates its tensors. ``forget()`` then sets them to the initial
    values of every run, and a checkpoint is copied into ``factors()`` and ``errors()``.
    """

    def __init__(self, *, rank: int, start_step: int, backend: str) -> None:
        """``rank``: columns of a factor; ``start_step``: the first step that is compressed.

        Raises:
            TrainerError: this host has no numpy. numpy influences no result: ``forget`` draws the first factors.
        """

        self._hook = powerSGD_hook
        try:
            self._torch = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=rank,
                start_powerSGD_iter=_COMPRESSING,
                orthogonalization_epsilon=_EPSILON,
            )
        except ImportError as error:
            raise TrainerError(
                f"strategy.compression=powersgd needs numpy on host {socket.gethostname()} ({error}); install it there "
                f"({install('numpy')}), or take strategy.compression=fp16"
            ) from error
        self._start_step = start_step
        # With gloo, gloo's threads start the second and third all-reduce of a bucket. Two buckets at once would start
        # theirs in a different order on each rank, and could block all threads.
        self._one_by_one = backend != "nccl"
        self._first: dict[int, Tensor] = {}

    def start(self, step: int) -> None:
        """``step`` counts the steps of the run from 0; -1 is the last warm-up pass, which is compressed."""
        compressing = step == -1 or step >= self._start_step
        self._torch.iter = _COMPRESSING if compressing else _PLAIN
        for index, first in self._first.items() if compressing else ():
            self._torch.q_memory_dict[index].add_(first, alpha=_SPARK)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average a bucket over the ranks."""
        future: Future[Tensor] = self._hook(self._torch, bucket)
        if self._one_by_one:
            future.wait()
        return future

    def forget(self) -> None:
        """Reset to no error, and to first factors that are the same on every rank and in every run."""
        generator = torch.Generator().manual_seed(_SEED)
        for index, factor in sorted(self._torch.q_memory_dict.items()):
            self._first[index] = torch.randn(factor.shape, generator=generator).to(factor)
            factor.copy_(self._first[index])
        for error in self._torch.error_dict.values():
            error.zero_()

    def factors(self) -> list[Tensor]:
        """Return one flat tensor per bucket, the same on all ranks: the factors for the next step."""
        return [factor for _, factor in sorted(self._torch.q_memory_dict.items())]

    def errors(self) -> list[Tensor]:
        """Return one flat tensor per bucket, different on each rank: the gradient that it hasn't sent yet."""
        return [error for _, error in sorted(self._torch.error_dict.items())]


def powersgd_hook(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adapt ``PowerSGD.reduce`` to DistributedDataParallel's hooks."""
    return state.reduce(bucket)
