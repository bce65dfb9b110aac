"""The hosts of a cluster: their launcher and their answers to its probe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster import launchers, left_folders, preflight
from pipeline.cluster.agent.requests import WarmEnvironment
from pipeline.cluster.launchers.base import AttemptSpec, PackSource
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.core import places
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.keys import rank_environment
from trainers.contract.host_facts import HostFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher


class Hosts:
    """The hosts of a cluster and their answers to the probe, kept from one attempt to the next.

    Attempts may overlap: one starts while an earlier one still collects its outputs.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._launcher: Launcher | None = None
        self._facts: list[HostFacts] = []
        self._pack: PackSource | None = None
        self._modules: frozenset[str] = frozenset()
        self._ports: list[int] = []
        self._connected = False  # whether all hosts have connected to each other
        self._network_note = ""
        self._reported: set[str] = set()
        self._checks: list[preflight.Check] | None = None

    @property
    def launcher(self) -> Launcher:
        """The launcher, created on first use. Raises HostError."""
        if self._launcher is None:
            self._launcher = launchers.create(self.cluster)
        return self._launcher

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Wait until a scheduler grants the hosts of one attempt, if the cluster has one. Raises HostError."""
        if isinstance(self.launcher, GrantedLauncher):
            self.cluster = self.launcher.grant(spec, modules, say, check)
            self.forget_facts()

    def give_back(self, spec: AttemptSpec) -> None:
        """Return granted hosts to the scheduler."""
        if isinstance(self._launcher, GrantedLauncher):
            self._launcher.stop(spec.run_key, spec.run_dir)

    def facts(
        self, pack: PackSource | None, modules: Collection[str] = (), warm: WarmEnvironment | None = None
    ) -> list[HostFacts]:
        """Return the facts of each host.

        Probe again for another pack or more modules, and as long as a host lacks the pack (a start sends it).

        Args:
            pack: the data that the attempt needs (None: none).
            modules: distributions and modules whose installed versions to report.
            warm: environment of the ranks, to start a warm parent.

        Raises:
            HostError: a host doesn't answer.
        """
        lacking = pack is not None and any(not fact.pack_path for fact in self._facts)
        if not self._facts or self._pack != pack or lacking or not self._modules.issuperset(modules):
            self._modules |= frozenset(modules)
            self._facts, self._pack = self.launcher.probe(pack, sorted(self._modules), warm), pack
            self._checks = None
            self._ports = [*self._facts[0].free_ports]
            self._connected = False
        return self._facts

    def clear_leftovers(self, runs_dir: Path) -> list[str]:
        """Remove folders of old attempts that no run needs, once after each probe; return lines about what was removed.

        ``runs_dir``: the project's runs.
        """
        lines = left_folders.clear(self.launcher, self._facts, runs_dir)
        self._facts = [fact._replace(left_folders=()) for fact in self._facts]
        return lines

    def connected(self) -> list[HostFacts]:
        """Return the facts with the network over which all hosts reach each other, tried once after each probe.

        Raises HostError that names which host can't reach which.
        """
        if not self._connected:
            self._facts, self._network_note = self.launcher.connect(self._facts)
            self._connected = True
        return self._facts

    def checks(self) -> list[preflight.Check]:
        """Return the checks that precede every training, of the last answers."""
        if self._checks is None:
            # a single node needs none: its start shows what it lacks
            self._checks = preflight.judge(self.cluster, self._facts) if self.cluster.nnodes > 1 else []
        return self._checks

    def ports(self) -> list[int]:
        """Return ports that were free on node 0; each call starts with another one."""
        self._ports = [*self._ports[1:], *self._ports[:1]]
        return self._ports

    def notes(self, plan: LaunchPlan, facts: Sequence[HostFacts]) -> list[str]:
        """Return remarks about the hosts' shells, checks and network that were not returned before."""
        shell = "this shell" if self.launcher.capabilities.shares_run_dir else "the login shell there"
        seen = {fact.host: _without_own_paths(fact.dropped_variables) for fact in facts}
        lines = [
            *filter(None, [self._network_note]),
            *rank_environment.left_behind(seen, whose=shell),
            *preflight.warnings(self.checks()),
        ]
        new = [line for line in lines if line not in self._reported]
        self._reported.update(new)
        return new

    def forget_facts(self) -> None:
        """Drop the answers, which a failure may have made outdated."""
        self._facts = []

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()


def _without_own_paths(variables: Mapping[str, str]) -> dict[str, str]:
    """Drop a PYTHONPATH that only makes Paceline or the project importable, because a run has copies of both."""
    ours = {("PYTHONPATH", str(folder)) for folder in (places.HOME, places.ROOT)}
    return dict(variables.items() - ours)
