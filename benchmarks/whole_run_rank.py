"""One rank of benchmarks/whole_run.py: ``torchrun … whole_run_rank.py WHAT RUN_DIR``; rank 0 prints a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.core.config import DatasetConfig, TrainConfig, TrainerConfig
from trainers.data.pack import open_pack
from trainers.distributed.process_group import connect
from trainers.distributed.resources import keep_freed_memory
from trainers.models.resnet18 import ResNet18Config
from trainers.models.small_cnn import SmallCNNConfig
from trainers.optimizers.sgd import SGDConfig
from trainers.schedules.constant import ConstantConfig
from trainers.strategies.ddp import DDPConfig
from trainers.training import session
from trainers.training.loop import Trainer

BATCH, SAVES, EVALUATIONS, WARMUP = 128, 8, 3, 2


def config(**settings: Any) -> TrainConfig:
    model = settings.pop("model", ResNet18Config())
    trainer = TrainerConfig(global_batch_size=BATCH, **settings)
    return TrainConfig(
        dataset=DatasetConfig(name="synthetic", crop_padding=4, flip=True),
        model=model,
        optimizer=SGDConfig(lr=0.01),
        schedule=ConstantConfig(),
        trainer=trainer,
        strategy=DDPConfig(),
    )


def whole(run_dir: Path) -> dict[str, Any]:
    """A training as it is launched, from its first step to the metrics of the test split."""
    from dataclasses import asdict

    if os.environ["RANK"] == "0":
        raw = asdict(config(model=SmallCNNConfig(), epochs=3))
        (run_dir / "config.json").write_text(json.dumps(raw))
    else:
        time.sleep(1.0)  # rank 0 writes it
    session.run(run_dir / "config.json")
    summary = json.loads((run_dir / "summary.json").read_text()) if os.environ["RANK"] == "0" else None
    if summary is None:
        return {}
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    passed_s = last["t"] - summary["first_step_unix_time"]
    return {
        "images_per_s": summary["images_per_s"],
        "whole_images_per_s": (summary["steps"] - 1) * BATCH / passed_s,
    }


def evaluation(trainer: Trainer) -> dict[str, Any]:
    for _ in range(WARMUP):
        trainer.evaluate("train")
    started = time.perf_counter()
    for _ in range(EVALUATIONS):
        trainer.evaluate("train")
    return {"s": (time.perf_counter() - started) / EVALUATIONS}


class Saving(Trainer):
    """Saves every few steps; notes how long that kept the training thread, and a copy of the same tensors."""

    def _save(self, epoch: int, position: int) -> None:
        self._notes: list[tuple[float, float]] = getattr(self, "_notes", [])
        started = time.perf_counter()
        state = [self.model.state_dict().values(), *self.stepper.state().values()]
        copies = [item.clone() for items in state for item in items]
        copied = time.perf_counter()
        del copies
        again = time.perf_counter()
        super()._save(epoch, position)
        self._notes.append((1e3 * (time.perf_counter() - again), 1e3 * (copied - started)))

    def notes(self) -> dict[str, Any]:
        kept = self._notes[WARMUP:]
        return {"save_ms": [save for save, _ in kept], "copy_ms": [copy for _, copy in kept]}


def checkpoints(run_dir: Path) -> dict[str, Any]:
    made = config(checkpoint_every_steps=2, max_steps=2 * (SAVES + WARMUP), eval_every_epochs=10**6)
    trainer = Saving(made, open_pack(run_dir / "data"), connect("gloo"), run_dir)
    trainer.prepare()
    trainer.train()
    trainer.close()
    return trainer.notes()


def memory(run_dir: Path) -> dict[str, Any]:
    made = config(max_steps=8, eval_every_epochs=10**6, checkpoint_every_steps=3)
    imported = status("VmRSS")
    trainer = Trainer(made, open_pack(run_dir / "data"), connect("gloo"), run_dir)
    trainer.prepare()
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = {item.untyped_storage().data_ptr() for item in [*trainer.model.parameters(), *trainer.model.buffers()]}
    one_step, most = trainer._one_step, 0

    def watched(*words: Any) -> None:
        nonlocal most
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            one_step(*words)
        most = max(most, sum(size for place, size in saved.items() if place not in held))

    trainer._one_step = watched  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    return {
        "peak": status("VmHWM"),
        "torch imported": imported,
        "model": sum(item.nbytes for item in trainer.model.state_dict().values()) / 1e6,
        "optimizer": sum(item.nbytes for items in trainer.stepper.state().values() for item in items) / 1e6,
        "activations": most / 1e6,
        "data": (trainer.pack.images.nbytes + trainer.pack.labels.nbytes) / 1e6,
    }


def status(name: str) -> float:
    """MB, of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024 / 1e6


def main() -> None:
    what, run_dir = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    keep_freed_memory()
    if what == "whole":
        found = whole(run_dir)
    elif what == "evaluation":
        trainer = Trainer(config(model=SmallCNNConfig()), open_pack(run_dir / "data"), connect("gloo"), run_dir)
        trainer.prepare()
        found = evaluation(trainer)
    else:
        found = {"checkpoints": checkpoints, "memory": memory}[what](run_dir)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
