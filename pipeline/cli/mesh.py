"""`doit mesh`: what it prints."""

from __future__ import annotations

from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import session
from pipeline.core.errors import UsageError
from pipeline.core.heartbeat import waiting
from pipeline.core.tables import counted


def mesh() -> None:
    """Make, check or undo ssh without a password among the hosts. Raises UsageError, HostError."""
    from pipeline.cluster import mesh as hosts

    options = session().asked.options
    check, undo = is_on(options, "check"), is_on(options, "undo")
    if check and undo:
        raise UsageError("check=1 and undo=1 exclude each other; give one of them")
    cluster = session().config.cluster
    if undo:
        with waiting(note, "taking back what doit mesh added"):
            undone = hosts.undo(cluster)
        for one in undone:
            key = ", and the key pair that was made there" if one.key_removed else ""
            say(f"{one.host}: removed {counted(one.keys, 'public key')} and {counted(one.hosts, 'host key')}{key}")
        hosts.demand_whole(undone)
        return
    with waiting(note, "trying ssh among the hosts"):
        made = hosts.check(cluster) if check else hosts.connect(cluster)
    say(hosts.table(made))
    for member in made.members:
        for warning in member.warnings:
            note(f"warning: {member.host}: {warning}")
        for name in member.conflicts:
            note(f"warning: {member.host}: its known_hosts has another key for {name}, which was left as it is")
    for line in hosts.only_exactly(made):
        note(f"warning: {line}")
    hosts.demand_all(made, checked_only=check)
    say(f"{counted(len(made.members), 'host')}, {counted(made.pairs, 'connection')} without a password: all work")
