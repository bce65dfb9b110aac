"""`doit clean hosts=1`: what attempts that are over have left on hosts, shown, asked about and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from pipeline.cli.cleaning import agreed
from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import session
from pipeline.cluster import launchers, leftover
from pipeline.core.errors import UsageError
from pipeline.core.heartbeat import waiting
from pipeline.core.tables import aligned, counted, file_size


def clean_hosts(options: Mapping[str, str]) -> None:
    """Raises UsageError: words that choose runs, or a cluster without such hosts. HostError: a host can't be asked."""
    config = session().config
    other = [name for name in options if name not in ("hosts", "yes")]
    if other:
        raise UsageError(f"{other[0]}={options[other[0]]} chooses runs, and hosts=1 is about what lies on hosts")
    if launchers.capabilities(config.cluster).shares_run_dir:
        raise UsageError(
            "hosts=1 needs a cluster whose hosts have folders of their own", hint="doit clean hosts=1 cluster=two_node"
        )
    with closing(launchers.create(config.cluster)) as launcher:
        with waiting(note, "asking the hosts"):
            facts = launcher.probe(None)
        found = [(left, leftover.why_stays(left, config.runs_dir)) for left in leftover.of(facts)]
        going = [left for left, why in found if not why]
        for left, why in found:
            if why:
                say(f"{left.host}: {left.name} stays: {why}")
        if not going:
            say(f"nothing to remove on {', '.join(fact.host for fact in facts)}")
            return
        say(_table(going))
        amount = f"what was left of {counted(len(going), 'attempt')}, {file_size(sum(left.bytes for left in going))}"
        if is_on(options, "yes") or agreed(amount):
            with waiting(note, "removing it"):
                lines = leftover.clear(launcher, facts, config.runs_dir)
            for line in lines or ["it is in use again, so nothing was removed"]:
                say(line)


def _table(going: Sequence[leftover.Left]) -> str:
    rows = [("host", "attempt", "unused for", "frees")]
    rows += [(left.host, left.name, leftover.ago(left.idle_s), file_size(left.bytes)) for left in going]
    return aligned(rows)
