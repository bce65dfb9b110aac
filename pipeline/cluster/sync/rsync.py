"""Run rsync to several hosts at once over the launcher's ssh. Folders and their places on the hosts."""

from __future__ import annotations

import os
import platform
import re
import selectors
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import Popen

from pipeline.cluster.agent.host.trees import PARTIAL
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes import process
from pipeline.core.specs import Host


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

    Args:
        root: start of relative paths.

    Raises:
        UsageError: no such file or folder, two with the same name, or ``to`` isn't absolute.
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
        argv += [f"--timeout={_SILENT_S}", f"--partial-dir={PARTIAL}", "--info=progress2", "--outbuf=N"]
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


class _Running:
    def __init__(self, copy: Copy, child: Popen[bytes]) -> None:
        self.copy, self.child, self.stdout, self.stderr = copy, child, b"", b""
        self.open = 2  # open pipes


def copy_all(copies: Iterable[Copy], *, delete: bool, on_bytes: Callable[[str, str, int], None]) -> dict[str, str]:
    """Run the copies, at most ``AT_ONCE`` at a time; return host label → its first failure.

    Args:
        on_bytes: takes host label, name of the folder, and its bytes so far.

    Raises:
        HostError: this computer has no rsync.
    """
    waiting, failures = deque(copies), dict[str, str]()
    with _Pool() as pool:
        while waiting or pool.running:
            while waiting and len(pool.running) < AT_ONCE:
                copy = waiting.popleft()
                if copy.host.label not in failures:  # a host's other folders would fail, too
                    pool.begin(copy, delete=delete)
            for one in pool.ended(on_bytes):
                if one.child.returncode != 0:
                    failures.setdefault(one.copy.host.label, _failure(one))
    return failures


class _Pool:
    """Running rsync processes and their output; leaving the ``with`` block ends them."""

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.running:
            one.child.terminate()
        for one in self.running:
            one.child.wait()
        self._selector.close()

    def begin(self, copy: Copy, *, delete: bool) -> None:
        child = process.stream(copy.argv(delete=delete))
        one = _Running(copy, child)
        self.running.append(one)
        if child.stdin is not None:
            child.stdin.close()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, one)

    def ended(self, on_bytes: Callable[[str, str, int], None]) -> list[_Running]:
        """Wait for output, and return the processes that have ended."""
        for key, _ in self._selector.select():
            one: _Running = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                one.open -= 1
            elif one.child.stdout is not None and key.fd == one.child.stdout.fileno():
                one.stdout = (one.stdout + data)[-4096:]
                for sent in _PROGRESS.findall(one.stdout)[-1:]:
                    on_bytes(one.copy.host.label, one.copy.folder.name, int(sent.replace(b",", b"")))
            else:
                one.stderr = (one.stderr + data)[-4096:]
        over = [one for one in self.running if one.open == 0]
        for one in over:
            one.child.wait()
            self.running.remove(one)
        return over


def _failure(one: _Running) -> str:
    """Return rsync's error message without the lines that every failure has."""
    text = one.stderr.decode(errors="replace")
    if "is your shell clean" in text or "unexpected tag" in text:
        return "its login prints something, which rsync mistakes for its own data: `ssh HOST true` must print nothing"
    lines = [line for line in text.splitlines() if line.strip() and "rsync error: some files" not in line]
    return f"rsync ended with code {one.child.returncode}: {'; '.join(lines)[-_MAX_ERROR:]}"
