"""FSDP2: each rank holds a slice of every weight, of its gradient and of its optimizer state.

torch's fully_shard (Zhao et al.: PyTorch FSDP, VLDB 2023) gathers the weights of one part of the network when they
are needed, and frees them again. The optimizer gets the slices as ordinary tensors, so it must be elementwise, as SGD
and Adam are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainers.checkpoint import Checkpoint
from trainers.core.config import ConfigError, StrategyConfig, TrainConfig
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.strategies import GradientSync, Layout, Strategy, on_cpu

_LARGEST_BYTES, _SMALLEST_BYTES = 25 << 20, 1 << 20  # bounds of the weights that are gathered at once


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
    if context.device.type == "cuda" and context.backend != "nccl":
        raise TrainerError(
            f"strategy=fsdp on GPUs needs strategy.backend=nccl, and this run has {context.backend}; "
            "with one rank a GPU take strategy.backend=auto, else strategy=ddp"
        )
    if not dist.is_initialized():  # a single rank shards into one slice
        backend = "cpu:gloo,cuda:nccl" if context.backend == "nccl" else context.backend
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(context.device.type, (context.ranks.world_size,))
    shard(model.to(memory_format=torch.contiguous_format), mesh, precision)
    layout = Shards(model, context, mesh)
    return Strategy(layout=layout, network=model, gradient_sync=ShardSync(layout))


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard the model, part by part: weights are used in ``precision`` (of norms in fp32), gradients summed in fp32."""
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
        is_callable = type(child).forward is not nn.Module.forward  # a ModuleList is not
        has_children = any(True for _ in child.children())
        # fully_shard gathers a module's weights when it is called
        if not is_callable or (size_bytes > _LARGEST_BYTES and has_children):
            yield from parts(child)
        elif size_bytes >= _SMALLEST_BYTES:
            yield child


class Shards(Layout):
    """This rank's slices: each tensor is cut along its first dimension; slices of few rows may be empty."""

    name = "fsdp"

    def __init__(self, model: nn.Module, context: RankContext, mesh: DeviceMesh) -> None:
        super().__init__(model, context)
        self.mesh = mesh
        self._named = {name: item for name, item in model.named_parameters() if isinstance(item, DTensor)}
        self.sharded = {name: item for name, item in self._named.items() if item.requires_grad}
        # plain tensors over the same memory, in the order of ``sharded``
        self.parameters = [item.to_local().detach() for item in self.sharded.values()]

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

    def copies(self, state: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Gather the slices one by one, so that the checkpoint is whole, and any number of ranks can read it."""
        model, optimizer = self.weights(), dict[str, list[Tensor]]()
        for kind, items in state.items():
            wholes = self._gathered(items) if self._is_sliced(items) else iter(items)
            # every rank must go through ``wholes``, which are collectives
            copies = [on_cpu(whole) for whole in wholes if self.context.is_rank_zero]
            if self.context.is_rank_zero:
                optimizer[kind] = copies
        return model, optimizer

    def _gathered(self, items: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the whole tensor of each slice; ``items``: this rank's slices, one per trained parameter."""
        for local, sharded in zip(items, self.sharded.values(), strict=True):
            shape, stride, placements = sharded.shape, sharded.stride(), sharded.placements
            sliced = DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)
            yield sliced.full_tensor()

    def distribute(self, checkpoint: Checkpoint | None, state: Mapping[str, list[Tensor]]) -> None:
        for name, sharded in self._named.items():
            self._scatter(None if checkpoint is None else checkpoint.model[name], sharded, sharded.to_local().detach())
        for kind, items in state.items():
            pairs = zip(items, self.sharded.values(), strict=True) if self._is_sliced(items) else ()
            for index, (local, sharded) in enumerate(pairs):
                self._scatter(None if checkpoint is None else checkpoint.optimizer[kind][index], sharded, local)

    def _scatter(self, source: Tensor | None, sharded: DTensor, local: Tensor) -> None:
        """Copy this rank's slice of rank 0's ``source`` into ``local``.

        Other ranks have None and give only the shape: distribute_tensor sends rank 0's values.
        """
        whole = local.new_empty(sharded.shape) if source is None else source.to(local)
        local.copy_(distribute_tensor(whole, self.mesh, sharded.placements).to_local())

    def _is_sliced(self, items: Sequence[Tensor]) -> bool:
        """Return True for state with a tensor of each slice's shape, such as momentum; False for a step counter."""
        return [item.shape for item in items] == [item.shape for item in self.parameters]


class ShardSync(GradientSync):
    """Hands FSDP's averaged gradients to the slices.

    They are averaged in every backward pass, not once a step: keeping whole gradients until then would fill the memory.
    """

    def __init__(self, layout: Shards) -> None:
        super().__init__(layout.sharded)
        self._layout = layout

    def finish(self) -> None:
        super().finish()
        for sharded, part in zip(self._layout.sharded.values(), self._layout.parameters, strict=True):
            assert isinstance(sharded.grad, DTensor)
            part.grad = sharded.grad.to_local()
