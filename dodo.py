"""Task creators: what `doit list` shows. The work is in pipeline/; this file only names it."""

from typing import Any

from pipeline.cli import tasks

DOIT_CONFIG = {
    "default_tasks": ["_overview"],
    "action_string_formatting": "new",
    "backend": "sqlite3",
    "dep_file": ":memory:",  # what is up to date is read from run folders: doit's own database decides nothing
}

Task = dict[str, Any]


def task__overview() -> Task:
    """What there is to do (a bare `doit` starts nothing)."""
    return tasks.always("overview")


def task_fetch() -> Task:
    """Get the data set, check it and pack it."""
    return tasks.until("fetch", "is_fetched")


def task_preflight() -> Task:
    """Ask every host of the cluster whether it can take part."""
    return tasks.always("preflight")


def task_train() -> Task:
    """Train: fetch, launch torchrun on every host, evaluate, record."""
    return tasks.until("train", "is_trained", after=["fetch"])


def task_plan() -> Task:
    """What would be done, why, and the exact command of each host."""
    return tasks.always("plan")


def task_config() -> Task:
    """The composed configuration, each value with where it comes from."""
    return tasks.always("config")


def task_why() -> Task:
    """Why this run is not up to date: the fields that differ from the nearest finished one."""
    return tasks.always("why")


def task_accept() -> Task:
    """Say that what differs from a finished run is harmless: accepted, not proven."""
    return tasks.always("accept")


def task_sweep() -> Task:
    """Train every combination of several values, each an ordinary run."""
    return tasks.always("sweep")


def task_report() -> Task:
    """Results of a sweep: seeds taken together, the best configuration."""
    return tasks.always("report")


def task_evaluate() -> Task:
    """Accuracy, per-class report and confusion matrix of a run."""
    return tasks.always("evaluate", after=["train"])


def task_record() -> Task:
    """Replay a run into MLflow (exactly once)."""
    return tasks.always("record")


def task_runs() -> Task:
    """List the runs: state, accuracy, how to repeat them."""
    return tasks.always("runs")


def task_status() -> Task:
    """How far a run has come."""
    return tasks.always("status")


def task_logs() -> Task:
    """What the hosts of a run said."""
    return tasks.always("logs")


def task_reproduce() -> Task:
    """Make a finished run again from its provenance and compare."""
    return tasks.always("reproduce")


def task_export() -> Task:
    """A run as one archive."""
    return tasks.always("export")


def task_stop() -> Task:
    """End a run on all of its hosts."""
    return tasks.always("stop")


def task_allreduce() -> Task:
    """All-reduce bandwidth of the cluster, every sum checked."""
    return tasks.always("allreduce")


def task_benchmark() -> Task:
    """Throughput and scaling against a plain PyTorch loop."""
    return tasks.always("benchmark", after=["fetch"])


def task_profile() -> Task:
    """Torch profiler trace of a few training steps."""
    return tasks.always("profile", after=["fetch"])


def task_ui() -> Task:
    """Compare the runs in MLflow's web page."""
    return tasks.always("ui")


def task_lab() -> Task:
    """Two SSH hosts on this computer: hosts=2 raises them, down=1 removes them."""
    return tasks.always("lab")
