"""The checkpoints of a run, which rank 0 writes and every attempt goes on from: ``checkpoints/step-00000123.pt``, and
``step-00000123.json`` beside it (``CheckpointNotes``). A checkpoint holds the state of all ranks with every strategy.
It holds no random state, because every random number is a function of (seed, epoch, sample) or (seed, step, rank or
part). ``write_weights`` and ``weights_digest`` are for plain weights."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from trainers.contract.seal import digest_of
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import HashingFile, make_folder, remove_temporaries, sha256_file, write_atomic, write_json
from trainers.distributed.node_hardware import NodeHardware, changes
from trainers.distributed.ranks import read_attempt

_DAMAGED = ".bad"  # suffix of damaged files, which the next good checkpoint removes
_NOT_COMPARED = {  # settings that may change between the attempts of a run: they don't influence the weights
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


@dataclass(kw_only=True)
class Checkpoint:
    """The state of a run after ``step`` steps."""

    step: int
    epoch: int  # from 0
    position: int  # steps into that epoch
    model: dict[str, Tensor]
    optimizer: dict[str, list[Tensor]]
    # state that differs between ranks (batch statistics): [world_size, values]; with trainer.shards [shards, values]
    own: Tensor
    progress: dict[str, Any] = field(default_factory=dict)  # ``Progress`` as JSON
    metrics: str = ""  # content of metrics.jsonl, stored in the .json

    @property
    def size_bytes(self) -> int:
        lists = [list(self.model.values()), *self.optimizer.values()]
        return sum(item.nbytes for items in lists for item in items)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The run that a checkpoint belongs to. ``config``: dotted field → value, if the field influences the weights."""

    config: Mapping[str, Any]
    dataset_digest: str
    world_size: int
    hardware: str  # device type and precision, such as "cuda in bf16"

    @classmethod
    def of(cls, config: TrainConfig, dataset_digest: str, *, world_size: int, hardware: str) -> Identity:
        """Return the identity of a run with this configuration."""
        flat: dict[str, Any] = {}
        for group, section in asdict(config).items():
            if isinstance(section, dict):
                flat |= {f"{group}.{name}": value for name, value in section.items()}
            else:
                flat[group] = section
        compared = {name: value for name, value in flat.items() if name not in _NOT_COMPARED}
        return cls(config=compared, dataset_digest=dataset_digest, world_size=world_size, hardware=hardware)


@dataclass(frozen=True, kw_only=True)
class CheckpointNotes:
    """The .json beside a checkpoint, which also has a ``digest`` of itself."""

    sha256: str  # of the .pt
    attempt: str  # id of the attempt that wrote it
    step: int
    epoch: int
    position: int
    identity: Identity  # in the file, its fields are not nested
    nodes: tuple[NodeHardware, ...]
    metrics: str  # the lines of metrics.jsonl up to ``step``

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        simple = {name: getattr(self, name) for name in ("sha256", "attempt", "step", "epoch", "position")}
        nodes = [node.as_json() for node in self.nodes]
        notes = {**simple, **asdict(self.identity), "nodes": nodes, "metrics": self.metrics}
        return {**notes, "digest": digest_of(notes)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CheckpointNotes:
        """Read the content of the file. Raises KeyError, TypeError: it has other fields."""
        simple = {name: content[name] for name in ("sha256", "attempt", "step", "epoch", "position", "metrics")}
        identity = Identity(**{item.name: content[item.name] for item in fields(Identity)})
        return cls(**simple, identity=identity, nodes=tuple(map(NodeHardware.from_json, content.get("nodes", ()))))


class CheckpointFolder:
    """The checkpoints of a run, used by rank 0 only. A background thread writes the files."""

    def __init__(self, folder: Path, owner: Identity, keep: int, nodes: Sequence[NodeHardware] = ()) -> None:
        """``owner``: this run; ``keep``: how many of the newest checkpoints stay; ``nodes``: the hardware of each."""
        self._folder, self._owner, self._keep, self._nodes = folder, owner, keep, tuple(nodes)
        self._attempt = read_attempt(folder.parent)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def check(self) -> None:
        """Raise TrainerError if checkpoints cannot be written here. Called before the first step, not hours later."""
        self._attempt.check()
        make_folder(self._folder)
        probe = self._folder / ".probe"
        write_atomic(probe, lambda _: None)
        probe.unlink()

    def save(self, checkpoint: Checkpoint) -> None:
        """Start writing a checkpoint, whose tensors must not change any more. Raises TrainerError of the last write."""
        self.wait()
        self._pending = self._writer.submit(self._write, checkpoint)

    def save_best(self, weights: dict[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Start writing best.pt (plain weights, which must not change any more) and best.json. Raises as ``save``."""
        self.wait()
        self._pending = self._writer.submit(self._write_best, weights, dict(notes))

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises TrainerError naming path and bytes."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish a pending write and end the thread. Raises nothing."""
        self._writer.shutdown(wait=True)

    def newest_good(self) -> Iterator[Checkpoint | str]:
        """Yield warnings (text) about checkpoints that are skipped or resumed inexactly, then the newest good one.
        Raises TrainerError: the newest good one belongs to another data set or configuration.
        """
        if not self._folder.is_dir():
            return
        remove_temporaries(self._folder)
        for path in reversed(step_files(self._folder)):
            try:
                notes = read_verified(path)
                self._attempt.refuse(notes.attempt)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                # torn by a crash, altered, or written by a rank that outlived its attempt: an older one may be good
                yield f"checkpoint {path.name} is skipped: {error}"
                _set_aside(path)
                continue
            self._refuse_other_owner(path, notes.identity)
            prune(path, self._keep)  # the previous attempt may have stopped before its own prune
            yield from (f"checkpoint {path.name} {reason}" for reason in self._inexact_because(notes))
            content = torch.load(path, map_location="cpu", weights_only=True)
            yield Checkpoint(**content, metrics=notes.metrics)
            return

    def _refuse_other_owner(self, path: Path, identity: Identity) -> None:
        if identity.dataset_digest != self._owner.dataset_digest:
            raise TrainerError(
                f"checkpoint {path} was trained on data {identity.dataset_digest[:12]}, this run has "
                f"{self._owner.dataset_digest[:12]}; delete {path.parent} to start afresh"
            )
        # through JSON, as the stored one: a tuple becomes a list
        stored, current = identity.config, json.loads(json.dumps(dict(self._owner.config)))
        different = [name for name in sorted({*stored, *current}) if stored.get(name) != current.get(name)]
        if different:
            differences = ", ".join(f"{name}={stored.get(name)} (now {current.get(name)})" for name in different)
            raise TrainerError(
                f"checkpoint {path} belongs to another configuration: {differences}; delete {path.parent} to start "
                "afresh"
            )

    def _inexact_because(self, notes: CheckpointNotes) -> Iterator[str]:
        """Yield why a run that goes on from this checkpoint isn't bit-identical to one that was never stopped."""
        stored, current = notes.identity, self._owner
        result = "the weights will not be bit-identical to an undisturbed run"
        if stored.world_size != current.world_size and not current.config.get("trainer.shards"):
            yield f"was written by {stored.world_size} ranks, now there are {current.world_size}: {result}"
        if stored.hardware != current.hardware:
            yield f"comes from {stored.hardware}, now it is {current.hardware}: {result}"
        for change in changes(notes.nodes, self._nodes):
            yield f"was computed {change}: {result.replace('will', 'may')}"

    def _write_best(self, weights: dict[str, Tensor], notes: dict[str, Any]) -> None:
        self._attempt.check()
        write_weights(self._folder / "best.pt", weights, notes)

    def _write(self, checkpoint: Checkpoint) -> None:
        self._attempt.check()
        _refuse_nonfinite(checkpoint)
        _make_contiguous(checkpoint)
        path = self._folder / f"step-{checkpoint.step:08d}.pt"
        content = {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__ if name != "metrics"}
        # the .json comes last: a crash between the two leaves a .pt without it, which newest_good skips
        notes = CheckpointNotes(
            sha256=write_tensors(path, content, needed_bytes=checkpoint.size_bytes),
            attempt=self._attempt.id,
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            position=checkpoint.position,
            identity=self._owner,
            nodes=self._nodes,
            metrics=checkpoint.metrics,
        )
        write_json(path.with_suffix(".json"), notes.as_json())
        prune(path, self._keep)
        for damaged in self._folder.glob(f"*{_DAMAGED}"):
            damaged.unlink()


def _refuse_nonfinite(checkpoint: Checkpoint) -> None:
    for name, value in checkpoint.model.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise TrainerError(
                f"{name} is not finite after step {checkpoint.step}, which is therefore not saved; "
                "a lower optimizer.lr usually helps"
            )


def _make_contiguous(checkpoint: Checkpoint) -> None:
    """Make the tensors contiguous, so that equal values give equal bytes; one at a time, to save memory."""
    for name, value in checkpoint.model.items():
        checkpoint.model[name] = value.contiguous()
    for values in checkpoint.optimizer.values():
        for index, value in enumerate(values):
            values[index] = value.contiguous()


def read_verified(path: Path) -> CheckpointNotes:
    """Read a checkpoint's .json and verify its digest and the sha256 of the checkpoint.

    Raises OSError, ValueError, KeyError, TypeError, RecursionError: the checkpoint is torn, altered or unreadable.
    """
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content["digest"] != digest_of(content):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    notes, actual_sha256 = CheckpointNotes.from_json(content), sha256_file(path)
    if actual_sha256 != notes.sha256:
        raise ValueError(
            f"the sha256 of {path.name} is {actual_sha256[:12]}, {path.stem}.json says {notes.sha256[:12]}"
        )
    return notes


def _set_aside(path: Path) -> None:
    for part in (path, path.with_suffix(".json")):
        with contextlib.suppress(OSError):  # missing, or the folder is read-only, which the next write reports
            part.replace(part.with_name(part.name + _DAMAGED))


def prune(newest: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints that end with ``newest``, which is complete. Raises OSError. Later
    ones are left alone: they may be damaged, and newest_good deals with them.
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


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state dict to contiguous CPU tensors, for ``load_state_dict`` of plain torch."""
    return {
        name: value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, value in model.state_dict().items()
    }


def write_weights(path: Path, weights: dict[str, Tensor], notes: Mapping[str, Any]) -> tuple[str, str]:
    """Write weights, and ``notes`` as .json; return the sha256 of the file and of the weights. Raises TrainerError."""
    sha256 = write_tensors(path, weights, needed_bytes=sum(item.nbytes for item in weights.values()))
    digest = weights_digest(weights)
    content = {"sha256": sha256, "weights_sha256": digest, **notes}
    write_json(path.with_suffix(".json"), {**content, "digest": digest_of(content)})
    return sha256, digest


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


def write_tensors(path: Path, content: Any, *, needed_bytes: int) -> str:
    """Write with torch.save what torch.load(weights_only=True) can read; return the file's sha256. Raises TrainerError:
    the disk is full, or the file can't be written for another reason.
    """

    def save(file: HashingFile) -> None:
        try:
            torch.save(content, cast("IO[bytes]", file))
        except RuntimeError as error:  # its zip writer hides the OSError of a full disk
            raise file.error or OSError(str(error)) from error

    return write_atomic(path, save, needed_bytes=needed_bytes)
