"""The hosts connect to each other before anything is started on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cluster import networks
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, NodeFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher


def connected(launcher: Launcher, cluster: Cluster, facts: list[NodeFacts]) -> tuple[list[NodeFacts], str]:
    """Let all hosts connect to each other; the facts with the addresses that did, and what is remarkable about that.

    Where the configuration chose none and all have InfiniBand, its addresses are tried before those of ssh. Hosts that
    a batch scheduler grants can't be tried (their launcher's ``reach`` does nothing), so they keep their addresses.

    Raises:
        HostError: names who can't reach whom.
    """
    tried = not launcher.capabilities.hosts_are_granted
    fast = networks.over_infiniband(cluster.hosts, facts) if tried else None
    if fast is not None:
        try:
            launcher.reach(fast)
        except HostError as error:
            launcher.reach(facts)
            why = error.what.splitlines()[1].strip()
            return facts, (
                f"WARNING: the hosts have InfiniBand, but not all connect over it ({why}), so their addresses are "
                "those of ssh; cluster.interface= says which to take without a trial"
            )
        return fast, ""
    launcher.reach(facts)
    return facts, ""
