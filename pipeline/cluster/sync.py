"""Bring files, data packs and environments to all hosts before a run (`doit sync`).

Compare by digests, send the differences by rsync over the launcher's ssh, compare again.
"""

from __future__ import annotations

import os
import platform
import re
import selectors
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.agent.host import trees
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import Environment, LockFile, PackSource
from pipeline.cluster.launchers.transport.answers import Answer
from pipeline.cluster.launchers.transport.host_errors import ssh_command
from pipeline.cluster.launchers.transport.uploads import NOT_SENT, Transfer
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes import process
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import some_names

_HASHED_BYTES_PER_S = 20e6  # a slower host counts as one that doesn't answer


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder or file: ``source`` on this computer (absolute), ``place`` on the hosts (absolute, or below ``~/``)."""

    name: str
    source: Path
    place: str

    @property
    def is_file(self) -> bool:
        return not self.source.is_dir()


def folders(words: Sequence[str], *, to: str | None, workdir: str, root: Path) -> list[Folder]:
    """Return the folders that ``words`` name; each goes to ``to``/NAME, or to ``workdir``/folders/NAME.

    ``root``: start of relative paths. Raises UsageError: no such file or folder, two with the same name, or ``to``
    isn't absolute.
    """
    if to is not None and (not to.startswith("/") or ".." in to.split("/")):
        raise UsageError(f"to={to} must be an absolute folder on the hosts, such as to=/data/shared")
    if to is not None and not words:
        raise UsageError(
            "to= says where files and folders go, and no file or folder is named", hint="doit sync cluster=… to=… PATH"
        )
    base = (to if to is not None else f"{workdir}/folders").rstrip("/")
    named = [_folder(word, base, root) for word in words]
    for folder in named:
        same = [other.source for other in named if other.name == folder.name]
        if len(set(same)) > 1:
            both = " and ".join(map(str, same[:2]))
            raise UsageError(f"{both} would both go to {folder.place}; sync them one by one, with another to= each")
    return list(dict.fromkeys(named))


def _folder(word: str, base: str, root: Path) -> Folder:
    path = Path(root, word)
    try:
        source = path.resolve(strict=True)
    except OSError as error:
        raise UsageError(f"{path} can't be copied to the hosts: {error.strerror}") from error
    name = source.name if path.name in ("", "..") else path.name
    if not name or not (source.is_dir() or source.is_file()):
        raise UsageError(f"{path} can't be copied to the hosts: {'it is the whole disk' if not name else 'no file'}")
    return Folder(name=name, source=source, place=f"{base}/{name}")


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
    values = launcher.demand("comparing", request, hosts=hosts, timeout_s=timeout_s)
    states = []
    for host in hosts:
        for tree, answer in zip(wanted, values[host.label]["trees"], strict=True):
            rows = ((name, tuple(value) if isinstance(value, list) else value) for name, value in answer.items())
            states.append(TreeState(host=host.label, tree=tree, **dict[str, Any](rows)))
    return states


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
        compared = compare(launcher, [tree], hosts)
        states += [replace(one, more=0) for one in compared]  # a host's pack also has stamps.json
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
        Copy(host=host, folder=folder, place=place, shell=launcher.transport.remote_shell(host))
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


def _rsync(copies: Sequence[Copy], *, wanted: Sequence[Tree], delete: bool, heartbeat: Heartbeat) -> None:
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
    failures = copy_all(copies, delete=delete, on_bytes=on_bytes)
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
    values = launcher.demand("making room", request, hosts=hosts)
    lacking = [host.label for host in hosts if not values[host.label]["rsync"]]
    if lacking:
        raise HostError(
            f"{', '.join(lacking)}: there is no rsync, which doit sync needs on both sides",
            hint="there: sudo apt-get install rsync (Debian, Ubuntu), or sudo dnf install rsync (Fedora)",
        )
    return {host.label: list(values[host.label]["places"]) for host in hosts}


# ------------------------------------------------------------------------------------------------------------ rsync
AT_ONCE = 8
_SILENT_S = 60  # rsync's own limit for a connection that moves nothing
_INSTALL = {
    "Darwin": "brew install rsync",
    "Linux": "sudo apt-get install rsync (Debian, Ubuntu), or sudo dnf install rsync (Fedora)",
}
_PROGRESS = re.compile(rb"([\d,]+)\s+\d+%\s+\S+/s")
_MAX_ERROR = 600  # characters


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A folder to copy to a host. ``shell`` is the ssh command to the host, ``place`` the absolute path there."""

    host: Host
    folder: Folder
    place: str
    shell: Sequence[str]

    def argv(self, *, delete: bool) -> list[str]:
        """Return rsync's command. No shell parses the paths, so they may contain any character."""
        slash = "" if self.folder.is_file else "/"  # copies the content into the place
        name = f"[{self.host.name}]" if ":" in self.host.name else self.host.name
        argv = [_program(), "--recursive", "--links", "--perms", "--times", "--checksum", "--protect-args"]
        argv += ["--prune-empty-dirs"]  # they aren't compared, and must not replace a file
        argv += [f"--timeout={_SILENT_S}", f"--partial-dir={trees.PARTIAL}", "--info=progress2", "--outbuf=N"]
        argv += ["--delete"] if delete and not self.folder.is_file else []
        source, place = f"{self.folder.source}{slash}", f"{name}:{self.place}{slash}"
        return [*argv, "-e", " ".join(map(_quoted, self.shell)), "--", source, place]


def _quoted(word: str) -> str:
    """Quote a word for rsync's -e, where a quote inside quotes is doubled."""
    return "'" + word.replace("'", "''") + "'"


@cache
def _program() -> str:
    """Return rsync's path. Raises HostError: rsync is missing or too old."""
    program = process.find("rsync")
    hint = _INSTALL.get(platform.system(), "install rsync 3.1 or newer")
    if program is None:
        raise HostError("doit sync needs rsync on this computer, and PATH has none", hint=hint)
    printed = process.run([program, "--version"]).stdout
    version = re.match(r"rsync +version (\d+)\.(\d+)", printed)
    if version is None or (int(version[1]), int(version[2])) < (3, 1):
        raise HostError(f"doit sync needs rsync 3.1 or newer; {program} is {printed.strip()[:60]!r}", hint=hint)
    return program


def copy_all(copies: Iterable[Copy], *, delete: bool, on_bytes: Callable[[str, str, int], None]) -> dict[str, str]:
    """Run the copies, at most ``AT_ONCE`` at a time; return host label → its first failure. An exception ends them.

    ``on_bytes``: takes host label, name of the folder, and its bytes so far; called in several threads. Raises
    HostError: this computer has no rsync.
    """
    failures, children = dict[str, str](), list[Popen[bytes]]()

    def copy_one(copy: Copy) -> None:
        label = copy.host.label
        if label in failures:  # the host's other folders would fail, too
            return
        children.append(child := process.stream(copy.argv(delete=delete)))
        stderr = _output(child, lambda count: on_bytes(label, copy.folder.name, count))
        if child.wait() != 0:
            failures.setdefault(label, _failure(child.returncode, stderr))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(copy_one, copy) for copy in copies]
        try:
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
            raise
    return failures


def _output(child: Popen[bytes], on_bytes: Callable[[int], None]) -> str:
    """Read both pipes to their ends, and return the end of stderr."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdin.close()
    stdout = stderr = b""
    with selectors.DefaultSelector() as selector, child.stdout, child.stderr:
        for pipe in (child.stdout, child.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    stderr = (stderr + data)[-4096:]
                else:
                    stdout = (stdout + data)[-4096:]
                    for sent in _PROGRESS.findall(stdout)[-1:]:
                        on_bytes(int(sent.replace(b",", b"")))
    return stderr.decode(errors="replace")


def _failure(code: int, stderr: str) -> str:
    """Return rsync's error message without the lines that every failure has."""
    if "is your shell clean" in stderr or "unexpected tag" in stderr:
        return "its login prints something, which rsync mistakes for its own data: `ssh HOST true` must print nothing"
    lines = [line for line in stderr.splitlines() if line.strip() and "rsync error: some files" not in line]
    return f"rsync ended with code {code}: {'; '.join(lines)[-_MAX_ERROR:]}"


# ------------------------------------------------------------------------------------------------------ environments
_INSTALL_TIMEOUT_S = 7200.0


def ensure(launcher: AgentLauncher, lock: LockFile, heartbeat: Heartbeat) -> list[Environment]:
    """Make the environments that are missing (completely or not at all), and return those of all hosts.

    Raises HostError: names the hosts that failed, the installer's last lines, and the command that repeats it.
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
