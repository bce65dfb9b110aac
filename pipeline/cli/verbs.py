"""The verbs: what each is for, and its own ``name=value`` words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One command. ``options`` are its own ``name=value`` words; ``composes`` says that it takes overrides.

    ``shares_batch``: the ranks must be able to share the global batch. ``sweeps``: its overrides may stand for
    several values.
    """

    summary: str
    options: tuple[str, ...] = ()
    composes: bool = True
    shares_batch: bool = True
    sweeps: bool = False


VERBS: Mapping[str, Verb] = {
    "fetch": Verb(summary="get the data set, check it and pack it"),
    "preflight": Verb(summary="ask every host of the cluster whether it can take part"),
    "plan": Verb(
        summary="what would be done, why, and the exact command of each host: format=mermaid|dot json=1",
        options=("json", "format"),
    ),
    "why": Verb(
        summary="why this run is not up to date: the fields that differ from the nearest one", options=("json",)
    ),
    "accept": Verb(
        summary="say that what differs from a finished run is harmless: run=KEY undo=1", options=("run", "undo")
    ),
    "train": Verb(
        summary="train: fetch, launch torchrun on every host, evaluate, record", options=("threads_per_rank",)
    ),
    "sweep": Verb(
        summary="train every combination of several values: optimizer.lr=0.1,0.01 seed='range(3)'",
        options=("dry_run", "fork", "retry_failed"),
        sweeps=True,
    ),
    "report": Verb(summary="results of a sweep, seeds taken together: sweep=KEY json=1", options=("sweep", "json")),
    "evaluate": Verb(summary="accuracy, per-class report and confusion matrix of a run", options=("run",)),
    "record": Verb(summary="replay a run into MLflow (exactly once)", options=("run",)),
    "runs": Verb(summary="list the runs: state, accuracy, how to repeat them"),
    "status": Verb(summary="how far a run has come: run=KEY (else the newest)", options=("run",)),
    "logs": Verb(summary="what the hosts of a run said: run=KEY host=NAME", options=("run", "host")),
    "reproduce": Verb(
        summary="make a finished run again from its provenance and compare: run=KEY|MLFLOW_ID|ARCHIVE keep=1",
        options=("run", "keep"),
        shares_batch=False,
    ),
    "export": Verb(
        summary="a run as one archive: run=KEY weights=1 to=FILE", options=("run", "weights", "to"), shares_batch=False
    ),
    "stop": Verb(summary="end a run on all of its hosts", options=("run",)),
    "allreduce": Verb(
        summary="all-reduce bandwidth of the cluster, every sum checked: max_bytes=1G iterations=20",
        options=("min_bytes", "max_bytes", "iterations"),
        shares_batch=False,
    ),
    "benchmark": Verb(
        summary="throughput and scaling against a plain PyTorch loop: pairs=5 block_s=2 against=guide,lightning",
        options=("pairs", "block_s", "against"),
        shares_batch=False,
    ),
    "profile": Verb(summary="torch profiler trace of a few training steps of rank 0: steps=5", options=("steps",)),
    "ui": Verb(summary="compare the runs in MLflow's web page", options=("port",)),
    "lab": Verb(
        summary="two SSH hosts on this computer: hosts=2 raises them, down=1 removes them",
        options=("hosts", "down"),
        composes=False,
    ),
}
