"""A sqlite store whose schema was made once, copied for each test, and questions to ask of any store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline import tracking

ROOT = Path(__file__).parents[2]
EXPERIMENT = "paceline"


def client(uri: str) -> Any:
    from mlflow.tracking.client import MlflowClient

    import pipeline.tracking.mlflow_store  # noqa: F401  (its settings: no telemetry, no retries)

    return MlflowClient(tracking_uri=uri)


def runs(uri: str, experiment: str = EXPERIMENT) -> list[Any]:
    found = client(uri).get_experiment_by_name(experiment)
    return list(client(uri).search_runs([found.experiment_id])) if found else []


def history(uri: str, run_id: str, key: str = "train/loss") -> list[tuple[int, int, float]]:
    """(step, time in ms, value) of every point, in order."""
    points = client(uri).get_metric_history(run_id, key)
    return sorted((point.step, point.timestamp, point.value) for point in points)


def artifacts(uri: str, run_id: str, folder: str | None = None) -> list[str]:
    return sorted(item.path for item in client(uri).list_artifacts(run_id, folder))


def prepare(database: Path) -> None:
    done = subprocess.run(
        tracking.prepare_command(f"sqlite:///{database}"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def spawn(
    run: Path, uri: str, *, follow: bool, env: dict[str, str], tracker: str | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tracking.recorder_command(run, uri, EXPERIMENT, follow=follow, tracker=tracker),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(code: str) -> str:
    """The output of ``code`` in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
