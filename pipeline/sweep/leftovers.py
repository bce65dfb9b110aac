"""What a controller that was killed has left running of a trial."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.cluster import earlier, launchers
from pipeline.cluster.attempt import stop_run
from pipeline.core.errors import HostError
from pipeline.core.specs import UNDER_WAY
from pipeline.execution.run import Run
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
    cluster, plan = run.config.cluster, earlier.newest(run.folder.path)
    key = run.key.short
    try:
        if plan is not None and plan.launcher != cluster.launcher:
            say(
                f"WARNING: run {key} was under way by cluster.launcher={plan.launcher}, which these words don't reach: "
                f"doit stop run={key} cluster=<the one that it was trained on> ends what it has left there"
            )
        if not launchers.capabilities(cluster).hosts_are_granted:  # else the next attempt finds its job
            stop_run(cluster, run.folder.path, key)
    except HostError as error:
        say(f"WARNING: {error}")
    finally:
        lock.release()
