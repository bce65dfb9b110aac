"""Write and read checkpoints: atomic writes, verification on read, and the newest good checkpoint is taken.

A checkpoint is ``checkpoints/step-00000123.pt`` and ``step-00000123.json``, which holds its sha256, its identity and
the lines of metrics.jsonl up to its step. It is whole with every strategy. No random state is stored: every random
number is a function of (seed, epoch, sample) or (seed, step, rank or part).

Weights are plain: contiguous tensors on the CPU, which stock torch loads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import HashingFile, make_folder, remove_temporaries, sha256_file, write_atomic, write_json
from trainers.distributed import node_info
from trainers.distributed.ranks import read_attempt

_BAD = ".bad"
_NOT_COMPARED = {
    "dataset.source",
    "init.run",
    "init.weights",
    "strategy.backend",
    "trainer.checkpoint_every_epochs",
    "trainer.checkpoint_every_minutes",
    "trainer.checkpoint_every_steps",
    "trainer.keep_best",
    "trainer.keep_checkpoints",
    "trainer.log_every_steps",
    "trainer.tta",
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The run that a checkpoint belongs to. ``config`` is flat: ``optimizer.lr`` → 0.1."""

    config: Mapping[str, Any]
    dataset_digest: str
    world_size: int
    hardware: str  # kind of device and precision: "cuda in bf16"


def identity(config: TrainConfig, dataset_digest: str, *, world_size: int, hardware: str) -> Identity:
    """Return the identity of a run, without the fields that do not influence its weights."""
    flat: dict[str, Any] = {}
    for group, section in asdict(config).items():
        if isinstance(section, dict):
            flat |= {f"{group}.{name}": value for name, value in section.items()}
        else:
            flat[group] = section
    kept = {name: value for name, value in flat.items() if name not in _NOT_COMPARED}
    return Identity(config=kept, dataset_digest=dataset_digest, world_size=world_size, hardware=hardware)


@dataclass(kw_only=True)
class Checkpoint:
    """State after ``step`` steps, which is ``position`` steps into ``epoch`` (from 0).

    ``optimizer`` maps a name to its tensors (usually one per parameter). ``own`` holds the state that differs between
    ranks (batch statistics), [world_size, n]; with trainer.shards a row per part, [shards, n].
    ``progress`` is plain data. ``metrics`` is the content of metrics.jsonl, stored in the .json, where the controller
    reads it too.
    """

    step: int
    epoch: int
    position: int
    model: dict[str, Tensor]
    optimizer: dict[str, list[Tensor]]
    own: Tensor
    progress: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""


class CheckpointFolder:
    """The checkpoints of a run, used by rank 0 only. A background thread writes the files."""

    def __init__(self, folder: Path, owner: Identity, keep: int, nodes: Sequence[Mapping[str, Any]] = ()) -> None:
        """``nodes``: the hardware of each node, from ``node_info.of_all_nodes``; kept in the .json."""
        self._folder, self._owner, self._keep, self._nodes = folder, owner, keep, [dict(node) for node in nodes]
        self._attempt = read_attempt(folder.parent)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def check(self) -> None:
        """Raise TrainerError if checkpoints cannot be written here, so that the run fails before the training."""
        self._attempt.check()
        make_folder(self._folder)
        probe = self._folder / ".probe"
        write_atomic(probe, lambda _: None)
        probe.unlink()

    def save_best(self, weights: dict[str, Tensor], side: Mapping[str, Any]) -> None:
        """Start writing best.pt (plain weights, which must not change any more) and best.json. Raises as ``save``."""
        self.wait()
        self._pending = self._writer.submit(self._write_best, weights, dict(side))

    def save(self, checkpoint: Checkpoint) -> None:
        """Start writing a checkpoint, whose tensors must not change any more. Raises TrainerError of the last write."""
        self.wait()
        self._pending = self._writer.submit(self._write, checkpoint)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises TrainerError naming path and bytes."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish a pending write and end the thread. Raises nothing."""
        self._writer.shutdown(wait=True)

    def newest_good(self) -> Iterator[Checkpoint | str]:
        """Yield warnings (text) about skipped or inexact checkpoints, then the newest good one, if any.

        Raises:
            TrainerError: the newest good one belongs to another data set or configuration.
        """
        if not self._folder.is_dir():
            return
        remove_temporaries(self._folder)
        for path in reversed(step_files(self._folder)):
            try:
                side = read_verified(path)
                self._attempt.refuse(side.get("attempt"))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                yield f"checkpoint {path.name} is skipped: {error}"
                set_aside(path)
                continue
            self._check_owner(path, side)
            prune(path, self._keep)  # the previous attempt may have stopped before its own prune
            inexact = "the weights will not be bit-identical to an undisturbed run"
            if side["world_size"] != self._owner.world_size and not self._owner.config.get("trainer.shards"):
                yield (
                    f"checkpoint {path.name} was written by {side['world_size']} ranks, now there are "
                    f"{self._owner.world_size}: {inexact}"
                )
            if side["hardware"] != self._owner.hardware:
                hardware = f"comes from {side['hardware']}, now it is {self._owner.hardware}"
                yield f"checkpoint {path.name} {hardware}: {inexact}"
            for change in node_info.changes(side.get("nodes", []), self._nodes):
                yield f"checkpoint {path.name} was computed {change}: {inexact.replace('will', 'may')}"
            content = torch.load(path, map_location="cpu", weights_only=True)
            yield Checkpoint(**content, metrics=side["metrics"])
            return

    def _write_best(self, weights: dict[str, Tensor], side: dict[str, Any]) -> None:
        self._attempt.check()
        write_weights(self._folder / "best.pt", weights, side)

    def _write(self, checkpoint: Checkpoint) -> None:
        self._attempt.check()
        _refuse_nonfinite(checkpoint)
        _lay_out(checkpoint)
        path = self._folder / f"step-{checkpoint.step:08d}.pt"
        content = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__ if name != "metrics"}
        sha256 = _save(path, content, _size_bytes(checkpoint))
        place = {"step": checkpoint.step, "epoch": checkpoint.epoch, "position": checkpoint.position}
        side = {"sha256": sha256, "attempt": self._attempt.id, **place, **asdict(self._owner)}
        side |= {"nodes": self._nodes, "metrics": checkpoint.metrics}
        write_json(path.with_suffix(".json"), sealed(side))
        prune(path, self._keep)
        for bad in self._folder.glob(f"*{_BAD}"):
            bad.unlink()

    def _check_owner(self, path: Path, side: Mapping[str, Any]) -> None:
        if side["dataset_digest"] != self._owner.dataset_digest:
            raise TrainerError(
                f"checkpoint {path} was trained on data {side['dataset_digest'][:12]}, this run has "
                f"{self._owner.dataset_digest[:12]}; delete {path.parent} to start afresh"
            )
        then, now = side["config"], json.loads(json.dumps(dict(self._owner.config)))
        different = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
        if different:
            changes = ", ".join(f"{name}={then.get(name)} (now {now.get(name)})" for name in different)
            raise TrainerError(
                f"checkpoint {path} belongs to another configuration: {changes}; delete {path.parent} to start afresh"
            )


def _refuse_nonfinite(checkpoint: Checkpoint) -> None:
    """Raise TrainerError if a weight is not finite: training could not continue from such a checkpoint."""
    for name, value in checkpoint.model.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise TrainerError(
                f"{name} is not finite after step {checkpoint.step}, which is therefore not saved; "
                "a lower optimizer.lr usually helps"
            )


def _lay_out(checkpoint: Checkpoint) -> None:
    """Make the tensors contiguous in place, so that equal values give equal bytes in the file.

    Works on one tensor at a time, which needs no second copy of all.
    """
    for name, value in checkpoint.model.items():
        checkpoint.model[name] = value.contiguous()
    for values in checkpoint.optimizer.values():
        for place, value in enumerate(values):
            values[place] = value.contiguous()


def _size_bytes(checkpoint: Checkpoint) -> int:
    lists = [list(checkpoint.model.values()), *checkpoint.optimizer.values()]
    return sum(item.nbytes for items in lists for item in items)


def sealed(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's .json content with ``digest``, the sha256 of the canonical JSON of all other fields."""
    return {**side, "digest": _digest(side)}


def read_verified(path: Path) -> dict[str, Any]:
    """Read a checkpoint's .json and verify its digest and the sha256 of the checkpoint.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: the checkpoint is torn, altered or unreadable.
    """
    side = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if not isinstance(side, dict) or side["digest"] != _digest(side):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    seen = sha256_file(path)
    if seen != side["sha256"]:
        raise ValueError(f"the sha256 of {path.name} is {seen[:12]}, {path.stem}.json says {side['sha256'][:12]}")
    return side


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint and its .json to ``*.bad``, so that it is no longer used."""
    for part in (path, path.with_suffix(".json")):
        with contextlib.suppress(OSError):  # missing, or the folder is read-only, which the next write reports
            part.replace(part.with_name(part.name + _BAD))


def prune(newest: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``newest``, which is known to be complete.

    Raises:
        OSError: the folder can't be written.
    """
    folder = newest.parent
    for old in [path for path in step_files(folder) if path <= newest][:-keep]:
        old.unlink()
    # remove each .json last: a .pt without its .json would be taken for a damaged checkpoint
    for path in folder.glob("step-*.json"):
        if not path.with_suffix(".pt").exists():
            path.unlink()


def step_files(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def _digest(side: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in side.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_weights(path: Path, weights: dict[str, Tensor], side: Mapping[str, Any]) -> tuple[str, str]:
    """Write plain weights and the .json beside them; return the sha256 of the file, and of the weights.

    Raises:
        TrainerError: they can't be written.
    """
    sha256, digest = _save(path, weights, sum(item.nbytes for item in weights.values())), weights_digest(weights)
    write_json(path.with_suffix(".json"), sealed({"sha256": sha256, "weights_sha256": digest, **side}))
    return sha256, digest


def _save(path: Path, content: Any, needed_bytes: int) -> str:
    """Write with torch.save, so that torch.load(weights_only=True) can read it; return the sha256."""

    def save(file: HashingFile) -> None:
        try:
            torch.save(content, cast("IO[bytes]", file))
        except RuntimeError as error:  # its zip writer hides the OSError of a full disk
            raise file.error or OSError(str(error)) from error

    return write_atomic(path, save, needed_bytes=needed_bytes)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy a state dict to contiguous CPU tensors, which stock torch loads with load_state_dict."""
    return {
        name: value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, value in model.state_dict().items()
    }


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over name, dtype, shape and raw bytes of contiguous CPU tensors, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # ctypes, because torch exposes a tensor's bytes only through numpy, which a node need not have
        if value.nbytes:
            total.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return total.hexdigest()
