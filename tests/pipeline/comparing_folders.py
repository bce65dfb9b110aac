"""Folders of runs to be compared: finished ones with curves, made in milliseconds, and some that ended otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.documents import write_sealed
from pipeline.core.specs import State
from pipeline.keys.content_key import ContentKey
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import fingerprint
from tests.pipeline.finished_folder import CODE, CONFIG, finished, key_of

STEPS = range(10, 60, 10)
HOSTILE = "<script>alert('x')</script>\"'&"


def config_of(seed: int = 0, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    """A classifier's configuration."""
    optimizer = {"name": "sgd", "lr": lr}
    return {**CONFIG, "seed": seed, "optimizer": optimizer, **more}


def trained(
    runs_dir: Path,
    seed: int = 0,
    lr: float = 0.1,
    *,
    accuracy: float = 0.9,
    metrics: Mapping[str, float] | None = None,
    summary: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    code: bytes = CODE,
    torch: str = "2.14.0",
    data: str = "d" * 64,
    **more: Any,
) -> RunFolder:
    """A finished run with five points of each curve; ``more`` are sections of its configuration."""
    config = config_of(seed, lr, **more)
    told = {"metrics": {"test/accuracy": accuracy, **(metrics or {})}, "images_per_s": 1000.0 + seed, "train_s": 2.5}
    environments = {"environments": {"a": {"python": "3.12.1", "torch": torch, "cpus": 2, "gpus": []}}}
    words = {"overrides": ["experiment=quickstart", f"optimizer.lr={lr}", f"seed={seed}"]}
    folder = finished(
        runs_dir,
        key_of(config, code=code, torch=torch, data=data),
        config=config,
        code=code,
        summary={"weights_sha256": "ab" * 32, **told, **(summary or {})},
        provenance={**words, **environments, "unix_time": 1.7e9, **(provenance or {})},
        result=False,
    )
    write_curve(folder, accuracy)
    raw = json.loads(folder.summary.read_text())
    raw.pop("sha256")
    (folder.path / "plan.json").write_text(
        json.dumps({"launcher": "local", "nodes": [{"host": "a", "nproc_per_node": 2}]})
    )
    journal.append(folder.journal, journal.Entry(state=State.FINISHED, attempt=1, time=1.7e9 + 60))
    (folder.path / "outputs.json").write_text("{}")  # of a script
    key = key_of(config, code=code, torch=torch, data=data)
    folder.write_result(key=key, summary=raw, hosts=["a"], attempts=1, duration_s=3.0, mlflow_run_id=None)
    return folder


def write_curve(folder: RunFolder, accuracy: float, odd: Mapping[int, float] | None = None) -> None:
    """metrics.jsonl with val/accuracy and train/loss at STEPS; ``odd`` are losses at some of them."""
    lines = [
        {
            "t": 1.7e9 + step,
            "step": step,
            "epoch": step // 20 + 1,
            "metrics": {"val/accuracy": accuracy * step / 50, "train/loss": (odd or {}).get(step, 10.0 / step)},
        }
        for step in STEPS
    ]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if (result := folder.read_result()) is not None:
        files = {**result.fields["files"], "metrics.jsonl": fingerprint(folder.path / "metrics.jsonl")}
        write_sealed(folder.result, {**result.fields, "files": files})


def failed(
    runs_dir: Path, seed: int = 0, lr: float = 9.0, *, why: str = "training failed on a:0: loss is nan"
) -> RunFolder:
    """A run that ended badly."""
    config = config_of(seed, lr)
    key: ContentKey = key_of(config)
    folder = RunFolder(runs_dir / key.short)
    folder.path.mkdir(parents=True)
    (folder.path / "key.json").write_text(json.dumps({"key": key.short, "digest": key.digest, **key.parts}))
    (folder.path / "config.json").write_text(json.dumps(config))
    words = {"overrides": ["experiment=quickstart", f"optimizer.lr={lr}", f"seed={seed}"]}
    (folder.path / "provenance.json").write_text(json.dumps(words))
    journal.append(folder.journal, journal.Entry(state=State.FAILED, attempt=1, time=1.7e9, detail=f"{why}\nmore"))
    return folder


def swept(runs_dir: Path, folders: list[RunFolder], words: list[str], at_once: int = 1) -> None:
    """The folder of a sweep ``tuned`` that these runs are the trials of."""
    trials = []
    for number, folder in enumerate(folders):
        config = json.loads((folder.path / "config.json").read_text())
        chosen = [f"optimizer.lr={config['optimizer']['lr']}", f"seed={config['seed']}"]
        trials.append(
            {
                "number": number,
                "key": folder.key,
                "configuration": folder.key,
                "chosen": chosen,
                "overrides": ["experiment=quickstart", *chosen],
            }
        )
    about = {
        "version": 2,
        "key": "5" * 12,
        "configurations": "c" * 12,
        "words": words,
        "total": len(trials),
        "at_once": at_once,
        "trials": trials,
    }
    write_sealed(runs_dir / "sweeps" / "tuned" / "sweep.json", about)


def a_sweep(runs_dir: Path) -> None:
    """Two learning rates with two seeds each, one of them failed, all names hostile."""
    folders = [
        trained(runs_dir, seed, lr, accuracy=0.9 - lr + seed / 100, metrics={f"m{HOSTILE}": 1.0}, note=f"{lr}{HOSTILE}")
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    folders.append(failed(runs_dir, why=f"training failed on {HOSTILE}: loss is nan"))
    swept(runs_dir, folders, ["experiment=quickstart", f"note={HOSTILE}"])
