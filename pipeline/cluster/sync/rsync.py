"""Run rsync to several hosts at once over the launcher's ssh. Folders and their places on the hosts."""

from __future__ import annotations

import os
import platform
import re
import selectors
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def copy_all(copies: Iterable[Copy], *, delete: bool, on_bytes: Callable[[str, str, int], None]) -> dict[str, str]:
    """Run the copies, at most ``AT_ONCE`` at a time; return host label → its first failure. An exception ends them.

    Args:
        on_bytes: takes host label, name of the folder, and its bytes so far; called in several threads.

    Raises:
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
