"""`doit sync`: what it prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pipeline.cli.invocation import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, session
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.processes.signals import Interruptible
from pipeline.core.tables import counted, file_size, some_names

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher
    from pipeline.cluster.launchers.base import PackSource
    from pipeline.cluster.sync import Folder, TreeState


def sync() -> None:
    """Bring data pack, files and folders to the hosts, or tell what differs there. Raises UsageError, HostError."""
    from pipeline.cluster import sync as hosts

    asked = session().asked
    check, delete = is_on(asked.options, "check"), is_on(asked.options, "delete")
    if delete and not asked.paths:
        raise UsageError("delete=1 is about folders, and none is named", hint="doit sync cluster=… delete=1 PATH")
    cluster = session().config.cluster.with_spares
    with _ending_children(), closing(hosts.remote(cluster)) as launcher:
        named = hosts.folders(asked.paths, to=asked.options.get("to"), workdir=launcher.workdir, root=ROOT)
        wants_pack = is_on({"data": "1", **asked.options}, "data")
        if not (wants_pack or named or launcher.environment):
            raise UsageError("data=0 leaves nothing to bring: name files or folders")
        pack = _pack(fetches=not check) if wants_pack else None
        with Heartbeat(note) as heartbeat:
            lacking = _environments(launcher, check, heartbeat) if launcher.environment else []
            heartbeat.doing("asking the hosts")
            found = (_compared if check else _brought)(launcher, pack, named, delete, heartbeat)
    for one in found:
        say(line(one, removed=delete))
    _demand_equal(found, lacking, checked_only=check, delete=delete)


@contextmanager
def _ending_children() -> Iterator[None]:
    """A signal comes as an exception, so that what was started (rsync, pssh) ends with this command."""
    with Interruptible() as signals:
        signals.left = "; what has arrived is kept, and the same command continues"
        yield


def _environments(launcher: AgentLauncher, check: bool, heartbeat: Heartbeat) -> list[str]:
    """Make those that are missing, unless only to ``check``; the hosts that have none then."""
    from pipeline.cluster import sync as hosts

    lock = launcher.environment
    assert lock is not None
    environments = launcher.environments(lock) if check else hosts.ensure(launcher, lock, heartbeat)
    for one in environments:
        state = "absent" if one.python is None else f"ok, Python {one.python_version}"
        heartbeat(f"{one.host}: environment of {lock.path.name} in {one.place}: {state}")
    lacking = [one.host for one in environments if one.python is None]
    if lacking:
        launcher.environment = None  # the rest is asked of the hosts' own interpreters
    return lacking


def _pack(*, fetches: bool) -> PackSource | None:
    """The data pack, fetched where it isn't here; None where it isn't to be fetched."""
    from pipeline.cli import commands
    from pipeline.cluster.launchers.base import PackSource
    from pipeline.data.trees import Tree

    current = session()
    if current.pack is None and fetches:
        commands.fetch()
    if current.pack is None:
        say("the data pack isn't here yet: doit fetch, or doit sync without check=1")
        return None
    if current.pack.path is None:  # a script that names no data
        return None
    if isinstance(current.pack, Tree):
        current.pack.lay_down()
    return PackSource(path=current.pack.path.resolve(), digest=current.pack.digest)


def _compared(
    launcher: AgentLauncher, pack: PackSource | None, named: Sequence[Folder], delete: bool, heartbeat: Heartbeat
) -> list[TreeState]:
    from pipeline.cluster import sync as hosts

    facts = launcher.probe(pack)
    heartbeat.doing("comparing what the hosts have")
    found = hosts.compare_pack(launcher, pack, facts) if pack is not None else []
    return found + (hosts.compare(launcher, list(map(hosts.tree_of, named))) if named else [])


def _brought(
    launcher: AgentLauncher, pack: PackSource | None, named: Sequence[Folder], delete: bool, heartbeat: Heartbeat
) -> list[TreeState]:
    from pipeline.cluster import sync as hosts

    found: list[TreeState] = []
    if pack is not None:
        facts = launcher.probe(pack)
        heartbeat.doing(launcher.starting)
        if any(fact.pack_path is None for fact in facts):
            launcher.send_pack(pack, facts)
            facts = launcher.probe(pack)
        heartbeat.doing("hashing the data pack")
        found += hosts.compare_pack(launcher, pack, facts)
    if named:
        found += hosts.bring(launcher, named, delete=delete, heartbeat=heartbeat)
    return found


def line(found: TreeState, *, removed: bool) -> str:
    """What one host has of one folder."""
    count = len(found.tree.files)
    whole = f"{counted(count, 'file')}, {file_size(found.tree.total_bytes)}"
    where = f"{found.host}: {found.tree.name} in {found.place}"
    more = ""
    if found.more:
        more = f"; {counted(found.more, 'file')} more there ({some_names(found.more_named, found.more)})"
        more += "" if removed else ", which delete=1 would remove"
    if not found.differ:
        return f"{where}: ok, {whole}, sha256 {found.sha256[:16]}{more}"
    if found.absent == count:
        return f"{where}: absent, {whole}{more}"
    if found.named == (".",):  # a single file
        return f"{where}: another one, {whole}"
    return f"{where}: {found.differ} of {whole} differ ({some_names(found.named, found.differ)}){more}"


def _demand_equal(found: Sequence[TreeState], lacking: Sequence[str], *, checked_only: bool, delete: bool) -> None:
    """Raises HostError where a host lacks something, or has more than ``delete`` allows.

    Args:
        lacking: hosts that have no environment.
    """
    other = [one.host for one in found if one.differ or (delete and one.more)]
    hosts: Mapping[str, None] = dict.fromkeys([*lacking, *other])
    if not hosts:
        return
    if checked_only:
        what = f"{', '.join(hosts)}: not everything is there as it is here"
        raise HostError(what, hint="the same command without check=1 brings it")
    what = f"{', '.join(hosts)}: what was brought isn't what is here any more"
    raise HostError(what, hint="the same command, while nothing changes these files here or there")
