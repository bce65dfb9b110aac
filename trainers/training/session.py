"""One attempt of a built-in training on this rank, from config.json to summary.json: the order of all that is done."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.checkpoint import write_weights
from trainers.contract import run_folder
from trainers.contract.beats import Phase
from trainers.contract.data_pack import Manifest
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import write_json, write_sealed
from trainers.core.options import load
from trainers.data.pack import DamagedPackError, PackWatch, check_digests, open_pack, prepare_for, set_aside
from trainers.data.step_plan import Steps
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.process_group import RankContext, connect, nccl_warning
from trainers.distributed.ranks import Ranks, read_ranks
from trainers.distributed.resources import keep_freed_memory, take_cores
from trainers.observation import unkeyed as unkeyed_inputs
from trainers.observation.input_record import InputRecord
from trainers.observation.processes import ObservedRank
from trainers.observation.unkeyed import outside_warning, unkeyed_warnings
from trainers.training.evaluation import Evaluation
from trainers.training.loop import Trainer

SYNTHETIC = "synthetic data: accuracy means nothing"
_HINT_OUTSIDE = "in the project, model.inputs makes {them} a part of the key"
_MANY_UNUSED = 0.05  # share of the train images that an epoch may leave out without a warning


def run(path: Path, observed: ObservedRank | None = None) -> None:
    """Train with the configuration at ``path``, config.json in the run folder. ``observed`` records what this process
    reads. Raises ConfigError, TrainerError: the message says how to fix it.
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
    data_check = thread.submit(check_digests, pack) if read_ranks().local_rank == 0 else None
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
            trainer.say(SYNTHETIC)
        if data_check is not None:  # before training reads the first image
            try:
                data_check.result()
            except DamagedPackError as damage:
                raise set_aside(damage) from damage  # safe from here on: every rank of the node has opened the pack
        context.wait_for_all("data checked")
        trainer.prepare()
        _warn_of_slow_network(context)
        trainer.train()
        if trainer.replay is not None:
            return  # a replay for `doit diff` only records the operators of some steps, which it has done
        if trainer.pruned:
            note_pruned(trainer)
        else:
            test = trainer.test()
            trainer.check_data()
            finish(trainer, test, observed)


def _warn_of_slow_network(context: RankContext) -> None:
    """Warn once per host if NCCL uses sockets; NCCL has chosen its transport by now."""
    if context.backend == "nccl" and context.ranks.nnodes > 1 and context.ranks.local_rank == 0:
        warning = nccl_warning()
        if warning is not None:
            print(warning, flush=True)


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
    trained_part = f", {trained:,} of them trained" if config.trainer.freeze else ""
    initial = "" if trainer.initial is None else f"\n{trainer.initial.line()}"
    topology = f"{_counted(ranks.world_size, 'rank')} on {_counted(ranks.nnodes, 'node')}"
    return (
        f"{config.model.name} ({count:,} parameters{trained_part}) on {manifest.name} ({sizes})\n"
        f"{topology}: {trainer.context.device.type}, {trainer.context.backend}, {trainer.precision}; "
        f"batch {steps.global_batch_size} ({_rank_batch_size(steps)}), {_counted(steps.per_epoch, 'step')} an epoch, "
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
    """Return lines about train images that an epoch leaves out, and about a missing val split."""
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
    name = trainer.stepper.strategy.layout.name
    return (
        "" if name == "ddp" else f"\nstrategy {name}: each rank has 1/{trainer.context.ranks.world_size} of the model"
    )


def _rank_batch_size(steps: Steps) -> str:
    text = f"{steps.rank_batch_size} a rank"
    if steps.parts_per_rank > 1:
        text = f"{text} in {steps.parts_per_rank} of {steps.parts} parts"
    return text if steps.accumulate == 1 else f"{text} in {steps.accumulate} micro-batches"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def note_pruned(trainer: Trainer) -> None:
    """Write pruned.json on rank 0; the checkpoint of this step is on the disk already."""
    if not trainer.context.is_rank_zero:
        return
    trainer.attempt.check()
    epoch = trainer.step // trainer.steps.per_epoch
    pruned = {"step": trainer.step, "epoch": epoch, "metrics": trainer.progress.metrics}
    write_json(trainer.run_dir / run_folder.PRUNED, pruned)
    trainer.say(f"pruned after epoch {epoch}, at step {trainer.step} of {trainer.steps.total}")


def finish(trainer: Trainer, test: Evaluation, observed: ObservedRank | None) -> None:
    """Write the results on rank 0; summary.json last, with the digests of the others. Every rank must call it."""
    HEARTBEAT.enter(Phase.ENDING)
    weights = trainer.stepper.strategy.layout.weights()
    records = _input_records(trainer.context, observed)
    if not trainer.context.is_rank_zero:
        return
    trainer.attempt.check()
    weights_sha256, outputs_sha256 = _write_outputs(trainer, test, weights)
    summary = {
        **_summary(trainer, weights_sha256),
        "nodes": [node.as_json() for node in trainer.nodes],
        "outputs_sha256": outputs_sha256,
    }
    if records and (unkeyed := _write_input_records(trainer, records)):
        summary["unkeyed"] = unkeyed
    write_sealed(trainer.run_dir / run_folder.SUMMARY, summary)
    remark = f" ({SYNTHETIC})" if trainer.pack.manifest.synthetic else ""
    trainer.say(
        f"finished: test accuracy {test.accuracy:.4f}{remark}, {trainer.progress.images_per_s:,.0f} images/s, "
        f"{trainer.progress.train_s:.1f} s of training"
    )


def _input_records(context: RankContext, observed: ObservedRank | None) -> list[InputRecord]:
    """Return the record of each node's inputs on rank 0, if they are observed. Every rank must call it."""
    is_first_of_node = context.ranks.local_rank == 0
    own = json.dumps(observed.close()).encode() if observed is not None and is_first_of_node else b""
    return [json.loads(record) for record in context.gather_bytes(own) or () if record]


def _write_outputs(trainer: Trainer, test: Evaluation, weights: dict[str, Tensor]) -> tuple[str, dict[str, str]]:
    """Write final weights and predictions; return the digest of the weights, and file → sha256 of all outputs."""
    run_dir, pack = trainer.run_dir, trainer.pack
    file_sha256, digest = write_weights(run_dir / run_folder.FINAL_WEIGHTS, weights, {"step": trainer.step})
    start, stop = pack.manifest.splits["test"]
    targets = pack.labels[start:stop].tolist()
    predictions = {"split": "test", "targets": targets, "predictions": test.predictions}
    outputs_sha256 = {
        run_folder.FINAL_WEIGHTS: file_sha256,
        run_folder.PREDICTIONS: write_json(run_dir / run_folder.PREDICTIONS, predictions),
    }
    if trainer.metrics is not None:
        outputs_sha256[run_folder.METRICS] = hashlib.sha256(trainer.metrics.text.encode()).hexdigest()
    if trainer.digests is not None:
        path = run_dir / run_folder.DIGESTS  # missing if the run has fewer steps than trainer.digests
        outputs_sha256[run_folder.DIGESTS] = hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()
    return digest, outputs_sha256


def _write_input_records(trainer: Trainer, records: list[InputRecord]) -> dict[str, str]:
    """Write dependencies.json and warn of inputs that the key lacks; return the unkeyed files of all nodes."""
    unkeyed = {path: use for record in records for path, use in sorted(record.pop("unkeyed").items())}
    first, others = records[0], records[1:]  # the file holds the record of rank 0's node, and the others under "nodes"
    write_sealed(trainer.run_dir / run_folder.DEPENDENCIES, {**first, **({"nodes": others} if others else {})})
    for line in unkeyed_warnings(unkeyed_inputs.from_json(unkeyed), "model.inputs"):
        trainer.say(f"WARNING: {line}")
    if first["files"]:
        trainer.say(f"WARNING: {outside_warning([*first['files']], _HINT_OUTSIDE)}")
    return unkeyed


def _summary(trainer: Trainer, weights_sha256: str) -> dict[str, Any]:
    progress, ranks = trainer.progress, trainer.context.ranks
    return {
        "state": "FINISHED",
        "metrics": progress.metrics,
        "weights_sha256": weights_sha256,
        "steps": trainer.step,
        "epochs": trainer.step // trainer.steps.per_epoch,
        "nnodes": ranks.nnodes,
        "world_size": ranks.world_size,
        "images_per_s": progress.images_per_s,
        "train_s": progress.train_s,
        "warm_up_s": progress.warm_up_s,
        "first_step_unix_time": progress.first_step_unix_time,
        "synthetic": trainer.pack.manifest.synthetic,
        "dataset_digest": trainer.pack.manifest.digest,
        "device": trainer.context.device.type,
        "precision": trainer.precision,
        "backend": trainer.context.backend,
        "strategy": trainer.stepper.strategy.layout.name,
        "torch": torch.__version__.split("+")[0],
        **({"nonfinite": progress.as_json()["nonfinite"]} if progress.nonfinite else {}),
        **({"init": trainer.initial.as_json()} if trainer.initial is not None else {}),
    }
