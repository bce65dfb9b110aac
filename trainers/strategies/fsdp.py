"""FSDP2: each rank holds a slice of every weight, of its gradient and of its optimizer state.

torch's fully_shard (Zhao et al.: PyTorch FSDP, VLDB 2023) gathers the weights of one part of the network when they
are needed and frees them again. The optimizer works on the slices as on any tensors, so it must be elementwise, as SGD
and Adam are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainers.core.config import ConfigError, StrategyConfig, TrainConfig
from trainers.core.errors import TrainerError, install
from trainers.core.files import explained, write_atomic
from trainers.distributed.process_group import RankContext
from trainers.strategies import GradientSync, Layout, Strategy

_LARGEST_BYTES, _SMALLEST_BYTES = 25 << 20, 1 << 20  # bounds of the weights that are gathered at once
_CHUNK_BYTES = 64 << 20  # of a file that is sent to another host


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """Nothing more to set."""

    name: str = "fsdp"

    def check(self, config: TrainConfig) -> None:
        """Refuse an optimizer that needs whole tensors, and a compiled network."""
        if not config.optimizer.elementwise:
            called = getattr(config.optimizer, "class_name", f"optimizer={config.optimizer.name}")
            raise ConfigError(
                f"strategy=fsdp updates slices of tensors, which {called} can't; "
                "choose optimizer=sgd, optimizer=adam, optimizer=adamw or strategy=ddp"
            )
        if config.trainer.compile:
            raise ConfigError(
                "trainer.compile=true goes with strategy=ddp; take trainer.compile=false, or strategy=ddp"
            )


def build(config: TrainConfig, model: nn.Module, context: RankContext, precision: str) -> Strategy:
    """Shard ``model`` in place over all ranks.

    Raises:
        TrainerError: GPUs without nccl, or no numpy on this host.
    """
    if context.device.type == "cuda" and context.backend != "nccl":
        raise TrainerError(
            f"strategy=fsdp on GPUs needs strategy.backend=nccl, and this run has {context.backend}; "
            "with one rank a GPU take strategy.backend=auto, else strategy=ddp"
        )
    if importlib.util.find_spec("numpy") is None:
        raise TrainerError(
            f"strategy=fsdp needs numpy on host {socket.gethostname()} (what checkpoints hold is exchanged "
            f"through it); install it there ({install('numpy')}), or take strategy=ddp"
        )
    if not dist.is_initialized():  # a single rank shards into one slice, so that its checkpoints have the same format
        backend = "cpu:gloo,cuda:nccl" if context.backend == "nccl" else context.backend
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(context.device.type, (context.ranks.world_size,))
    shard(model.to(memory_format=torch.contiguous_format), mesh, precision)
    layout = Shards(model, context, mesh)
    return Strategy(layout=layout, network=model, gradient_sync=ShardSync(layout))


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Apply fully_shard to the model, part by part. Weights are used in ``precision``, gradients are summed in fp32.

    Batch normalisation keeps fp32 weights, which are gathered together.
    """
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32)
    norms: list[nn.Module] = [item for item in model.modules() if isinstance(item, nn.modules.batchnorm._BatchNorm)]
    if lower is not None and norms:
        fully_shard(norms, mesh=mesh)
    for part in parts(model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    # Without reshard_after_forward the root keeps its weights gathered after an evaluation. A state_dict() on one rank
    # would then free them on that rank only, and the ranks would wait for each other in different collectives.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(mesh.size())
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            # torch 2.9 moves slices of unequal size when it first gathers them: do so before the layout refers to them
            part.unshard()
            part.reshard()


def parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of 1 to 25 MiB of weights, as large as possible; smaller ones stay with the root."""
    for child in model.children():
        size_bytes = sum(item.nbytes for item in child.parameters())
        called = type(child).forward is not nn.Module.forward  # a ModuleList is never called
        if (size_bytes > _LARGEST_BYTES and any(True for _ in child.children())) or not called:
            yield from parts(child)
        elif size_bytes >= _SMALLEST_BYTES:
            yield child


class Shards(Layout):
    """This rank's slices. Each tensor is cut along its first dimension; a rank beyond its rows has an empty slice."""

    name = "fsdp"

    def __init__(self, model: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
        super().__init__(model, context)
        self.mesh = mesh
        self._named = {name: item for name, item in model.named_parameters() if isinstance(item, DTensor)}
        self.whole = {name: item for name, item in self._named.items() if item.requires_grad}
        self.parameters = [item.to_local().detach() for item in self.whole.values()]
        self._far: list[int] = []  # ranks that don't see rank 0's folder
        self._far_leaders: list[int] = []  # those of them with local_rank 0

    def agree(self, found_inf: Tensor) -> Tensor:
        """Set 1.0 on every rank if any rank has a gradient that is not finite."""
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return found_inf

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Combine the norms of the slices of all ranks."""
        square = norm**2
        dist.all_reduce(square)
        return square.sqrt()

    def weights(self) -> dict[str, Tensor]:
        """Gather the weights one by one on rank 0; empty elsewhere."""
        weights = {}
        for name, value in self.model.state_dict().items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.context.is_rank_zero:
                weights[name] = full.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        return weights

    def replicated(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return buffers, and optimizer state that is not sliced."""
        model = {name: value for name, value in self.model.state_dict().items() if not isinstance(value, DTensor)}
        return model, {name: items for name, items in state.items() if not self._is_sliced(items)}

    def look(self, folder: Path) -> None:
        """Find the hosts without access to rank 0's folder: their shards are sent through the process group."""
        self._far, self._far_leaders = missing_files(folder, self.context)

    def save(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> dict[str, str]:
        """Write ``shards-<step>/`` with one file per rank, complete on rank 0's host.

        Raises:
            TrainerError: a weight is not finite, or the folder can't be written.
        """
        self._refuse_nonfinite(step)
        target = folder / folder_name(step)
        if self.context.ranks.local_rank == 0:
            shutil.rmtree(target, ignore_errors=True)  # remains of a killed attempt
        dist.barrier()
        path = target / file_name(self.context.ranks.rank)
        needed_bytes = sum(item.nbytes for item in self.parameters)
        written: dict[str, str] = {}
        error: str | None = None
        try:
            written = {path.name: write_slices(path, self._content(state), needed_bytes)}
        except TrainerError as failure:
            error = str(failure)
        said = self._agreed(error, written)
        # copy the files of ranks without access to rank 0's folder, then delete them here
        for rank in self._far:
            exchange(target, [*said[rank]], source=rank, target=0, context=self.context)
        if self.context.ranks.rank in self._far:
            path.unlink()
            with contextlib.suppress(OSError):  # another rank of this host still has files there
                target.rmdir()
        return {f"{target.name}/{name}": sha256 for digests in said for name, sha256 in digests.items()}

    def load(self, folder: Path, step: int, state: Mapping[str, list[Tensor]]) -> None:
        """Load a checkpoint that any number of ranks saved.

        Raises:
            TrainerError: the shards belong to another model.
        """
        source = folder / folder_name(step)
        mine = sorted(path.name for path in source.glob("rank-*.pt")) if self.context.is_rank_zero else []
        names = self.context.share(mine)[0]
        for rank in self._far_leaders:
            exchange(source, names, source=0, target=rank, context=self.context)
        dist.barrier()
        wrong = read_slices([source / name for name in names], self._content(state))
        unfit = wrong and (
            f"the shards of step {step} do not fit this model ({wrong[:200]}); delete {folder} to start afresh"
        )
        self._agreed(unfit, None)
        if self.context.ranks.rank in self._far_leaders:
            shutil.rmtree(source, ignore_errors=True)

    def _agreed(self, error: str | None, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises TrainerError on all ranks if one has an error."""
        said = self.context.share((error, value))
        for text, _ in said:
            if text is not None:
                raise TrainerError(text)
        return [answer for _, answer in said]

    def _content(self, state: Mapping[str, list[Tensor]]) -> dict[str, Slice]:
        """Return all slices by name, as views of this rank's tensors: writing into them loads a checkpoint."""
        slices = {f"model.{name}": self._slice(item.to_local().detach(), item) for name, item in self._named.items()}
        for kind, items in state.items():
            if self._is_sliced(items):
                for (name, whole), item in zip(self.whole.items(), items, strict=True):
                    slices[f"{kind}.{name}"] = self._slice(item, whole)
        return slices

    def _slice(self, local: Tensor, whole: DTensor) -> Slice:
        """Return the slice of ``local``; a rank has as many rows as torch.chunk gives it."""
        rows = whole.shape[0]
        return Slice(first=min(rows, -(-rows // self.mesh.size()) * self.context.ranks.rank), rows=rows, local=local)

    def _is_sliced(self, items: Sequence[Tensor]) -> bool:
        return [item.shape for item in items] == [item.shape for item in self.parameters]

    def _refuse_nonfinite(self, step: int) -> None:
        bad = [name for name, item in zip(self.whole, self.parameters, strict=True) if not torch.isfinite(item).all()]
        names: list[str | None] = self.context.share(bad[0] if bad else None)
        first = next((name for name in names if name is not None), None)
        if first is not None:
            raise TrainerError(
                f"{first} is not finite after step {step}, which is therefore not saved; "
                "a lower optimizer.lr usually helps"
            )


class ShardSync(GradientSync):
    """Hands FSDP's averaged gradients to the slices.

    FSDP averages in every backward pass, as unreduced gradients would fill the memory.
    """

    def __init__(self, layout: Shards) -> None:
        super().__init__(layout.whole)
        self._layout = layout

    def finish(self) -> None:
        """Raises TrainerError naming a parameter that took no part in the loss."""
        super().finish()
        for whole, part in zip(self._layout.whole.values(), self._layout.parameters, strict=True):
            assert isinstance(whole.grad, DTensor)
            part.grad = whole.grad.to_local()


# Files of a sharded checkpoint: names, reading and writing, and transfer between hosts without a shared folder.


def folder_name(step: int) -> str:
    """Return the folder with the shards of a step, next to its step-*.pt."""
    return f"shards-{step:08d}"


def file_name(rank: int) -> str:
    """Return the file with a rank's slices in that folder."""
    return f"rank-{rank:05d}.pt"


class Slice(NamedTuple):
    """A rank's rows of a tensor with ``rows`` rows in total, starting at row ``first``."""

    first: int
    rows: int
    local: Tensor


def write_slices(path: Path, content: Mapping[str, Slice], needed_bytes: int) -> str:
    """Write a rank's slices as numbers and tensors, which torch loads with weights_only. Returns the file's sha256.

    Raises:
        TrainerError: the folder is not writable or the disk is full.
    """
    with explained(path.parent, needed_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
    held = {  # copied: for a view, torch.save would write the whole storage
        name: (item.first, item.rows, item.local.to("cpu", memory_format=torch.contiguous_format, copy=True))
        for name, item in content.items()
    }
    return write_atomic(path, lambda file: file.save(held), needed_bytes=needed_bytes)


def read_slices(paths: Sequence[Path], content: Mapping[str, Slice]) -> str | None:
    """Fill ``content`` from the files of all ranks that saved, whatever their number. Returns a misfit, or None."""
    left = {name: len(item.local) for name, item in content.items()}
    for path in paths:
        stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if stored.keys() != content.keys():
            return f"{path.name} differs in {', '.join(sorted(stored.keys() ^ content.keys())[:3])}"
        for name, (first, rows, part) in stored.items():
            own = content[name]
            # overlap of the stored rows and this rank's rows; start >= stop: none
            start, stop = max(first, own.first), min(first + len(part), own.first + len(own.local))
            if rows != own.rows or (start < stop and part.shape[1:] != own.local.shape[1:]):
                return f"{name} has {rows} rows of {[*part.shape[1:]]}, and here {own.rows} of {[*own.local.shape[1:]]}"
            if start < stop:
                own.local[start - own.first : stop - own.first] = part[start - first : stop - first]
                left[name] -= stop - start
    return next((f"{count} rows of {name} are missing" for name, count in left.items() if count), None)


def missing_files(folder: Path, context: RankContext) -> tuple[list[int], list[int]]:
    """Return the ranks that do not see rank 0's ``folder``, and those of them with local_rank 0.

    Every rank must call it.
    """
    path = folder / context.share(f".seen-{secrets.token_hex(8)}")[0]
    if context.is_rank_zero:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    dist.barrier()
    seen = context.share((path.exists(), context.ranks.local_rank))
    if context.is_rank_zero:
        path.unlink()
    far = [(rank, local_rank) for rank, (near, local_rank) in enumerate(seen) if not near]
    return [rank for rank, _ in far], [rank for rank, local_rank in far if local_rank == 0]


def exchange(folder: Path, names: list[str], *, source: int, target: int, context: RankContext) -> None:
    """Copy files of ``folder`` from rank ``source`` to rank ``target`` in chunks; other ranks do nothing."""
    if context.ranks.rank == source:
        for name in names:
            _send(folder / name, target)
    elif context.ranks.rank == target:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            _receive(folder / name, source)


def _send(path: Path, target: int) -> None:
    size_bytes = path.stat().st_size
    dist.send(torch.tensor([size_bytes]), target)
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            dist.send(torch.frombuffer(bytearray(block), dtype=torch.uint8), target)


def _receive(path: Path, source: int) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    left = int(size)
    with explained(path, left), path.open("wb") as file:
        while left:
            block = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
            dist.recv(block, source)
            file.write(block.numpy().tobytes())
            left -= block.numel()
