"""Run attempts on hosts that the configuration names, over any ``Transport`` (local, pssh, mpi).

``cluster/attempt`` calls it. Each operation is one request to the node agents of all hosts at once; only ``follow`` and
``collect`` have a connection of their own to each host. A *start* is one launch of torchrun on all nodes.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from pipeline.cluster import networks
from pipeline.cluster.agent.requests import (
    CleanRequest,
    FindEnvironmentRequest,
    FollowRequest,
    NodeStart,
    PutPackRequest,
    ReachRequest,
    RemoveFoldersRequest,
    StandingRequest,
    StopRequest,
    WarmEnvironment,
)
from pipeline.cluster.events import Event
from pipeline.cluster.launchers.base import NOT_ENDED, Environment, LockFile, Outcome, PackSource, Transport, workdir_of
from pipeline.cluster.launchers.settings import Capabilities, capabilities
from pipeline.cluster.launchers.transport import agent_client
from pipeline.cluster.launchers.transport.agent_client import AgentClient, Payload
from pipeline.cluster.launchers.transport.answers import Answer, host_facts
from pipeline.cluster.launchers.transport.downloads import Source, receive, receive_others
from pipeline.cluster.launchers.transport.payload import append, append_run, message, new_token
from pipeline.cluster.launchers.transport.streams import Connection, Streams
from pipeline.core.errors import HostError
from pipeline.core.specs import Host, LaunchPlan
from pipeline.runs import journal
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts

_USUAL_S = 3.5  # a slower answer to the probe means a slow login
_LISTENING_S = 10.0  # how long an agent waits for the others, beyond the time of a slow login


class AgentLauncher:
    """Runs attempts on the hosts of ``cluster`` through the node agent, which a transport starts there."""

    def __init__(self, transport: Transport) -> None:
        self.cluster, self.transport = transport.cluster, transport
        self.lock_file = transport.lock_file  # from which hosts get their Python environment
        self.client = AgentClient(transport)
        self._silent: set[str] = set()  # hosts that did not answer when the run had to stop
        self._notes: list[str] = []  # remarks for the user that ``notes`` hasn't returned yet

    @property
    def capabilities(self) -> Capabilities:
        return capabilities(self.cluster)

    def close(self) -> None:
        """Release what the transport holds on this computer."""
        self.transport.close()

    def registry(self, run_dir: Path) -> str:
        """Return the folder on a node in which its agents register what they run (``~`` is the node's).

        It is outside the run folder, which may be removed at any time. ``Path()``: for a request without a run.
        """
        return str(run_dir.parent / ".agents") if self.capabilities.shares_run_dir else f"{self.workdir}/agents"

    @property
    def workdir(self) -> str:
        return workdir_of(self.cluster)

    def probe(
        self,
        pack: PackSource | None,
        modules: Sequence[str] = (),
        warm: WarmEnvironment | None = None,
        *,
        gpu_s: float = agent_client.GPU_S,
    ) -> list[HostFacts]:
        """Return the facts of every host, in the cluster's order. Raises HostError: lists every host that failed.

        ``modules``: packages and modules whose versions are wanted. ``warm``: before a start, the environment of its
        ranks: hosts then start a warm parent, which imports torch meanwhile. ``gpu_s``: time limit of nvidia-smi.
        """
        self.transport.shares_connections, self._silent = True, set()
        if self.lock_file is not None and not self.transport.pythons:
            self.transport.pythons = self._interpreters(self.lock_file)
        request = agent_client.probe_request(self.cluster, pack, modules, self.registry(Path()), gpu_s, warm)
        asked_at, began = time.time(), time.monotonic()
        answers = self.client.demand("probe", request)
        # If this process was stopped meanwhile (Ctrl-Z), the measured time says nothing: the hosts had short_s.
        answered_s = min(time.monotonic() - began, self.client.short_s)
        # Later connections to hosts with a slow login get more time before they count as lost.
        self.transport.slow_s = max(self.client.slow_s, 1.5 * answered_s if answered_s > _USUAL_S else 0.0)
        answered_at = time.time()
        hosts_facts = []
        for host in self.cluster.hosts:
            facts = host_facts(host.label, answers[host.label].value or {})
            address, interface = networks.address_and_interface(host, facts.address, facts.interfaces)
            times = facts.times and facts.times._replace(controller_asked=asked_at, controller_answered=answered_at)
            hosts_facts.append(facts._replace(address=address, interface=interface, times=times))
        return hosts_facts

    def connect(self, facts: list[HostFacts]) -> tuple[list[HostFacts], str]:
        """Let all hosts connect to each other. Returns the facts with the addresses that worked, and a warning or ''.

        If the configuration chose no address and all hosts have InfiniBand, its addresses are tried first, then those
        that ssh used.
        """
        infiniband_facts = networks.over_infiniband(self.cluster.hosts, facts)
        if infiniband_facts is None:
            self.reach(facts)
            return facts, ""
        try:
            self.reach(infiniband_facts)
        except HostError as error:
            self.reach(facts)
            why = error.what.splitlines()[1].strip()  # of the first pair of hosts; line 0 is the heading
            return facts, (
                f"WARNING: the hosts have InfiniBand, but not all connect over it ({why}), so their addresses are "
                "those of ssh; cluster.interface= says which to take without a trial"
            )
        return infiniband_facts, ""

    def reach(self, facts: list[HostFacts]) -> None:
        """Let all hosts listen and connect to each other over TCP, at the addresses that the ranks will use.

        Raises HostError: names each host that another can't reach, the address, how that failed, and the fix.
        """
        if len(facts) == 1:
            return
        request = ReachRequest(
            nodes=tuple(networks.listeners(facts)),
            hello=secrets.token_hex(8),
            answer=secrets.token_hex(8),
            slow_s=self.client.slow_s,
        )
        timeout_s = self.client.short_s + _LISTENING_S
        answers = self.client.demand("checking that the hosts reach each other", request, timeout_s=timeout_s)
        failures = networks.unreached([answers[host.label].value or {} for host in self.cluster.hosts])
        if failures:
            raise networks.unreached_error(failures, facts)

    def environments(self, lock: LockFile) -> list[Environment]:
        """Return each host's environment of a lock file, in the cluster's order. Raises HostError."""
        request = FindEnvironmentRequest(self.workdir, lock.sha256)
        answers = self.client.demand("looking for the environment", request)
        return [Environment(host=host.label, **(answers[host.label].value or {})) for host in self.cluster.hosts]

    def _interpreters(self, lock: LockFile) -> dict[str, str]:
        """Return host label → the interpreter of its environment. Raises HostError: hosts that have none."""
        environments = self.environments(lock)
        if lacking := [environment.host for environment in environments if environment.python is None]:
            raise HostError(
                f"{', '.join(lacking)}: there is no environment of {lock.path.name} (cluster.environment_from)",
                hint="doit sync with the same words makes it",
                hosts=lacking,
            )
        return {environment.host: environment.python for environment in environments if environment.python is not None}

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[HostFacts], run_dir: Path) -> None:
        """Send files that hosts lack; start torchrun on all hosts. Raises HostError: a host failed, others may run."""
        if pack is not None:
            self.send_pack(pack, facts)
        registry, digest = self.registry(run_dir), pack.digest if pack else ""
        request = agent_client.start_request(self.cluster, plan, run_dir, digest, registry, self.client.slow_s)
        files = Payload(name="code and data", append=lambda stdin: append_run(stdin, run_dir))
        self.client.demand(
            "start", request, timeout_s=self.client.short_s + 20.0, payload=files if request.sends_files else None
        )

    def starting(self) -> str:
        """Return the progress of ``start`` for another thread, as words that follow "still"."""
        if self.capabilities.shares_run_dir:
            return "starting torchrun on the hosts"
        return self.client.transfer_progress() or "sending code and data to the hosts and starting torchrun there"

    def notes(self) -> list[str]:
        """Return new remarks for the user, a line each."""
        notes, self._notes = self._notes, []
        return notes

    def send_pack(self, pack: PackSource, facts: Sequence[HostFacts]) -> None:
        """Send the data pack to all hosts that lack it. Raises HostError: a host has no room, or did not get all."""
        lacking = [host for host, fact in zip(self.cluster.hosts, facts, strict=True) if fact.pack_path is None]
        if not lacking:
            return
        self.client.demand(
            "sending the data pack",
            PutPackRequest(self.workdir, pack.digest),
            hosts=lacking,
            payload=Payload(name="the data pack", append=lambda stdin: append(stdin, pack.path, ".")),
        )

    def standings(self, plan: LaunchPlan) -> dict[str, Answer]:
        """Ask each host whether its part of the plan still runs, or how it ended. Returns host label → ``Standing``."""
        return self.client.ask(StandingRequest(self._nodes(plan)))

    def _nodes(self, plan: LaunchPlan) -> tuple[NodeStart, ...]:
        return agent_client.nodes_of(plan, keeps_run_dir=self.capabilities.shares_run_dir)

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> Streams:
        """Stream all nodes' output and ends into ``emit`` (called from several threads).

        ``metrics_at``: bytes of metrics.jsonl that the controller has already; rank 0's host sends what follows.
        """
        hosts = {host.label: host for host in self.cluster.hosts}
        request = FollowRequest(
            run_id=plan.run_id,
            nodes=self._nodes(plan),
            sends_metrics=not self.capabilities.shares_run_dir,
            is_script=bool(plan.outputs.whole),
            access=self.transport.access,
        )
        connections, token = [self.connection(hosts[node.host]) for node in plan.nodes], new_token()

        @lru_cache(maxsize=1)  # nearly all streams begin at the same bytes
        def opening(log_bytes: int, metrics_bytes: int) -> bytes:
            offsets = request._replace(log_offset_bytes=log_bytes, metrics_offset_bytes=metrics_bytes)
            return message(offsets, token)

        # no network lies between this computer and itself that could break
        lease_s = 0.0 if self.capabilities.is_this_computer else plan.lease_s
        return Streams(connections, opening, emit, metrics_at, token, lease_s)

    def connection(self, host: Host) -> Connection:
        """Return a live connection to one host. Reconnecting opens a new ssh connection."""

        def again() -> list[str]:
            self.transport.shares_connections = False  # the shared connection may be the one that broke
            return self.transport.stream_argv(host)

        argv, slow_s = self.transport.stream_argv(host), max(self.client.slow_s, self.transport.starts_s)
        return Connection(host=host.label, argv=argv, again=again, slow_s=slow_s, silent_s=self.transport.silent_s)

    def stop(self, run_key: str, run_dir: Path, *, start: str = "") -> dict[str, str]:
        """End everything that runs for this key, on every host that answers. Returns host label → what went wrong.

        It takes a key instead of a plan, so that it also ends what a dead controller has left behind. ``start`` is the
        run id of a start that was given up: its command may still be on its way, so hosts refuse it from now on.
        """
        self.transport.shares_connections = False  # it must not hang with a connection that does
        prefix = journal.attempt_prefix(run_key, run_dir)
        request = StopRequest(prefix, self.registry(run_dir), refused_run_id=start)
        answers = self.client.ask(request, timeout_s=self.client.short_s + 8.0)
        failures = {
            host.label: self.transport.explain(host, answer)[0]
            for host in self.cluster.hosts
            if (answer := answers[host.label]).error is not None
        }
        survivors = {label: (answer.value or {}).get("survivors") for label, answer in answers.items()}
        self._silent = set(failures)
        return failures | {label: f"{NOT_ENDED}{', '.join(names)}" for label, names in survivors.items() if names}

    def outcome(self, plan: LaunchPlan) -> Outcome:
        """Return nothing: only the nodes know how an attempt ended."""
        return Outcome()

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """Fetch and verify rank 0's outputs into ``run_dir``, and the other nodes' own files into ``nodes/RANK``.

        If files of the other nodes can't be fetched, only ``notes`` says so. ``final``: the attempt has ended well;
        else only the files are fetched from which a later attempt resumes. Returns False if rank 0's outputs could not
        be fetched and are still on its host. Raises what ``downloads.receive`` raises.
        """
        if self.capabilities.shares_run_dir:
            return True
        hosts, first_host = {host.label: host for host in self.cluster.hosts}, plan.nodes[0].host
        sources = {
            node.host: Source(connection=self.connection(hosts[node.host]), node=node, access=self.transport.access)
            for node in self._nodes(plan)
        }
        others = {label: source for label, source in sources.items() if label not in self._silent}
        # After a good end the other nodes come first: the first node's summary.json marks the run as complete.
        if final and plan.outputs.others:
            self._notes += receive_others(plan, others, run_dir, final=True)
        received = receive(sources[first_host], run_dir, final=final, outputs=plan.outputs)
        self._notes += received.notes
        if received.is_complete and not final and plan.outputs.others:
            self._notes += receive_others(plan, others, run_dir, final=False)
        # A finished run needs no working directories any more; a pruned one does, as a later command may resume it.
        is_pruned = (run_dir / run_folder.PRUNED).exists()
        if received.is_complete and final and not is_pruned:
            for folder in [run_dir / "work", *run_dir.glob("nodes/*/work")]:
                shutil.rmtree(folder, ignore_errors=True)
        return received.is_complete

    def clean(self, plan: LaunchPlan) -> None:
        """Remove the attempt's own folders from the nodes; the data pack stays for later runs."""
        hosts = [host for host in self.cluster.hosts if host.label not in self._silent]
        if hosts:
            self.client.ask(CleanRequest(self._nodes(plan)), hosts=hosts)

    def remove_folders(self, unwanted: Sequence[tuple[HostFacts, Sequence[str]]]) -> dict[str, list[str]]:
        """Remove folders of attempts that are over, unless they are in use again. ``unwanted``: (host, folder names).

        Returns host label → the removed folders; a host that fails is left out.
        """
        labels = {fact.host for fact, _ in unwanted}
        hosts = [host for host in self.cluster.hosts if host.label in labels]
        folders = {fact.identity: tuple(names) for fact, names in unwanted}
        request = RemoveFoldersRequest(self.workdir, self.registry(Path()), folders)
        answers = self.client.ask(request, hosts=hosts) if hosts else {}
        return {
            label: list(answer.value["removed"])
            for label, answer in answers.items()
            if answer.value and answer.reported_error is None
        }
