"""What lies beside a sharded checkpoint is a pickle: of a hostile one nothing runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainers.strategies.shard_reader import ShardReader

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.path}'",)


def test_shards_of_every_kind_of_number_are_read(tmp_path: Path) -> None:
    saved = {f"model.{kind}": torch.arange(12).reshape(3, 4).to(kind) for kind in KINDS}
    save(saved, checkpoint_id=tmp_path)
    back = {name: torch.zeros_like(value) for name, value in saved.items()}
    load(back, storage_reader=ShardReader(tmp_path))
    assert all(torch.equal(back[name], value) for name, value in saved.items())


@pytest.mark.parametrize("kind", ["code", "object", "another file"])
def test_metadata_that_names_anything_else_is_refused_and_nothing_of_it_runs(kind: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "shards", tmp_path / "ran"
    saved: dict[str, object] = {"a": torch.ones(2)}
    save({**saved, "b": Evil(mark)} if kind == "object" else saved, checkpoint_id=folder)
    if kind == "code":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    if kind == "another file":
        told = pickle.loads((folder / ".metadata").read_bytes())
        for info in told.storage_data.values():
            info.relative_path = "../../x"
        (folder / ".metadata").write_bytes(pickle.dumps(told))
    why = {
        "code": "it names posix.system, which no metadata of tensors has",
        "object": "BytesStorageMetadata, which no metadata of tensors has",
        "another file": "a file of it lies elsewhere",
    }
    with pytest.raises(CheckpointException, match=why[kind]):
        load({"a": torch.zeros(2), "b": torch.zeros(2)}, storage_reader=ShardReader(folder))
    assert not mark.exists()
