"""Find, follow, end and clear what earlier attempts left on hosts: ranks that still run, checkpoints, folders."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import launchers, starts
from pipeline.cluster.agent.reports import Standing
from pipeline.cluster.attempt.failures import explained_by_script
from pipeline.cluster.launchers.base import NOT_ENDED
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.cluster.starts import Start
from pipeline.core import documents
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.specs import Cluster, LaunchPlan, NodePlan
from pipeline.core.tables import counted, file_size
from pipeline.core.temporary_files import temporary_prefix
from pipeline.runs import journal
from pipeline.runs.checkpoints import newest_step
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts, LeftFolder
from trainers.contract.records import as_json

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

_COLLECTED = "collected"  # file of attempts/N: run id of the start whose outputs are all here


@dataclass(frozen=True, kw_only=True)
class _Route:
    """A launcher that reaches some hosts of a start, and the start's plan with the labels that this launcher uses."""

    launcher: Launcher
    plan: LaunchPlan

    def stop(self, run_dir: Path) -> dict[str, str]:
        """End the run on these hosts; return host of the plan → why that failed."""
        failures = self.launcher.stop(self.plan.run_key, run_dir)
        return {node.host: failures[node.host] for node in self.plan.nodes if node.host in failures}


def can_be_followed(cluster: Cluster, plan: LaunchPlan, run_dir: Path, say: Callable[[str], None]) -> bool:
    """True if each node of an attempt whose command is gone still runs its part or has succeeded.

    Otherwise the attempt is over, and ``say`` takes the reason.

    Args:
        cluster: has the hosts of ``plan``.
        run_dir: records the ends that a command has seen. If all have ended, no host is asked.

    Raises:
        HostError: a host doesn't answer.
    """
    known = _recorded_failures(plan, run_dir)
    if known.keys() == {node.host for node in plan.nodes}:
        for host, how in known.items():
            say(f"attempt {plan.attempt} is over on {host}: {how}")
        return False
    with closing(launchers.create(cluster)) as launcher:
        answers = launcher.standings(plan)
        if any(answer.value is None for answer in answers.values()):
            launcher.probe(None)  # raises HostError that names what is wrong with each host
            answers = launcher.standings(plan)
    silent = {host: answer.error for host, answer in answers.items() if answer.value is None}
    if silent:
        raise HostError(
            f"can't ask {', '.join(silent)} whether attempt {plan.attempt} still runs: {next(iter(silent.values()))}",
            hint="the same command again",
            hosts=[*silent],
        )
    standings = {host: answer.record(Standing) for host, answer in answers.items()}
    over = {
        host: standing
        for host, standing in standings.items()
        if standing is None or not (standing.alive or standing.code == 0)
    }
    for host, standing in over.items():
        if standing is not None and standing.reason:
            how = known.get(host) or _end_in_words(standing.reason, as_json(standing.errors))
            say(f"attempt {plan.attempt} is over on {host}: {how}")
    return not over


def with_current_labels(cluster: Cluster, plan: LaunchPlan) -> LaunchPlan | None:
    """Return the plan with the labels that its hosts have in ``cluster``; None if they aren't the same hosts.

    Hosts are compared by host name, address and port of the ssh server, and user.
    """
    if plan.launcher != cluster.launcher or len(plan.nodes) != cluster.nnodes:
        return None
    with closing(launchers.create(cluster)) as launcher:
        answers = launcher.standings(plan)
    standings = {label: answer.record(Standing) for label, answer in answers.items()}
    labels = {standing and standing.identity: label for label, standing in standings.items()}
    if labels.keys() != {node.identity for node in plan.nodes}:
        return None
    named = tuple(dataclasses.replace(node, host=labels[node.identity]) for node in plan.nodes)
    return dataclasses.replace(plan, nodes=named)


def _recorded_failures(plan: LaunchPlan, run_dir: Path) -> dict[str, str]:
    """Return host → how its part failed, by the run folder's record; the host may have removed its own."""
    ends = {}
    for node in plan.nodes:
        path = run_dir / run_folder.ATTEMPTS / str(plan.attempt) / f"{node.host}.exit.json"
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            is_of_plan = path.stat().st_mtime_ns >= (run_dir / run_folder.PLAN).stat().st_mtime_ns
            end = documents.read(path)
            if is_of_plan and end["event"] == "NodeExit" and end["code"] != 0:
                ends[node.host] = _end_in_words(str(end["reason"]), end["errors"])
    return ends


def _end_in_words(reason: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """Return a line about the end of a node's part: its first error, else the agent's reason."""
    for error in errors:
        rank, message = int(error["rank"]), str(error["message"]).partition("\n")[0]
        return f"rank {rank}{'' if message.startswith('ended with ') else ':'} {message}"
    first = reason.partition("\n")[0]
    return "it was stopped (Ctrl-C or doit stop)" if first == "stopped" else explained_by_script(reason) or first


def end_and_collect(
    launcher: Launcher, facts: Sequence[HostFacts], run_dir: Path, say: Callable[[str], None], *, is_restart: bool
) -> None:
    """End the earlier starts on their hosts, fetch their checkpoints into ``run_dir``, and clear the hosts.

    Args:
        launcher: the launcher of the new attempt, whose hosts are those of ``facts``.
        say: takes a line for each start that was fetched from other hosts, and for each host that doesn't answer.
        is_restart: this command ran the earlier attempts itself and has reported their lost hosts, so only its current
            hosts are asked.
    """
    for start in _open_starts(run_dir):
        with ExitStack() as stack:
            try:
                routes = _routes(launcher, facts, start, run_dir, stack, is_restart=is_restart)
            except PacelineError as error:  # such as a start by another launcher
                failures = {}
                for node in start.plan.nodes:
                    if (fact := _current_host(node, facts)) is None:
                        failures[node.host] = error.what
                    else:
                        say(_ended_by_this_start(start, node, fact.host))
            else:
                failures = {host: why for route in routes for host, why in route.stop(run_dir).items()}
                if routes and routes[0].plan.nodes[0].host not in failures and _collected(routes[0], run_dir):
                    _clear(routes, start, run_dir, say)
                    if routes[0].launcher is not launcher:
                        say(
                            f"attempt {start.plan.attempt} was left on {start.plan.nodes[0].host}: it is ended there, "
                            "and its checkpoints were fetched"
                        )
        if not is_restart:
            for host, why in failures.items():
                say(_unreached_line(start, host, why))


def _clear(routes: Sequence[_Route], start: Start, run_dir: Path, say: Callable[[str], None]) -> None:
    """Clear the hosts of a start whose outputs were fetched."""
    for route in routes:
        for note in route.launcher.notes():
            say(f"WARNING: {note}")
        route.launcher.clean(route.plan)
    mark_collected(start.plan, run_dir)


def stop_elsewhere(cluster: Cluster, run_dir: Path) -> tuple[list[str], dict[str, str]]:
    """End processes of the run on hosts of earlier starts that aren't hosts of ``cluster``.

    Returns the hosts that were asked, and host → failure. A failure after the end of the lease doesn't count, because
    nothing runs there any more.
    """
    stopped, failed = list[str](), dict[str, str]()
    known = {host.label for host in cluster.hosts}
    for start in starts.open_starts(run_dir):
        is_same = start.plan.launcher == cluster.launcher
        labels = [node.host for node in start.plan.nodes if not is_same or node.host not in known]
        if not labels:
            continue
        try:
            with closing(launchers.create(starts.cluster_with(cluster, start.plan, labels))) as launcher:
                failures = launcher.stop(start.plan.run_key, run_dir.resolve())
        except PacelineError as error:
            failures = dict.fromkeys(labels, error.what)
        stopped += [label for label in labels if label not in stopped]
        failed |= {
            host: f"{_stop_failure(why)}; {_lease_words(start)}"
            for host, why in failures.items()
            if why.startswith(NOT_ENDED) or start.lease_ends > time.time()
        }
    return stopped, failed


def _open_starts(run_dir: Path) -> list[Start]:
    """Return the open starts, the newest first, so that the latest checkpoint is fetched first.

    Include the newest attempt even if an earlier version of Paceline started it, which recorded no starts.
    """
    open_starts, newest = starts.open_starts(run_dir), unfinished_plan(run_dir)
    if newest is not None and newest.run_id not in [start.plan.run_id for start in open_starts]:
        open_starts.append(Start(plan=newest, followed_at=(run_dir / run_folder.PLAN).stat().st_mtime))
    return open_starts[::-1]


def _routes(
    launcher: Launcher, facts: Sequence[HostFacts], start: Start, run_dir: Path, stack: ExitStack, *, is_restart: bool
) -> list[_Route]:
    """Return the routes to the hosts of a start, the one to its node 0 first; none if node 0 can't be reached.

    Hosts of the new attempt are reached by ``launcher``, even if the start knew them by other names; all others by the
    names in the start's plan. Raises PacelineError: they can't be reached.
    """
    plan, here = start.plan, dict[int, HostFacts]()
    if not (launcher.capabilities.shares_run_dir or _capabilities(plan).shares_run_dir):  # else nothing is fetched
        here = {node.node_rank: fact for node in plan.nodes if (fact := _current_host(node, facts)) is not None}
    nodes = tuple(
        dataclasses.replace(node, host=fact.host, identity=fact.identity)
        if (fact := here.get(node.node_rank)) is not None
        else node
        for node in plan.nodes
    )
    routes = []
    if here:
        routes.append(_Route(launcher=launcher, plan=dataclasses.replace(plan, nodes=nodes)))
    elsewhere = [node.host for node in plan.nodes if node.node_rank not in here]
    on_this_computer = plan.launcher != launcher.cluster.launcher and _capabilities(plan).is_this_computer
    if elsewhere and (on_this_computer or starts.is_recorded(plan.run_id, run_dir)) and not is_restart:
        base = launcher.cluster
        if on_this_computer:  # the cluster's hosts are elsewhere; ranks on this computer write to the run folder itself
            base = dataclasses.replace(base, launcher=plan.launcher, hosts=(), ssh_config=None)
            base = base.with_settings(workdir=None)
        cluster = starts.cluster_with(base, plan, elsewhere)
        other = stack.enter_context(closing(launchers.create(cluster)))
        routes.append(_Route(launcher=other, plan=plan))
    if plan.nodes[0].node_rank not in here:  # node 0 is on the other route, if there is one
        routes = routes[::-1] if routes and routes[-1].launcher is not launcher else []
    return routes


def _current_host(node: NodePlan, facts: Sequence[HostFacts]) -> HostFacts | None:
    """Return the host of the new attempt that is the node's host: by identity, else by machine and user.

    Machine and user are the same at another address and under another launcher.
    """
    by_identity = next((fact for fact in facts if fact.identity == node.identity), None)
    wanted = (node.machine, _user(node.identity))
    by_machine = (fact for fact in facts if (fact.machine, _user(fact.identity)) == wanted)
    return by_identity or (next(by_machine, None) if node.machine else None)


def _user(identity: str) -> str:
    """Return the user id, the last part of an identity."""
    return identity.rpartition(" ")[2]


def _capabilities(plan: LaunchPlan) -> Capabilities:
    """Return the capabilities of the launcher that started the plan."""
    capabilities: Capabilities = launchers.LAUNCHERS.settings(plan.launcher).capabilities
    return capabilities


def _collected(route: _Route, run_dir: Path) -> bool:
    """Fetch the files that a later attempt resumes from. True if nothing needed is left on node 0.

    Of a start before the newest one, only checkpoints later than those here are needed. Checkpoints of scripts can't be
    compared, so there only the newest start's are needed.
    """
    if journal.known_attempts(run_dir)[-1:] != [route.plan.run_id]:
        if route.plan.outputs.whole:
            return True
        with tempfile.TemporaryDirectory(prefix=temporary_prefix(".collect"), dir=run_dir) as name:
            if not route.launcher.collect(route.plan, Path(name), final=False):
                return False
            if newest_step(Path(name)) <= newest_step(run_dir):
                return True
    return route.launcher.collect(route.plan, run_dir, final=False)


def _ended_by_this_start(start: Start, node: NodePlan, host: str) -> str:
    """Describe a host that an earlier start reached by another launcher; this start ends all processes of the run."""
    return (
        f"{node.host}: attempt {start.plan.attempt} was started there by cluster.launcher={start.plan.launcher}, and "
        f"{node.host} is {host}: its processes are ended before this one starts; files that only it has stay in "
        f"{node.run_dir} and are not used"
    )


def _unreached_line(start: Start, host: str, why: str) -> str:
    kept = "files that only it has are not used"
    if host == start.plan.nodes[0].host and not start.plan.outputs.whole:
        kept = "the same command fetches its checkpoints once it answers"
    begun = f"attempt {start.plan.attempt} was started there"
    return f"{host}: {begun}, and {_stop_failure(why)}; {_lease_words(start)}; {kept}"


def _stop_failure(why: str) -> str:
    return why if why.startswith(NOT_ENDED) else f"it could not be asked to stop ({why.partition(chr(10))[0]})"


def _lease_words(start: Start) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(start.lease_ends))
    lease = f"cluster.lease_s={start.plan.lease_s:g}"
    if start.lease_ends > time.time():
        return f"its ranks may train on until {when} ({lease})"
    return f"its ranks have ended by {when} ({lease})"


def mark_collected(plan: LaunchPlan, run_dir: Path) -> None:
    """Record that later attempts need nothing from the hosts of ``plan``, unless the run folder was removed."""
    folder = run_dir / run_folder.ATTEMPTS / str(plan.attempt)
    if folder.is_dir():
        (folder / _COLLECTED).write_text(plan.run_id, encoding="utf-8")
        starts.remove(plan.run_id, run_dir)


def is_collected(run_id: str, run_dir: Path) -> bool:
    """True if nothing on the attempt's hosts is needed: all was fetched, or a later attempt has begun without it."""
    known = journal.known_attempts(run_dir)
    if run_id not in known or _is_open(run_id, run_dir):
        return False
    return known[-1] != run_id or _collected_run_id(run_dir, journal.attempt_number(run_id)) == run_id


def _is_open(run_id: str, run_dir: Path) -> bool:
    return starts.is_recorded(run_id, run_dir) and not (run_dir / run_folder.RESULT).exists()


def _collected_run_id(run_dir: Path, attempt: int | str) -> str:
    path = run_dir / run_folder.ATTEMPTS / str(attempt) / _COLLECTED
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def newest_plan(run_dir: Path) -> LaunchPlan | None:
    """Return the plan of the newest attempt; None if there is none."""
    return starts.read_plan(run_dir / run_folder.PLAN, run_dir)


def unfinished_plan(run_dir: Path) -> LaunchPlan | None:
    """Return the plan of the newest attempt; None if its hosts hold nothing more."""
    plan = newest_plan(run_dir)
    if plan is None or not plan.nodes or journal.known_attempts(run_dir)[-1:] != [plan.run_id]:
        return None
    return None if _collected_run_id(run_dir, plan.attempt) == plan.run_id else plan


OUTPUTS_KEPT_S = 7 * 86_400.0  # for a run that this project doesn't know, whose outputs another clone may fetch
EMPTY_KEPT_S = 3600.0  # for folders without outputs; then their controller counts as gone


def why_kept(left: LeftFolder, runs_dir: Path) -> str:
    """Return the reason to keep a folder; '' if it may be removed.

    ``runs_dir``: this project's folder of runs.
    """
    begin = journal.prefix_of_attempt(left.run_id)
    key = begin[: -len("-abcdef-")]
    run_dir = runs_dir.resolve() / key
    ours = begin == journal.attempt_prefix(key, run_dir)
    if ours and is_collected(left.run_id, run_dir):
        return ""
    is_newest = journal.known_attempts(run_dir)[-1:] == [left.run_id]
    if ours and left.holds_outputs and (is_newest or _is_open(left.run_id, run_dir)):  # the next attempt fetches them
        return f"run {key} goes on from its checkpoints: the same command fetches them"
    wanted = left.holds_outputs and (not ours or run_dir.exists())
    if left.idle_s > (OUTPUTS_KEPT_S if wanted else EMPTY_KEPT_S):
        return ""
    outputs = ", and has outputs of a run unknown here" if wanted else ""
    return f"it was in use {idle_words(left.idle_s)} ago{outputs}"


def clear_leftovers(launcher: Launcher, facts: Sequence[HostFacts], runs_dir: Path) -> list[str]:
    """Remove the folders of old attempts that nobody needs; return a line for each host that had one."""
    unneeded = {fact.host: [left for left in fact.left_folders if not why_kept(left, runs_dir)] for fact in facts}
    names = [(fact, [left.name for left in unneeded[fact.host]]) for fact in facts if unneeded[fact.host]]
    lines = []
    for host, removed in launcher.remove_folders(names).items():
        size_bytes = sum(left.bytes for left in unneeded[host] if left.name in removed)
        if removed:
            lines.append(
                f"{host}: removed what was left of {counted(len(removed), 'attempt')}, {file_size(size_bytes)}"
            )
    return lines


def idle_words(seconds: float) -> str:
    """Return a duration in words."""
    return f"{seconds / 86_400:.0f} days" if seconds >= 2 * 86_400 else f"{seconds / 60:.0f} minutes"
