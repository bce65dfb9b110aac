"""Deal with earlier starts of a run: end them on their hosts, fetch their checkpoints, remove their folders there.

A start is one launch of torchrun on all nodes. Its command may have been killed, and its hosts may have other names
now, or not belong to the cluster any more. The last part asks whether such a start still runs and can be followed.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.cluster import launchers, starts
from pipeline.cluster.agent.requests import Standing
from pipeline.cluster.attempt.failures import explained_by_script
from pipeline.cluster.launchers.base import NOT_ENDED
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.cluster.starts import Start
from pipeline.core import documents
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.files import temporary_prefix
from pipeline.core.specs import Cluster, LaunchPlan, NodePlan, Outputs
from pipeline.runs import journal
from pipeline.runs.checkpoints import newest_step
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher


_LOG = "agent/log"  # the merged output of a node's ranks, in its run folder


class _Route(NamedTuple):
    """A launcher that reaches some hosts of a start, and the start's plan with the labels that this launcher knows."""

    launcher: Launcher
    plan: LaunchPlan


class EarlierStarts:
    """The earlier starts of a run whose hosts may still hold something of it, as a new attempt finds them.

    ``launcher``: the launcher of the new attempt, whose hosts are those of ``facts``. ``is_restart``: this command ran
    the earlier attempts itself and has reported their lost hosts, so only its current hosts are asked.
    """

    def __init__(self, launcher: Launcher, facts: Sequence[HostFacts], run_dir: Path, *, is_restart: bool) -> None:
        self._launcher, self._facts, self._run_dir, self._is_restart = launcher, facts, run_dir, is_restart

    def end_and_collect(self) -> list[str]:
        """End the starts on their hosts, fetch their checkpoints into the run folder, and clear the hosts.

        Return a line for each start that was fetched from other hosts, and for each host that doesn't answer.
        """
        open_starts, newest = starts.open_starts(self._run_dir), starts.unfinished_plan(self._run_dir)
        # starts in a shared run folder aren't recorded: there the newest plan is all there is
        if newest is not None and newest.run_id not in [start.plan.run_id for start in open_starts]:
            followed_at = (self._run_dir / run_folder.PLAN).stat().st_mtime
            open_starts.append(Start(plan=newest, followed_at=followed_at))
        lines = []
        for start in reversed(open_starts):  # the newest first, so that the latest checkpoint is fetched first
            with ExitStack() as stack:  # closes the connections to its hosts
                lines += self._end_start(start, stack)
        return lines

    def _end_start(self, start: Start, stack: ExitStack) -> list[str]:
        """Do for one start what ``end_and_collect`` does for all."""
        try:
            routes = self._routes(start, stack)
        except PacelineError as error:
            # the hosts were reached by another launcher. Those that the new attempt uses, too, need nothing here: its
            # own start ends all processes of the run there
            hosts = [(node, self._current_host(node)) for node in start.plan.nodes]
            lines = [
                f"{node.host}: attempt {start.plan.attempt} was started there by cluster.launcher="
                f"{start.plan.launcher}, and {node.host} is {fact.host}: its processes are ended before this one "
                f"starts; files that only it has stay in {node.run_dir} and are not used"
                for node, fact in hosts
                if fact is not None
            ]
            failures = {node.host: error.what for node, fact in hosts if fact is None}
        else:
            lines = []
            failures = {}
            for launcher, plan in routes:
                unstopped = launcher.stop(plan.run_key, self._run_dir)  # host → why
                failures |= {node.host: unstopped[node.host] for node in plan.nodes if node.host in unstopped}
            # checkpoints are on node 0; without them nothing may be cleared
            if routes and routes[0].plan.nodes[0].host not in failures and self._collected(routes[0]):
                if not self._is_restart:
                    self._fetch_logs(routes[0], start)
                lines += self._clear(routes, start)
        if not self._is_restart:
            lines += [_unreached_line(start, host, why) for host, why in failures.items()]
        return lines

    def _fetch_logs(self, route: _Route, start: Start) -> None:
        """Replace logs that are shorter here than on their hosts, because nobody followed the start to its end."""
        # metrics that a script printed are read from logs
        outputs = Outputs(resume=(_LOG,), final=(), needed=(), others=(_LOG,))
        log_dir = self._run_dir / run_folder.ATTEMPTS / str(start.plan.attempt)
        with tempfile.TemporaryDirectory(prefix=temporary_prefix(".collect"), dir=self._run_dir) as name:
            with suppress(PacelineError):
                route.launcher.collect(dataclasses.replace(route.plan, outputs=outputs), Path(name), final=False)
            for node in start.plan.nodes:
                folder = Path(name) / run_folder.NODES / str(node.node_rank) if node.node_rank else Path(name)
                fetched, log = folder / _LOG, log_dir / f"{node.host}.log"
                if fetched.is_file() and log.is_file() and fetched.stat().st_size > log.stat().st_size:
                    fetched.replace(log)

    def _clear(self, routes: Sequence[_Route], start: Start) -> list[str]:
        """Remove the start's folders from its hosts. Return warnings, and a line if the hosts aren't those of now."""
        lines = []
        for route in routes:
            lines += [f"WARNING: {note}" for note in route.launcher.notes()]
            route.launcher.clean(route.plan)
        starts.mark_collected(start.plan, self._run_dir)
        if routes[0].launcher is not self._launcher:
            left = f"attempt {start.plan.attempt} was left on {start.plan.nodes[0].host}"
            lines.append(f"{left}: it is ended there, and its checkpoints were fetched")
        return lines

    def _routes(self, start: Start, stack: ExitStack) -> list[_Route]:
        """Return the routes to the hosts of a start, the one to its node 0 first; none if node 0 can't be reached.

        Hosts of the new attempt are reached by its launcher, even if the start knew them by other names. All others are
        reached by the names in the start's plan. Raises PacelineError: they can't be reached.
        """
        plan = start.plan
        current: dict[int, HostFacts] = {}  # node rank → the same host, as the new attempt knows it
        # with a shared run folder nothing has to be fetched from hosts
        if not (self._launcher.capabilities.shares_run_dir or _capabilities(plan).shares_run_dir):
            current = {node.node_rank: fact for node in plan.nodes if (fact := self._current_host(node)) is not None}
        routes = []
        if current:
            nodes = list(plan.nodes)
            for rank, fact in current.items():  # with the labels and identities that they have now
                nodes[rank] = dataclasses.replace(nodes[rank], host=fact.host, identity=fact.identity)
            routes.append(_Route(self._launcher, dataclasses.replace(plan, nodes=tuple(nodes))))
        others = [node.host for node in plan.nodes if node.node_rank not in current]
        elsewhere = self._cluster_elsewhere(plan, others) if others and not self._is_restart else None
        if elsewhere is not None:
            routes.append(_Route(stack.enter_context(closing(launchers.create(elsewhere))), plan))
        if plan.nodes[0].node_rank in current:
            return routes
        return routes[::-1] if elsewhere is not None else []  # node 0 is on the other route, if there is one

    def _cluster_elsewhere(self, plan: LaunchPlan, labels: Sequence[str]) -> Cluster | None:
        """Return a cluster of those hosts of a start that the new attempt doesn't use; None: nothing is left there."""
        cluster = self._launcher.cluster
        if plan.launcher != cluster.launcher and _capabilities(plan).is_this_computer:
            # the start ran on this computer, whose launcher needs no settings for hosts
            local = dataclasses.replace(cluster, launcher=plan.launcher, hosts=(), ssh_config=None)
            return starts.cluster_with(local.with_settings(workdir=None), plan, labels)
        return starts.cluster_with(cluster, plan, labels) if starts.is_recorded(plan.run_id, self._run_dir) else None

    def _current_host(self, node: NodePlan) -> HostFacts | None:
        """Return the host of the new attempt that is the node's host; None if there is none."""
        by_identity = next((fact for fact in self._facts if fact.identity == node.identity), None)
        # an identity contains the address, but the host may be reached at another one now
        machine_and_user = (node.machine, _user(node.identity))
        by_machine = (fact for fact in self._facts if (fact.machine, _user(fact.identity)) == machine_and_user)
        return by_identity or (next(by_machine, None) if node.machine else None)

    def _collected(self, route: _Route) -> bool:
        """Fetch the files that a later attempt resumes from. Return whether nothing needed is left on node 0."""
        # of a start before the newest one only later checkpoints than those here are needed; those of scripts can't be
        # compared, so the newest start's count
        if journal.known_attempts(self._run_dir)[-1:] != [route.plan.run_id]:
            if route.plan.outputs.whole:
                return True
            with tempfile.TemporaryDirectory(prefix=temporary_prefix(".collect"), dir=self._run_dir) as name:
                if not route.launcher.collect(route.plan, Path(name), final=False):
                    return False
                if newest_step(Path(name)) <= newest_step(self._run_dir):
                    return True
        return route.launcher.collect(route.plan, self._run_dir, final=False)


def stop_elsewhere(cluster: Cluster, run_dir: Path) -> tuple[list[str], dict[str, str]]:
    """End processes of the run on other hosts than those of ``cluster``; return these, and host → why it may go on."""
    stopped, failed = list[str](), dict[str, str]()
    in_cluster = {host.label for host in cluster.hosts}
    for start in starts.open_starts(run_dir):
        is_same_launcher = start.plan.launcher == cluster.launcher
        labels = [node.host for node in start.plan.nodes if not is_same_launcher or node.host not in in_cluster]
        if not labels:
            continue
        try:
            with closing(launchers.create(starts.cluster_with(cluster, start.plan, labels))) as launcher:
                failures = launcher.stop(start.plan.run_key, run_dir.resolve())
        except PacelineError as error:
            failures = dict.fromkeys(labels, error.what)
        stopped += [label for label in labels if label not in stopped]
        # a host that didn't answer has ended its ranks itself once the lease is over
        failed |= {
            host: f"{_stop_failure(why)}; {_lease_words(start)}"
            for host, why in failures.items()
            if why.startswith(NOT_ENDED) or start.lease_ends > time.time()
        }
    return stopped, failed


def _user(identity: str) -> str:
    return identity.rpartition(" ")[2]  # the user id at its end


def _capabilities(plan: LaunchPlan) -> Capabilities:
    capabilities: Capabilities = launchers.LAUNCHERS.settings(plan.launcher).capabilities
    return capabilities


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


# --------------------------------------------------------------------------------------- a start whose command is gone
def why_over(cluster: Cluster, plan: LaunchPlan, run_dir: Path) -> list[str] | None:
    """Return why an attempt whose command is gone can't be followed, a line for each node that gave a reason.

    None: it can be followed, as each of its nodes still runs its part or has succeeded. ``cluster`` has the hosts of
    ``plan``. Raises HostError: a host doesn't answer.
    """
    # the command may have recorded the ends of all nodes before it was killed: then no host has to be asked
    recorded = _recorded_failures(plan, run_dir)
    if recorded.keys() == {node.host for node in plan.nodes}:
        return [f"attempt {plan.attempt} is over on {host}: {how}" for host, how in recorded.items()]
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
    lines, is_over = [], False
    for host, answer in answers.items():
        standing = answer.record(Standing)
        if standing is not None and (standing.alive or standing.code == 0):
            continue
        is_over = True
        if standing is not None and standing.reason:
            how = recorded.get(host) or _end_in_words(standing.reason, as_json(standing.errors))
            lines.append(f"attempt {plan.attempt} is over on {host}: {how}")
    return lines if is_over else None


def with_current_labels(cluster: Cluster, plan: LaunchPlan) -> LaunchPlan | None:
    """Return the plan with its hosts' labels in ``cluster``; None if these are other hosts, by their identities."""
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
    """Return host → how its part failed, as far as the run folder records it."""
    ends = {}
    for node in plan.nodes:
        path = run_dir / run_folder.ATTEMPTS / str(plan.attempt) / f"{node.host}.exit.json"
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            # an older file is of an earlier start of the same attempt
            is_of_plan = path.stat().st_mtime_ns >= (run_dir / run_folder.PLAN).stat().st_mtime_ns
            end = documents.read(path)
            if is_of_plan and end["event"] == "NodeExit" and end["code"] != 0:
                ends[node.host] = _end_in_words(str(end["reason"]), end["errors"])
    return ends


def _end_in_words(reason: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of a node's part in words: its first error, else the agent's reason."""
    for error in errors:
        rank, message = int(error["rank"]), str(error["message"]).partition("\n")[0]
        return f"rank {rank}{'' if message.startswith('ended with ') else ':'} {message}"
    first = reason.partition("\n")[0]
    return "it was stopped (Ctrl-C or doit stop)" if first == "stopped" else explained_by_script(reason) or first
