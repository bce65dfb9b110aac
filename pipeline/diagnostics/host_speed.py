"""`doit preflight --measure`: trainers.measuring.host_speed on the cluster, and the baseline that hosts are held to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster.preflight.speed import Figure, figures
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.core.specs import Cluster
from pipeline.diagnostics import node_module
from trainers.contract import run_folder

MODULE = "trainers.measuring.host_speed"
_BASELINE = "baseline.json"
_MENDS = "doit preflight baseline=save"


def measure(
    cluster: Cluster, *, backend: str, runs_dir: Path, root: Path, say: node_module.Say
) -> tuple[Path, list[Figure]]:
    """Run it; the folder of the results and the figures of each host and pair.

    Raises:
        HostError, TrainingError, Killed: as a launch does.
    """
    folder = node_module.new_folder(runs_dir, "host-speed")
    diagnosis = node_module.Diagnosis(
        module=MODULE, config={"strategy": {"backend": backend}}, result=run_folder.HOST_SPEED
    )
    result = node_module.run(diagnosis, cluster=cluster, folder=folder, root=root, pack=None, say=say)
    return folder, figures(result, [host.label for host in cluster.hosts])


def baseline(runs_dir: Path) -> dict[str, float]:
    """What was saved, by ``Figure.key``; empty: nothing was. Raises PacelineError: the file is damaged."""
    path = runs_dir / node_module.FOLDER / _BASELINE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PacelineError(f"{path} can't be read: {error}", hint=_MENDS) from error
    wrong = [key for key, value in saved.items() if not _is_figure(key, value)] if isinstance(saved, dict) else [saved]
    if wrong:
        raise PacelineError(
            f"{path} is no baseline: {wrong[0]!r} in it is not the name of a figure with a number from 0", hint=_MENDS
        )
    return {key: float(value) for key, value in saved.items()}


def _is_figure(key: str, value: object) -> bool:
    """Whether ``Figure.key`` can have made the key, and its rate is a number."""
    return key.count(" | ") >= 2 and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def save_baseline(runs_dir: Path, measured: Sequence[Figure]) -> Path:
    """Keep these figures for later comparisons, beside those of other hosts. Raises OSError."""
    path = runs_dir / node_module.FOLDER / _BASELINE
    try:
        kept = baseline(runs_dir)
    except PacelineError:  # which this mends
        kept = {}
    write_json(path, {**kept, **{figure.key: figure.per_s for figure in measured}})
    return path
