"""One training run from config.json to summary.json: the sequence of steps on every rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.options import load
from trainers.data.manifest import DamagedPackError, Manifest, set_aside
from trainers.data.pack import PackWatch, check_digests, open_pack, prepare_for
from trainers.data.step_plan import Steps
from trainers.distributed.process_group import RankContext, connect, nccl_warning
from trainers.distributed.ranks import Ranks, read_ranks
from trainers.distributed.resources import keep_freed_memory, take_cores
from trainers.observation.processes import ObservedRank
from trainers.training import results
from trainers.training.loop import Trainer

_MANY_UNUSED = 0.05  # share of the train images that an epoch may leave out without a warning


def run(path: Path, observed: ObservedRank | None = None) -> None:
    """Train with the configuration ``config.json`` at ``path``; its folder is the run folder.

    Args:
        observed: records the files, modules and variables that this process reads, if they are recorded.

    Raises:
        ConfigError, TrainerError: an error that the user can fix; the message says how.
    """
    run_dir = path.parent
    try:
        config = load(path)
    except OSError as error:
        raise TrainerError(f"{path} cannot be read ({error.strerror})") from error
    # before the first thread starts: later threads inherit the binding to cores
    idle_cores = take_cores(read_ranks())
    try:
        pack = open_pack(run_dir / "data")
    except DamagedPackError as damage:
        raise set_aside(damage) from damage
    _refuse_empty_splits(config, pack.manifest)
    watch = PackWatch(pack)  # before the digests are checked, so that no write goes unnoticed
    # hash the data in a thread, on one rank per node, while the process group connects
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
    check = thread.submit(check_digests, pack) if read_ranks().local_rank == 0 else None
    keep_freed_memory()
    with ExitStack() as stack:
        context = stack.enter_context(connect(config.strategy.backend))
        trainer = Trainer(
            config, prepare_for(pack, context.device, config.dataset.random_resized_crop), context, run_dir
        )
        stack.callback(trainer.close)
        trainer.watch = watch
        trainer.say(_first_line(config, trainer))
        if idle_cores and context.device.type == "cpu":
            trainer.say(_idle_cores(idle_cores, context.ranks))
        if pack.manifest.synthetic:
            trainer.say(results.SYNTHETIC)
        if check is not None:  # before training reads the first image
            try:
                check.result()
            except DamagedPackError as damage:
                raise set_aside(damage) from damage  # safe from here on: every rank of the node has opened the pack
        context.wait_for_all("data checked")
        trainer.prepare()
        _warn_of_slow_network(context)
        trainer.train()
        if trainer.replay is not None:
            return  # a replay for `doit diff` only records the operators of some steps, which it has done
        if trainer.pruned:
            results.note_pruned(trainer)
        else:
            test = trainer.test()
            trainer.check_data()
            results.finish(trainer, test, observed)


def _warn_of_slow_network(context: RankContext) -> None:
    """Warn once per host if NCCL uses sockets; NCCL has chosen its transport by now."""
    if context.backend == "nccl" and context.ranks.nnodes > 1 and context.ranks.local_rank == 0:
        text = nccl_warning()
        if text is not None:
            print(text, flush=True)


def _refuse_empty_splits(config: TrainConfig, manifest: Manifest) -> None:
    if manifest.size("test") == 0:
        raise TrainerError(
            f"the test split of {manifest.name} is empty; set dataset.holdout to make one from the training images"
        )
    wants_val = "trainer.keep_best=true" if config.trainer.keep_best else f"trainer.patience={config.trainer.patience}"
    if (config.trainer.keep_best or config.trainer.patience) and manifest.size("val") == 0:
        raise TrainerError(
            f"{wants_val} needs val images, and the val split of {manifest.name} is empty; "
            "set dataset.val_size to take one from the training images"
        )


def _first_line(config: TrainConfig, trainer: Trainer) -> str:
    manifest, ranks, steps = trainer.pack.manifest, trainer.context.ranks, trainer.steps
    sizes = ", ".join(f"{manifest.size(name):,} {name}" for name in manifest.splits)
    count = sum(item.numel() for item in trainer.model.parameters())
    trained = sum(item.numel() for item in trainer.model.parameters() if item.requires_grad)
    of_them = f", {trained:,} of them trained" if config.trainer.freeze else ""
    initial = "" if trainer.initial is None else f"\n{trainer.initial.line()}"
    where = f"{_counted(ranks.world_size, 'rank')} on {_counted(ranks.nnodes, 'node')}"
    return (
        f"{config.model.name} ({count:,} parameters{of_them}) on {manifest.name} ({sizes})\n"
        f"{where}: {trainer.context.device.type}, {trainer.context.backend}, {trainer.precision}; "
        f"batch {steps.global_batch_size} ({_rank_batch(steps)}), {_counted(steps.per_epoch, 'step')} an epoch, "
        f"{_counted(steps.total, 'step')}{_unused(steps, manifest)}{_strategy(trainer)}{initial}"
    )


def _idle_cores(idle: int, ranks: Ranks) -> str:
    threads = torch.get_num_threads()
    cores = idle + threads
    ranks_for_all = f"cluster.nproc_per_node={cores * ranks.local_world_size}"
    return (
        f"each rank computes with {_counted(threads, 'thread')} and has {cores} cores, whose number must not decide "
        f"the weights; {ranks_for_all} or cluster.env.OMP_NUM_THREADS={cores} uses them all, as a part of the key"
    )


def _unused(steps: Steps, manifest: Manifest) -> str:
    """Warn of images that an epoch leaves out, if they are many, and of an empty val split."""
    lines, available = "", manifest.size("train")
    unused = available - steps.per_epoch * steps.global_batch_size
    if unused > available * _MANY_UNUSED:
        lines += (
            f"\n{unused:,} of the {available:,} train images are left out of each epoch: they fill no batch of "
            f"{steps.global_batch_size} (others each time; a smaller trainer.global_batch_size leaves out fewer)"
        )
    if manifest.size("val") == 0:
        lines += "\nno val images, so no val accuracy: dataset.val_size=N takes N of the training images"
    return lines


def _strategy(trainer: Trainer) -> str:
    """Describe the strategy in a line, unless it is ddp."""
    name = trainer.stepper.strategy.layout.name
    return (
        "" if name == "ddp" else f"\nstrategy {name}: each rank has 1/{trainer.context.ranks.world_size} of the model"
    )


def _rank_batch(steps: Steps) -> str:
    text = f"{steps.rank_batch_size} a rank"
    if steps.parts_per_rank > 1:
        text = f"{text} in {steps.parts_per_rank} of {steps.parts} parts"
    return text if steps.accumulate == 1 else f"{text} in {steps.accumulate} micro-batches"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
