"""The files that rank 0 writes at the end of a training: weights, predictions and summary.json, or pruned.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.checkpoint.weights import write_weights
from trainers.contract import run_folder
from trainers.contract.beats import Phase
from trainers.core.files import write_json, write_sealed
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.process_group import RankContext
from trainers.observation import unkeyed as unkeyed_inputs
from trainers.observation.input_record import InputRecord
from trainers.observation.processes import ObservedRank
from trainers.observation.unkeyed import outside_warning, unkeyed_warnings
from trainers.training.evaluation import Evaluation
from trainers.training.loop import Trainer

SYNTHETIC = "synthetic data: accuracy means nothing"
_HINT_OUTSIDE = "in the project, model.inputs makes {them} a part of the key"


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
    """Write the results on rank 0; summary.json comes last, as it holds the digests of the other files.

    Every rank must call it.
    """
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
    """Write weights and predictions; return the digest of the weights, and file → sha256 of all results."""
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
        outputs_sha256[run_folder.DIGESTS] = _sha256_if_there(run_dir / run_folder.DIGESTS)
    return digest, outputs_sha256


def _sha256_if_there(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()


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
