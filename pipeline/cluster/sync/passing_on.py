"""Folders that go to several hosts: one is sent them from here, the others get their bytes from that one.

rsync looks at the others afterwards all the same: times, rights, links and what is to be removed are its part, and so
is a host that no other could serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.agent.trees import Entry
from pipeline.cluster.launchers import relaying
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.sync.rsync import Copy
from pipeline.core.specs import NodeFacts

AT_LEAST_BYTES = 8 << 20  # what less would cross the link more than once is no reason to ask the hosts once more


@dataclass(frozen=True, kw_only=True)
class Passing:
    """A folder that ``source`` has, or is sent first, and the copies of those that are served by it."""

    source: str
    source_place: str
    copies: tuple[Copy, ...]

    @property
    def name(self) -> str:
        """The folder's, as a person named it."""
        return self.copies[0].folder.name


def split(
    copies: Sequence[Copy], holders: Mapping[str, tuple[str, str]], saved_bytes: Mapping[str, int]
) -> tuple[list[Copy], list[Passing]]:
    """What is to be sent from here at once, and what a host passes on then.

    Args:
        holders: folder's name → a host that has all of it already, and where.
        saved_bytes: folder's name → how much would cross this computer's link again.
    """
    first: list[Copy] = []
    later: list[Passing] = []
    for name in dict.fromkeys(copy.folder.name for copy in copies):
        of = [copy for copy in copies if copy.folder.name == name]
        if saved_bytes[name] < AT_LEAST_BYTES:
            first += of
            continue
        if name not in holders:
            first.append(of[0])
        source = holders.get(name) or (of[0].host.label, of[0].place)
        served = tuple(copy for copy in of if copy.host.label != source[0])
        later.append(Passing(source=source[0], source_place=source[1], copies=served))
    return first, later


def pass_on(
    launcher: AgentLauncher,
    one: Passing,
    files: Mapping[str, Entry],
    lacking: Mapping[str, Sequence[str]],
    facts: Sequence[NodeFacts],
) -> list[str]:
    """Let the source serve the hosts of ``lacking`` (label → names that differ there), each getting what any of them
    lacks; a line for each reason why some could not be served."""
    names = sorted({name for some in lacking.values() for name in some if files[name][0] != "link" and files[name][1]})
    if not names:
        return []
    known = {fact.host: fact for fact in facts}
    places = {one.source: one.source_place, **{copy.host.label: copy.place for copy in one.copies}}
    hosts = [one.source, *lacking]
    told = [_file(one, name, files[name]) for name in names]
    nodes, rows = [known[host] for host in hosts], [{"place": _folder(one, places[host])} for host in hosts]
    unserved = relaying.relay(launcher, {"do": "relay_files"}, told, nodes, rows, what=one.name)
    return relaying.notes(one.name, one.source, unserved)


def _file(one: Passing, name: str, entry: Entry) -> dict[str, Any]:
    alone = one.copies[0].place.rpartition("/")[2] if name == "." else name
    return {"name": alone, "bytes": entry[1], "sha256": entry[2]}


def _folder(one: Passing, place: str) -> str:
    """What the files' names are relative to."""
    return place.rpartition("/")[0] if one.copies[0].folder.is_file else place
