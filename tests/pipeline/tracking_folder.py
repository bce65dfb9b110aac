"""Run folders written by hand, as a finished or unfinished training would leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.core.documents import write_sealed

T0 = 1_700_000_000.0  # unix seconds
KEY = "0123456789ab"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def journal(run: Path, *states: str, attempt: int = 1, at: float = T0) -> None:
    with (run / "journal.jsonl").open("a", encoding="utf-8") as file:
        for number, state in enumerate(states):
            line = {"state": state, "attempt": attempt, "time": at + number, "detail": ""}
            file.write(json.dumps(line) + "\n")


def metrics(run: Path, steps: range, *, at: float = T0) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in steps:
            values = {"train/loss": 1.0 / (1 + step)}
            file.write(json.dumps({"t": at + step, "step": step, "epoch": 0, "metrics": values}) + "\n")


def logged(run: Path, *points: tuple[int, dict[str, float]], at: float = T0) -> None:
    """Lines as a script's run has them."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for number, (step, values) in enumerate(points):
            file.write(json.dumps({"t": at + number, "step": step, "epoch": None, "metrics": values}) + "\n")


def started(tmp_path: Path, *, key: str = KEY, dataset: str = "digits", **config: Any) -> Path:
    """A run folder as it stands when training starts: config, key, provenance, plan, journal RUNNING."""
    run = tmp_path / "runs" / key
    write(
        run / "config.json",
        {
            "seed": 0,
            "dataset": {"name": dataset, "holdout": 0},
            "model": {"name": "small_cnn"},
            "optimizer": {"name": "adam", "lr": 0.003},
            "cluster": {"hosts": [{"name": "node0"}, {"name": "node1"}]},
            **config,
        },
    )
    write(run / "config.yaml", "seed: 0\n")
    write(run / "key.json", {"key": key, "digest": key * 4})
    write(
        run / "provenance.json",
        {
            "git_commit": "c0ffee" * 6 + "abcd",
            "git_dirty": True,
            "command": "doit train experiment=quickstart",
            "overrides": ["experiment=quickstart"],
            "hosts": ["node0", "node1"],
        },
    )
    write(run / "plan.json", {"nodes": [{"host": "node0"}, {"host": "node1"}]})
    journal(run, "PLANNED", "RUNNING")
    return run


def end(run: Path, state: str = "FINISHED", *, steps: int = 20, attempt: int = 1, synthetic: bool = False) -> None:
    """What is added when the training has ended well and was evaluated."""
    write(run / "checkpoints" / "final.json", {"step": steps})
    (run / "checkpoints" / "final.pt").write_bytes(b"weights" * 100)
    write(run / "evaluation" / "report.json", {"accuracy": 0.9, "macro avg": {"f1-score": 0.88}})
    (run / "evaluation" / "confusion_matrix.png").write_bytes(b"\x89PNG")
    write(run / "attempts" / str(attempt) / "node0.log", "rank 0 says hello\n")
    write(run / "attempts" / str(attempt) / "node1.log", "rank 1 says hello\n")
    summary(run, state=state, steps=steps, synthetic=synthetic)
    journal(run, state, attempt=attempt, at=T0 + 60)


def summary(run: Path, **more: Any) -> None:
    told = {
        "state": "FINISHED",
        "metrics": {"test/accuracy": 0.9},
        "steps": 20,
        "first_step_unix_time": T0 + 2,
        "train_s": 30.0,
        "images_per_s": 1234.5,
        "weights_sha256": "ab" * 32,
        "dataset_digest": "cd" * 32,
        "synthetic": False,
    }
    write_sealed(run / "summary.json", told | more)
