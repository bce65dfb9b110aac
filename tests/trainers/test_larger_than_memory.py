from __future__ import annotations

import hashlib
import json
import os
import resource
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import config
from trainers.core.options import load
from trainers.data.pack import open_pack, prepare_for
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training.loop import Trainer

SIDE = 512
IMAGE_BYTES = 3 * SIDE * SIDE
SPLITS = {"test": 8, "val": 0}


def write_sparse_pack(folder: Path, count: int) -> None:
    """Black images that take no room on the disk, and two classes."""
    folder.mkdir(parents=True)
    with (folder / "images.bin").open("wb") as file:
        file.truncate(count * IMAGE_BYTES)
    (folder / "labels.bin").write_bytes(b"".join((number % 2).to_bytes(8, "little") for number in range(count)))
    content = {
        "version": 1, "name": "large", "synthetic": False, "count": count, "channels": 3, "height": SIDE, "width": SIDE,
        "num_classes": 2, "classes": ["a", "b"], "mean": [0.0] * 3, "std": [1.0] * 3, "source": "", "source_files": {},
        "splits": {"train": [0, count - 8], "val": [count - 8, count - 8], "test": [count - 8, count]},
        "sha256": dict.fromkeys(("images.bin", "labels.bin"), "0" * 64),
    }  # fmt: skip
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**content, "digest": digest}))


@pytest.mark.slow
def test_a_pack_larger_than_memory_and_swap_is_trained_on_in_little_memory(tmp_path: Path) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    write_sparse_pack(tmp_path / "data", memory_bytes * 5 // 4 // IMAGE_BYTES)
    words = {"dataset.crop_padding": 0, "trainer.max_steps": 2, "trainer.global_batch_size": 4, "model.width": 2}
    (tmp_path / "config.json").write_text(json.dumps(config(words)))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = torch.device("cpu")
    pack = prepare_for(open_pack(tmp_path / "data"), cpu)
    assert pack.images.nbytes > memory_bytes
    context = RankContext(ranks=Ranks(), device=cpu, backend="gloo")
    trainer = Trainer(load(tmp_path / "config.json"), pack, context, tmp_path)
    trainer.prepare()
    trainer.train()
    assert trainer.test().count == SPLITS["test"]
    trainer.close()
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)
    assert grown_bytes < memory_bytes / 10
