"""Find an attempt that another command has started and that still runs, or succeeded unwatched."""

from __future__ import annotations

from dataclasses import replace

from pipeline.cluster import earlier, launchers, starts
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import UNDER_WAY
from pipeline.execution.restarts import next_start
from pipeline.execution.run import Run
from pipeline.execution.work import OpenAttempt, Say, Work
from pipeline.runs import journal


def unfinished_attempt(run: Run) -> OpenAttempt:
    """Return the newest attempt and its hosts. Raises UsageError: it is over, or runs on hosts not in cluster.hosts."""
    cluster, plan = run.config.cluster, starts.unfinished_plan(run.folder.path)
    if launchers.capabilities(cluster).hosts_are_granted:  # its job may also be queued or over
        raise UsageError(
            f"{cluster.launcher} grants the hosts of run {run.key.short} to a job, and only doit train finds it again",
            hint="the command that started it, which takes up a job that waits or runs",
        )
    if plan is None:
        raise UsageError(f"nothing of run {run.key.short} is under way", hint="the command that started it")
    hosts_by_label = {host.label: host for host in (*cluster.hosts, *cluster.spares)}
    unknown = [node.host for node in plan.nodes if node.host not in hosts_by_label]
    if unknown:
        relabelled = earlier.with_current_labels(cluster, plan)
        if relabelled is None:
            raise UsageError(
                f"the attempt that is under way is on {', '.join(unknown)}, which cluster.hosts doesn't name",
                hint="doit attach with the words of the command that has started it",
            )
        plan = relabelled
    hosts = tuple(hosts_by_label[node.host] for node in plan.nodes)
    spares = tuple(host for host in cluster.spares if host not in hosts)
    return OpenAttempt(plan, replace(cluster, hosts=hosts, spares=spares))


def attempt_to_attach(run: Run, say: Say) -> OpenAttempt:
    """Return the newest attempt and its hosts if it may still run; else report its end through ``say``.

    Raises:
        UsageError: it is over, or runs on hosts not in cluster.hosts.
        HostError: the journal says that it ended, and a host can't be asked whether its ranks still run.
    """
    attempt = unfinished_attempt(run)
    last = journal.read(run.folder.journal)[-1:]
    has_ended = bool(last) and last[0].state not in UNDER_WAY
    why_over = earlier.why_over(attempt.cluster, attempt.plan, run.folder.path) if has_ended else None
    if why_over is not None:
        for line in why_over:
            say(line)
        raise UsageError(
            f"nothing of run {run.key.short} is under way: it is {last[0].state}, {last[0].first_line}",
            hint=f"its command again; it starts {next_start(run)}",
        )
    return attempt


def surviving_attempt(work: Work) -> OpenAttempt | None:
    """Return the newest attempt and its hosts if it outlived its command, and still runs or succeeded.

    Raises HostError: a host can't be asked, and no other host may replace it.
    """
    try:
        attempt = unfinished_attempt(work.run)
    except UsageError:
        return None
    work.say.doing(f"asking the hosts of attempt {attempt.plan.attempt} whether it still runs")
    try:
        why_over = earlier.why_over(attempt.cluster, attempt.plan, work.run.folder.path)
    except HostError as error:
        cluster = work.run.config.cluster
        if cluster.settings.max_restarts > 0 or not {host.label for host in cluster.hosts}.issuperset(error.hosts):
            return None
        raise
    for line in why_over or ():
        work.say(line)
    return attempt if why_over is None else None
