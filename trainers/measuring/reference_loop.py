"""A training loop in plain PyTorch, tuned by hand, as the baseline of throughput measurements.

DistributedDataParallel with gradient_as_bucket_view and static_graph, torch.optim (fused), autocast, channels
last, the images in memory, no DataLoader, the loss read every ``log_every_steps``. It does the same work as the
Trainer (network, batch, precision, crop and flip), but shares none of its code besides the network's definition.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.data.pack import MappedPack
from trainers.distributed.process_group import RankContext
from trainers.optimizers.adam import AdamConfig
from trainers.optimizers.sgd import SGDConfig
from trainers.training.model_setup import fresh_network

_LR_SHARE = 0.04  # of the configured learning rate, constant: the loss stays finite, and only speed is measured


class ReferenceLoop:
    """The reference loop: trains in plain PyTorch, epoch after epoch."""

    def __init__(self, config: TrainConfig, pack: MappedPack, context: RankContext, *, precision: str) -> None:
        if precision == "fp16":
            raise TrainerError("the reference loop knows fp32 and bf16; measure with trainer.precision=bf16")
        self.config, self.context, self.precision = config, context, precision
        start, stop = pack.manifest.splits["train"]
        if pack.places is not None:  # the pack has encoded image files
            raise TrainerError("the reference loop decodes no image files; a larger dataset.decoded_limit packs pixels")
        self.images = pack.images[start:stop].to(context.device, copy=True)
        self.labels = pack.labels[start:stop].to(context.device, copy=True)
        manifest, shape = pack.manifest, (1, pack.manifest.channels, 1, 1)
        on = config.dataset.normalise
        self.mean = torch.tensor(manifest.mean if on else (0.0,) * shape[1], device=context.device).view(shape) * 255
        self.std = torch.tensor(manifest.std if on else (1.0,) * shape[1], device=context.device).view(shape) * 255
        self.std[self.std == 0] = 1.0
        self.batch = config.trainer.global_batch_size // context.ranks.world_size
        self.model = _distributed(fresh_network(config.model, manifest, context, seed=config.seed), context)
        self.optimizer = _optimizer(config, self.model)
        self.order = torch.empty(0, dtype=torch.int64)
        self.step = 0
        self.model.train()

    def run(self, steps: int) -> None:
        """Train ``steps`` steps; return when they are queued on the device, except that a logged loss is waited for.

        cuDNN uses the fastest algorithms here, whatever the configuration sets for the Trainer.
        """
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        cudnn.benchmark, cudnn.deterministic = True, False
        try:
            self._run(steps)
        finally:
            cudnn.benchmark, cudnn.deterministic = before

    def _run(self, steps: int) -> None:
        per_epoch = self.labels.numel() // self.config.trainer.global_batch_size
        for _ in range(steps):
            position = self.step % per_epoch
            if position == 0:
                generator = torch.Generator().manual_seed(self.step)  # the same order on all ranks
                self.order = torch.randperm(self.labels.numel(), generator=generator).to(self.context.device)
            first = (position * self.context.ranks.world_size + self.context.ranks.rank) * self.batch
            loss = self._train(self.order[first : first + self.batch])
            self.step += 1
            if self.step % self.config.trainer.log_every_steps == 0:
                loss.item()

    def _train(self, index: Tensor) -> Tensor:
        trainer = self.config.trainer
        images = ((self._augment(self.images[index]) - self.mean) / self.std).to(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.context.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(images)
            loss = functional.cross_entropy(logits, self.labels[index], label_smoothing=trainer.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _augment(self, images: Tensor) -> Tensor:
        padding, (count, channels, height, width) = self.config.dataset.crop_padding, images.shape
        if padding:
            padded = functional.pad(images, (padding,) * 4)
            corner = torch.randint(0, 2 * padding + 1, (2, count, 1), device=images.device)
            rows = (corner[0] + torch.arange(height, device=images.device)).view(count, 1, height, 1)
            columns = (corner[1] + torch.arange(width, device=images.device)).view(count, 1, 1, width)
            batch = torch.arange(count, device=images.device).view(count, 1, 1, 1)
            images = padded[batch, torch.arange(channels, device=images.device).view(1, -1, 1, 1), rows, columns]
        if self.config.dataset.flip:
            mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        return images


def _distributed(model: nn.Module, context: RankContext) -> nn.Module:
    if context.ranks.world_size == 1:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
        return DistributedDataParallel(
            model,
            device_ids=[context.device] if context.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            static_graph=True,
        )


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer of the configured kind; AdamW replaces one that torch lacks.

    Options that don't change a step's work, such as Adam's betas, stay torch's defaults.
    """
    settings, lr = config.optimizer, config.optimizer.lr * _LR_SHARE
    decay = settings.weight_decay
    if isinstance(settings, SGDConfig):
        return torch.optim.SGD(
            model.parameters(),
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=decay,
            fused=True,
        )
    if isinstance(settings, AdamConfig):
        return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
