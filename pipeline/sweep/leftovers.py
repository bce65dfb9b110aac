"""What a controller that was killed has left running of a trial."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.cluster import launchers
from pipeline.cluster.attempt import stop_run
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import UNDER_WAY, Cluster
from pipeline.execution.configured_run import Run
from pipeline.runs import journal
from pipeline.runs.lock import RunLock


def end_leftovers(run: Run, say: Callable[[str], None]) -> None:
    """What a controller that was killed has left running for this key, perhaps on other hosts than this slot's.

    Nothing is ended while another command holds the run: that one is alive.
    """
    entries = journal.read(run.folder.journal)
    if not entries or entries[-1].state not in UNDER_WAY:
        return
    lock = RunLock(run.folder)
    if not lock.take():
        return
    cluster = _recorded_cluster(run)
    try:
        if not _goes_on_in_its_job(run, cluster):
            stop_run(cluster, run.folder.path, run.key.short)
    except HostError as error:
        say(f"WARNING: {error}")
    finally:
        lock.release()


def _goes_on_in_its_job(run: Run, recorded: Cluster) -> bool:
    """Whether the next attempt finds a scheduler's job of the last one, and needn't queue again."""
    is_same = type(recorded.settings) is type(run.config.cluster.settings)
    return is_same and launchers.capabilities(recorded).hosts_are_granted


def _recorded_cluster(run: Run) -> Cluster:
    """The hosts that its last attempt was started on."""
    from pipeline.config.cluster import build_cluster

    recorded = (run.folder.read_json("config.json") or {}).get("cluster")
    gpus = run.config.cluster.hosts[0].nproc_per_node
    try:
        return build_cluster(dict(recorded or {}), root=run.root, local_gpus=gpus)
    except (UsageError, KeyError, TypeError, AttributeError, ValueError):  # damaged: it is laid out anew anyway
        return run.config.cluster
