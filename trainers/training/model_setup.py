"""The set-up of a run's network: how it is built, calibrated and frozen, its precision, its kernels, and the seeds of
its random layers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainers import models
from trainers.contract.data_pack import Manifest
from trainers.core.config import ConfigError, ModelConfig, TrainConfig
from trainers.core.errors import TrainerError
from trainers.data.augment import Normaliser
from trainers.data.pack import MappedPack
from trainers.data.randomness import seed_libraries
from trainers.data.step_plan import Steps
from trainers.distributed.process_group import RankContext

_CALIBRATION_IMAGES = 2000
_SHOWN = 6


def make_network(config: TrainConfig, manifest: Manifest, context: RankContext, steps: Steps) -> nn.Module:
    """Build the network for these steps. Raises ConfigError, TrainerError: it fits neither images nor batch."""
    network = fresh_network(config.model, manifest, context, seed=config.seed)
    if config.trainer.sync_batchnorm and context.ranks.world_size > 1:
        network = _synchronised(network, context)
    if steps.micro_batch_size == 1 and any(isinstance(item, nn.BatchNorm2d) for item in network.modules()):
        raise TrainerError(
            f"model={config.model.name} has batch normalisation, which needs at least 2 images a rank; "
            f"set trainer.global_batch_size to at least {2 * steps.parts * steps.accumulate}"
        )
    return network


def _synchronised(network: nn.Module, context: RankContext) -> nn.Module:
    if context.device.type == "cpu":
        raise TrainerError(
            "trainer.sync_batchnorm=true needs GPUs: torch.nn.SyncBatchNorm has no form for processors; "
            "take trainer.sync_batchnorm=false"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return converted


def fresh_network(config: ModelConfig, manifest: Manifest, context: RankContext, *, seed: int) -> nn.Module:
    """Build a network with fresh weights. They depend on the seed alone, because they are drawn on the CPU. Raises
    ConfigError: the network does not fit the images; TrainerError: the GPU's memory has no room for its weights.
    """
    shape = models.ImageShape(
        channels=manifest.channels, height=manifest.height, width=manifest.width, num_classes=manifest.num_classes
    )
    seed_generators(torch.device("cpu"), seed)
    with one_thread():
        network = models.build(config, shape)
    try:
        return network.to(context.device).to(memory_format=torch.channels_last)
    except torch.OutOfMemoryError as error:
        count = sum(item.numel() for item in network.parameters())
        megabytes = sum(item.nbytes for item in network.parameters()) >> 20
        free, _ = torch.cuda.mem_get_info(context.device)
        raise TrainerError(
            f"the network has {count:,} parameters ({megabytes:,} MB), for which the GPU of rank {context.ranks.rank} "
            f"on {socket.gethostname()} has no room: {free >> 20:,} MB are free, and nvidia-smi there shows whose the "
            "rest is; take a smaller model, or another GPU"
        ) from error


def calibrate(network: nn.Module, pack: MappedPack, normalise: Normaliser) -> None:
    """Call the network's ``calibrate`` method, if it has one, with images from all over the train split."""
    if isinstance(network, models.Calibrated):
        start, stop = pack.manifest.splits["train"]
        count = min(_CALIBRATION_IMAGES, stop - start)
        index = start + torch.arange(count, device=pack.labels.device) * (stop - start) // count
        with one_thread():
            network.calibrate(normalise(pack.rows(index, normalise.scale.device)[0]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one CPU thread inside this context, because the number of threads must not change the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def agree_on_precision(wanted: str, context: RankContext) -> str:
    """Return fp32, bf16 or fp16 for all ranks; for auto what suits rank 0's device. Raises TrainerError."""
    if wanted == "fp16" and context.device.type == "cpu":
        raise TrainerError("trainer.precision=fp16 needs a GPU; on the CPU choose bf16 or fp32")
    if wanted != "auto":
        return wanted
    native = torch.tensor(computes_in_bf16(context.device), dtype=torch.int64, device=context.device)
    context.broadcast([native])
    return "bf16" if native.item() else "fp32"


def computes_in_bf16(device: torch.device) -> bool:
    """Return True if the device has bf16 instructions, so that bf16 is faster than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch names no public ones
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of a precision; it does nothing for fp32."""
    lower = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, lower, enabled=precision != "fp32")


def choose_kernels(*, deterministic: bool) -> None:
    """Select cuDNN's deterministic algorithms, or let cuDNN benchmark and take the fastest."""
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed all generators that a network on ``device`` may use: torch's, Python's and numpy's."""
    # not torch.manual_seed, which visits all devices
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    seed_libraries(seed)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters that match a pattern from training. Raises ConfigError: no match, or nothing left."""
    names = [name for name, _ in model.named_parameters()]
    # refuse a pattern without a match: a typo would silently train the parameters that should stay frozen
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"trainer.freeze: {pattern!r} matches no parameter of the network; {_near(pattern, names)}"
            )
    for name, parameter in model.named_parameters():
        if _matches(name, patterns):
            parameter.requires_grad_(False)
    if patterns and not any(item.requires_grad for item in model.parameters()):
        raise ConfigError(
            f"trainer.freeze=[{', '.join(patterns)}] leaves nothing to train; take a pattern away that matches the "
            f"last layer ({names[-1]})"
        )


def training_mode(model: nn.Module, patterns: Sequence[str]) -> None:
    """Call ``model.train()``, but leave frozen batch normalisations in evaluation mode: their statistics stay fixed."""
    model.train()
    for layer in _frozen_norms(model, patterns):
        layer.eval()


def moving_buffers(model: nn.Module, patterns: Sequence[str]) -> list[Tensor]:
    """Return the model's buffers, without frozen statistics: a mean over the ranks could change them by rounding."""
    kept = {id(item) for layer in _frozen_norms(model, patterns) for item in layer.buffers()}
    return [item for item in model.buffers() if id(item) not in kept]


def _frozen_norms(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    layers = model.named_modules() if patterns else ()
    return [item for name, item in layers if isinstance(item, _NormBase) and _matches(f"{name}.running_mean", patterns)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _near(pattern: str, names: Sequence[str]) -> str:
    """Return a hint for a pattern that matches no parameter."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean {pattern}.*?"
    first = list(dict.fromkeys(name.partition(".")[0] for name in names))
    more = f", … ({len(first)} in all)" if len(first) > _SHOWN else ""
    return f"its names begin with: {', '.join(first[:_SHOWN])}{more}"
