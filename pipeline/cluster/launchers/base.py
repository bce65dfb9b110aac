"""What a launcher is to the launch loop: its verbs, and what it can do as data (``Capabilities``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pipeline.cluster.launchers.answers import Answer
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.core.specs import TRAINING_OUTPUTS, Cluster, Event, Host, LaunchPlan, NodeFacts, Outputs

NOT_ENDED = "could not be ended there: "
"""How a host's answer to ``stop`` begins when it was reached and something of the run lives all the same."""


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """The data pack as the controller holds it: where, and the digest that names it on every node.

    ``inside`` is what of it a script is given as {data}, {data2}, …
    """

    path: Path
    digest: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """What one attempt runs, before a host was asked.

    ``run_dir`` is absolute and holds config.json and code/; ``run_key`` names the run on the hosts, ``attempt`` counts
    from 1. ``trainer`` is the module that each rank runs, or, where there is a ``script`` (its path in the snapshot, ''
    for another program), the one that starts torchrun with it on each node, or without ``uses_torchrun`` the script
    alone; ``project`` is the checkout that it is of.
    ``pack`` is None for what needs no data. ``outputs`` are what rank 0 leaves.
    ``versions`` are those of the run's key (empty: it has none); a host that has others is refused. ``is_restart``: the
    same command has had the hosts before, so where they are busy now it waits. ``replaceable``: another host
    would take the place of one that can't be reached, so its ranks' lease isn't waited for.
    """

    run_dir: Path
    run_key: str
    attempt: int
    trainer: str
    pack: PackSource | None = None
    outputs: Outputs = TRAINING_OUTPUTS
    versions: Mapping[str, str] = field(default_factory=dict)
    is_restart: bool = False
    replaceable: bool = False
    script: str | None = None
    project: str = ""
    uses_torchrun: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Absolute paths on one node: the run folder, the data pack, and the agent's own files."""

    run_dir: str
    data_dir: str
    state_dir: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launcher knows of an attempt's bad end that its nodes could not tell.

    ``text`` is put behind the nodes' own words, ``hint`` says what helps. ``cause`` is a TrainingError's ('': as the
    nodes' ends tell). ``again``: the scheduler took the hosts away and will grant others, so the attempt goes on.
    """

    text: str = ""
    hint: str | None = None
    cause: str = ""
    again: bool = False


class Following(Protocol):
    """The live streams of one attempt."""

    def stop(self) -> None:
        """Ask every node that still answers to end its part; returns at once, NodeExit events follow."""
        ...

    def prune(self) -> None:
        """Ask rank 0 to end the run at the next end of an epoch; returns at once. For launchers that send files."""
        ...

    def look(self, peers: Sequence[tuple[str, int]] | None = ()) -> None:
        """Ask every node how its ranks are (None: without their stacks), or only whether the ssh servers ``peers``
        answer it; NodeLook events follow."""
        ...

    def close(self) -> None:
        """End the streams (not the training)."""
        ...


class Launcher(Protocol):
    """Carries a rendered plan out on the hosts of one cluster.

    Why these verbs and no more: the loop (pipeline.cluster.attempt) decides what happens when; a launcher only
    reaches hosts. ``probe`` and ``place`` are apart from ``start`` because the plan between them is pure
    data that is checked and written down before any effect. ``ask`` is for preflight, whose questions no launcher
    has to know. ``follow`` is apart from ``start`` because a stream may break while training goes on. ``stop`` takes a
    run key and not a plan, so that it also ends what an earlier controller, which died, has left behind. ``grant`` and
    ``outcome`` are for hosts that a batch scheduler gives and takes away.
    """

    cluster: Cluster

    @property
    def capabilities(self) -> Capabilities:
        """Those of its settings."""
        ...

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> Cluster:
        """Wait for the hosts of this attempt; the cluster with their names. Other launchers have them already.

        Args:
            modules: names to look for among what is installed there, as ``probe`` has them.
            say: told what was asked for, and what the person should know while it waits.
            check: called several times a second; raises when a signal wants the end.

        Raises:
            HostError: the hosts are refused, or can't be had.
        """
        return self.cluster

    def beside(self, first: Launcher, count: int) -> None:
        """Told before it is asked for hosts that ``count`` launchers of its kind serve trials side by side; ``first``
        is the same one for all of them."""
        return

    def submission(self, spec: AttemptSpec) -> str:
        """What a batch scheduler is given, as text; pure, before anything is asked for. '' for other launchers."""
        return ""

    def rehearse(self) -> list[str]:
        """What can be told of hosts that a scheduler would grant, a line each, without asking for any.

        Raises HostError: they would be refused.
        """
        return []

    def probe(
        self, pack: PackSource | None, modules: Sequence[str] = (), warm: Mapping[str, Any] | None = None
    ) -> list[NodeFacts]:
        """Facts of every host, in the cluster's order.

        Args:
            modules: names to look for among what is installed there.
            warm: where a start is to follow, the environment of its ranks (``plan.warm_environment``): a warm parent
                imports torch meanwhile.

        Raises:
            HostError: lists every host that failed.
        """
        ...

    def ask(
        self, request: dict[str, Any], *, hosts: Sequence[Host] | None = None, timeout_s: float | None = None
    ) -> dict[str, Answer]:
        """One request to the node agents of ``hosts`` (None: all) at once, for a question that preflight has beside
        the probe's; never raises for a host. A launcher without agents answers for none.

        Args:
            request: ``do`` names the command (``agent/main.py``), the rest is its own.
            timeout_s: None: that of a short command.
        """
        return {}

    def reach(self, facts: list[NodeFacts]) -> None:
        """Let all hosts connect to each other over TCP at their addresses, as ranks will. One host has nobody to reach.

        Raises HostError: names each host that another can't reach, the address, how that failed, and what mends it.
        """

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        """Where this host keeps the run. Pure. No pack (a diagnosis without data): ``data_dir`` is empty."""
        ...

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[NodeFacts], run_dir: Path) -> None:
        """Send what is missing, start torchrun on all nodes at once. Raises HostError: some may have started."""
        ...

    def notes(self) -> list[str]:
        """What the person should know of how ``start`` did that, in lines; each is told once."""
        return []

    def starting(self) -> str:
        """What ``start`` is at, for who waits (asked from another thread): words that follow "still"."""
        return "starting torchrun on the hosts"

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> Following:
        """Stream all nodes' output and ends into ``emit`` (called from several threads).

        ``metrics_at``: bytes of metrics.jsonl that the controller has already, from which rank 0 goes on.
        """
        ...

    def outcome(self, plan: LaunchPlan) -> Outcome:
        """After a bad end: what else is known of it. Waits until a scheduler has decided what becomes of the job."""
        return Outcome()

    def stop(self, run_key: str, run_dir: Path, *, bar: str = "") -> dict[str, str]:
        """End everything that runs for this key, on every host that answers. Host label → what went wrong.

        ``bar`` is a run id that may not start any more: its start command may still be on its way.
        """
        ...

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """Bring rank 0's outputs (``plan.outputs``) into ``run_dir``, verified, whole. Raises TrainingError.

        Not ``final``: only what a later attempt resumes from; raises nothing. False: it could not be had and lies
        there still.
        """
        ...

    def clean(self, plan: LaunchPlan) -> None:
        """Remove the attempt's own folders from the nodes; the data pack stays for later runs."""
        ...

    def clear(self, unwanted: Sequence[tuple[NodeFacts, Sequence[str]]]) -> dict[str, list[str]]:
        """Remove named folders of attempts that are over; host label → those that are gone. Raises nothing for a host.

        For launchers that send files. What is in use again stays.
        """
        return {}

    def close(self) -> None:
        """Give back what the launcher holds here (connections, folders)."""
        ...
