"""torch's PowerSGD for DistributedDataParallel (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019), resumable.

Annotations are not postponed: DistributedDataParallel compares those of a hook with its own types.
"""

import socket

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from trainers.core.errors import TrainerError
from trainers.core.installer import install

_SEED = 20190531
_PLAIN, _COMPRESSING = 0, 2  # PowerSGDState.iter; torch takes no other start than 2 or later
_EPSILON = 1e-20  # keeps a column of zeros from becoming 0 / 0
_SPARK = 1e-15  # of the first factor in each step: from nothing but zeros no power iteration comes back


class PowerSGD:
    """torch's state of PowerSGD, as a checkpoint can hold it.

    The last pass before the first step runs compressed, so that torch's state has its tensors; ``forget()`` then puts
    them where every run begins, and a checkpoint is copied into ``factors()`` and ``errors()``.
    """

    def __init__(self, *, rank: int, start_step: int, backend: str) -> None:
        """``rank``: columns of a factor; ``start_step``: the first step that is compressed.

        Raises:
            TrainerError: this host has no numpy. It decides nothing: ``forget`` draws the first factors anew.
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
        # Over gloo the second and third all-reduce of a bucket are started by gloo's threads. Two buckets at once would
        # start theirs in another order on each rank, and could take all threads for waiting.
        self._one_by_one = backend != "nccl"
        self._first: dict[int, Tensor] = {}

    def start(self, step: int) -> None:
        """``step`` counts the steps of the run from 0; -1 is the last pass before them, which is compressed."""
        compressing = step == -1 or step >= self._start_step
        self._torch.iter = _COMPRESSING if compressing else _PLAIN
        for index, first in self._first.items() if compressing else ():
            self._torch.q_memory_dict[index].add_(first, alpha=_SPARK)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the mean of a bucket over the ranks."""
        future: Future[Tensor] = self._hook(self._torch, bucket)
        if self._one_by_one:
            future.wait()
        return future

    def forget(self) -> None:
        """Begin anew: no error, and first factors that are the same on every rank and in every run."""
        generator = torch.Generator().manual_seed(_SEED)
        for index, factor in sorted(self._torch.q_memory_dict.items()):
            self._first[index] = torch.randn(factor.shape, generator=generator).to(factor)
            factor.copy_(self._first[index])
        for error in self._torch.error_dict.values():
            error.zero_()

    def factors(self) -> list[Tensor]:
        """One flat tensor a bucket, the same on all ranks: where the next step begins."""
        return [factor for _, factor in sorted(self._torch.q_memory_dict.items())]

    def errors(self) -> list[Tensor]:
        """One flat tensor a bucket, each rank's own: what it hasn't sent yet."""
        return [error for _, error in sorted(self._torch.error_dict.items())]


def powersgd_hook(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """``PowerSGD.reduce`` as DistributedDataParallel takes it."""
    return state.reduce(bucket)
