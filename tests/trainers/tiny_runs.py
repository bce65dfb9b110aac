"""Tiny data packs and configurations, made with torch alone, and real launches of the node half."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.core import documents

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Path]


def write_pack(folder: Path, *, train: int = 60, val: int = 11, test: int = 17, **manifest: Any) -> Path:
    """Three classes of noisy 1×8×8 images, each with its own bright row: a network learns them at once."""
    count = train + val + test
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randint(0, 100, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    images[torch.arange(count), 0, labels * 2 + 1] = 250
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "images.bin").write_bytes(bytes(images.flatten().tolist()))
    (folder / "labels.bin").write_bytes(b"".join(int(item).to_bytes(8, "little") for item in labels))
    names = ("images.bin", "labels.bin")
    content = {
        "version": 1,
        "name": "stripes",
        "synthetic": False,
        "count": count,
        "channels": 1,
        "height": 8,
        "width": 8,
        "num_classes": 3,
        "classes": ["a", "b", "c"],
        "splits": {"train": [0, train], "val": [train, train + val], "test": [train + val, count]},
        "mean": [0.3],
        "std": [0.3],
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
        "source": "made in a test",
        "source_files": {},
        **manifest,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def config(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of 3 epochs of 5 steps, changed by ``group.field`` → value."""
    sections: dict[str, Any] = {
        "seed": 0,
        "dataset": {"name": "arrays", "crop_padding": 1, "flip": True},
        "model": {"name": "small_cnn", "width": 4, "hidden": 16},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"name": "one_cycle"},
        "trainer": {"epochs": 3, "global_batch_size": 12, "log_every_steps": 2, "precision": "fp32"},
        "strategy": {"name": "ddp"},
    }
    for name, value in overrides.items():
        group, _, field = name.partition(".")
        if field:
            sections[group][field] = value
        else:
            sections[group] = value
    return sections


def start(run_dir: Path, *, ranks: int = 0, path: Path = ROOT) -> subprocess.Popen[str]:
    """Start the node half: plain Python, or torchrun with that many ranks. ``path`` comes first."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    command = [sys.executable, "-m", *torchrun, "trainers.classifier", "--config", str(run_dir / "config.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(ROOT)])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        command,
        cwd=run_dir,
        env={**environment, "TORCHELASTIC_ERROR_FILE": str(run_dir / "error.json")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json, as the controller reads it."""
    content: dict[str, Any] = documents.read_sealed(run_dir / "summary.json")
    return content


def metrics_lines(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
