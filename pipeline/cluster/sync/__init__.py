"""Bring files, data packs and environments to all hosts before a run (`doit sync`).

Compare by digests, send the differences, compare again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.agent.host import trees
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import Environment, LockFile, PackSource
from pipeline.cluster.launchers.transport.answers import Answer
from pipeline.cluster.launchers.transport.host_errors import ssh_command
from pipeline.cluster.launchers.transport.uploads import NOT_SENT, Transfer
from pipeline.cluster.sync import rsync
from pipeline.cluster.sync.rsync import Folder, folders
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import some_names

__all__ = ["Folder", "Tree", "TreeState", "compare", "compare_pack", "ensure", "folders", "remote", "send", "tree_of"]

_HASHED_BYTES_PER_S = 20e6  # a slower host counts as one that doesn't answer


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The files that the hosts should have, by their names below ``place``."""

    name: str
    place: str
    files: Mapping[str, trees.Entry]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.files.values())

    @property
    def sha256(self) -> str:
        return trees.tree_digest(self.files)


@dataclass(frozen=True, kw_only=True)
class TreeState:
    """The state of one tree on one host.

    Attributes:
        differ: number of files that are absent or different there; ``named`` are some of their names.
        absent: number of files that are absent there.
        more: number of files that exist only there; ``more_named`` are some of their names.
        in_the_way: files where folders belong, and folders where files belong.
        sha256: digest of the wanted files as they are there.
    """

    host: str
    tree: Tree
    place: str
    differ: int
    absent: int
    named: tuple[str, ...]
    more: int
    more_named: tuple[str, ...]
    in_the_way: tuple[str, ...]
    sha256: str


def remote(cluster: Cluster) -> AgentLauncher:
    """Return a launcher that reaches its hosts over ssh, to be closed by the caller. Raises UsageError, HostError."""
    launcher = launchers.create(cluster)
    if isinstance(launcher, AgentLauncher) and launcher.transport.remote_shell(cluster.hosts[0]):
        return launcher
    shares = launcher.capabilities.shares_run_dir
    launcher.close()
    raise UsageError(
        f"doit sync brings files to hosts over ssh, and cluster.launcher={cluster.launcher} "
        + ("lets ranks read files of this computer or a shared folder" if shares else "reaches hosts in another way"),
        hint="cluster=pssh cluster.hostfile=FILE, or cluster=two_node after doit lab --hosts 2",
    )


def tree_of(folder: Folder) -> Tree:
    """Return the tree of a folder on this computer. Raises UsageError: a file can't be read."""
    try:
        files = trees.listing(str(folder.source))
    except OSError as error:
        raise UsageError(f"{error.filename or folder.source} can't be read: {error.strerror}") from error
    except SystemExit as error:
        raise UsageError(f"{error}, so it can't be copied to the hosts") from error
    return Tree(name=folder.name, place=folder.place, files=files)


def compare(launcher: AgentLauncher, wanted: Sequence[Tree], hosts: Sequence[Host] | None = None) -> list[TreeState]:
    """Return the state of each tree on each host. Raises HostError: a host doesn't answer, or can't read its files."""
    request: dict[str, Any] = {
        "do": "compare_trees",
        "trees": [{"place": tree.place, "files": tree.files} for tree in wanted],
    }
    timeout_s = launcher.short_s + sum(tree.total_bytes for tree in wanted) / _HASHED_BYTES_PER_S
    hosts = launcher.cluster.hosts if hosts is None else hosts
    values = launcher.demand("comparing", launcher.ask(request, hosts=hosts, timeout_s=timeout_s))
    return [
        _state_of(host.label, tree, answer)
        for host in hosts
        for tree, answer in zip(wanted, values[host.label]["trees"], strict=True)
    ]


def _state_of(host: str, tree: Tree, answer: Mapping[str, Any]) -> TreeState:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()
    }
    return TreeState(host=host, tree=tree, **fields)


def compare_pack(launcher: AgentLauncher, pack: PackSource, facts: Sequence[NodeFacts]) -> list[TreeState]:
    """Return the state of a data pack on each host, where the probe found it. Raises HostError."""
    listed = trees.listing(str(pack.path))
    files = {name: entry for name, entry in listed.items() if name != NOT_SENT}
    states: list[TreeState] = []
    for place in dict.fromkeys(fact.pack_path for fact in facts):
        there = {fact.host for fact in facts if fact.pack_path == place}
        path = place or f"{launcher.workdir}/data/{pack.digest}"
        tree = Tree(name=f"data pack {pack.digest[:12]}", place=path, files=files)
        hosts = [host for host in launcher.cluster.hosts if host.label in there]
        states += [
            replace(one, more=0) for one in compare(launcher, [tree], hosts)
        ]  # a host's pack also has stamps.json
    return states


def send(launcher: AgentLauncher, folders: Sequence[Folder], *, delete: bool, heartbeat: Heartbeat) -> list[TreeState]:
    """Send each host the files that differ there, several hosts at once, and return the states afterwards.

    Args:
        delete: also remove files there that the folder here doesn't have.
        heartbeat: takes the current activity, and a line with bytes and speed of each host.

    Raises:
        UsageError: a file on this computer can't be read.
        HostError: a host doesn't answer, has no rsync, or has no space left.
    """
    heartbeat.doing("hashing the files here")
    wanted = [tree_of(folder) for folder in folders]
    heartbeat.doing("comparing what the hosts have")
    before = compare(launcher, wanted)
    stale = {(state.host, state.place) for state in before if state.differ or (delete and state.more)}
    if not stale:
        return before
    if not delete:
        _refuse_to_replace(before)
    hosts = [host for host in launcher.cluster.hosts if host.label in {label for label, _ in stale}]
    places = _places(launcher, folders, hosts, delete=delete)
    copies = [
        rsync.Copy(host=host, folder=folder, place=place, shell=launcher.transport.remote_shell(host))
        for host in hosts
        for folder, place in zip(folders, places[host.label], strict=True)
        if (host.label, place) in stale
    ]
    _rsync(copies, wanted=wanted, delete=delete, heartbeat=heartbeat)
    for state in before:
        if delete and state.more:
            names = some_names(state.more_named, state.more)
            heartbeat(f"{state.host}: removed from {state.place} what isn't here: {names}")
    heartbeat.doing("hashing what the hosts have")
    return compare(launcher, wanted)


def _rsync(copies: Sequence[rsync.Copy], *, wanted: Sequence[Tree], delete: bool, heartbeat: Heartbeat) -> None:
    """Run the copies. Raises HostError."""
    if not copies:
        return
    sizes, total, arrived = {tree.name: tree.total_bytes for tree in wanted}, Counter[str](), dict[str, Counter[str]]()
    for copy in copies:
        total[copy.host.label] += sizes[copy.folder.name]
        arrived[copy.host.label] = Counter()
    transfer = Transfer("files", [*arrived], max(total.values()))

    def on_bytes(host: str, name: str, count_bytes: int) -> None:
        arrived[host][name] = count_bytes

    def progress() -> str:
        return transfer.text({host: of.total() for host, of in arrived.items()}, time.monotonic())

    heartbeat.doing(progress)
    failures = rsync.copy_all(copies, delete=delete, on_bytes=on_bytes)
    heartbeat(progress())
    if failures:
        rows = [f"  {host}: {why}" for host, why in failures.items()]
        raise HostError("\n".join(["not everything could be sent:", *rows]), hint="the same command, which goes on")


def _refuse_to_replace(before: Sequence[TreeState]) -> None:
    """Raise HostError if something there would have to be removed, which only delete=1 allows."""
    rows = [f"  {state.host}: in {state.place}: {some_names(state.in_the_way)}" for state in before if state.in_the_way]
    if rows:
        head = "there are files where folders belong, or folders where files belong, and nothing is removed unasked:"
        raise HostError("\n".join([head, *rows]), hint="move them away there; or delete=1, which removes them")


def _places(
    launcher: AgentLauncher, folders: Sequence[Folder], hosts: Sequence[Host], *, delete: bool
) -> dict[str, list[str]]:
    """Make the place of each folder on each host and return the paths. Raises HostError, also if rsync is missing."""
    places = [{"place": one.place, "is_file": one.is_file} for one in folders]
    request = {"do": "make_places", "delete": delete, "places": places}
    values = launcher.demand("making room", launcher.ask(request, hosts=hosts))
    lacking = [host.label for host in hosts if not values[host.label]["rsync"]]
    if lacking:
        raise HostError(
            f"{', '.join(lacking)}: there is no rsync, which doit sync needs on both sides",
            hint="there: sudo apt-get install rsync (Debian, Ubuntu), or sudo dnf install rsync (Fedora)",
        )
    return {host.label: list(values[host.label]["places"]) for host in hosts}


_INSTALL_TIMEOUT_S = 7200.0


def ensure(launcher: AgentLauncher, lock: LockFile, heartbeat: Heartbeat) -> list[Environment]:
    """Make the environments that are missing (completely or not at all), and return those of all hosts.

    Raises:
        HostError: names the hosts that failed, the installer's last lines, and the command that repeats it.
    """
    heartbeat.doing("looking for the environment")
    environments = launcher.environments(lock)
    lacking = [one.host for one in environments if one.python is None]
    if not lacking:
        return environments
    wheelhouse = None
    if lock.wheelhouse is not None:
        wheelhouse = f"{launcher.workdir}/wheelhouse"
        folder = Folder(name="wheelhouse", source=lock.wheelhouse.resolve(), place=wheelhouse)
        send(launcher, [folder], delete=False, heartbeat=heartbeat)
    _make(launcher, lock, wheelhouse, lacking, heartbeat)
    return launcher.environments(lock)


def _make(
    launcher: AgentLauncher, lock: LockFile, wheelhouse: str | None, lacking: Sequence[str], heartbeat: Heartbeat
) -> None:
    """Let hosts make their environments. Raises HostError if one failed."""
    count = len(re.findall(r"^[A-Za-z0-9]", lock.text, re.MULTILINE))  # includes packages for other systems

    def so_far() -> str:
        arrived = launcher.arrived(lacking)
        each = ", ".join(f"{label} {arrived.get(label, 0)}" for label in lacking)
        return f"making the environment, of at most {count} packages: {each}"

    def explained(host: Host, answer: Answer) -> tuple[str, str | None]:
        if answer.value is None or "repeat" not in answer.value:
            return launcher.transport.explain(host, answer)
        repeat = str(answer.value["repeat"]).replace("'", "'\\''")
        return str(answer.reported_error), f"{ssh_command(host, launcher.cluster.ssh_config)} '{repeat}'"

    heartbeat.doing(so_far)
    hosts = [host for host in launcher.cluster.hosts if host.label in lacking]
    request = {"do": "make_environment", "workdir": launcher.workdir, "wheelhouse": wheelhouse, "lock": lock.text}
    answers = launcher.ask({**request, **lock.request}, hosts=hosts, timeout_s=_INSTALL_TIMEOUT_S)
    rows, hints = launcher.failures(answers, explained)
    if rows:
        what = f"the environment could not be made on {len(rows)} of {launcher.cluster.nnodes} hosts"
        raise HostError("\n".join([what, *rows]), hint=hints[0] if hints else None)
