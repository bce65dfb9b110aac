"""Agents that pssh has started and that stay for the requests that follow: one Python on each host, not one a request.

pssh reads its own input to the end before it starts anything, so each host's ssh reads a named pipe instead: a program
called ``ssh``, which comes first in pssh's PATH, redirects its input and becomes the real one. What comes back stands
in pssh's files, as ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pipeline.cluster.launchers.pssh_output import endless, late_note, output_of, written
from pipeline.cluster.launchers.replies import Output, answer_in
from pipeline.core import process

LIFE_S = 600.0
"""pssh's own limit, which ends what a controller that was killed in a bad moment has left."""
_USABLE_S = LIFE_S / 2
_LOOK_S = 0.01
_LOOK_AT_ONE_S = 50e-6  # with many hosts a look costs processor time too
_LEAVE_S = 2.0
_MORE_S = 3.0  # for the other hosts, once one prints without end
_SILENT_S = 5.0  # of a first request: a start file of the login may read all input, and wait for its end
_CHUNK_BYTES = 1 << 16

_SSH = """\
#!/bin/sh
PATH=$PACELINE_PATH
exec "$PACELINE_SSH" "$@" <"$PACELINE_REQUESTS/$PSSH_NODENUM"
"""  # PATH as it was, for what ssh starts itself: a ProxyCommand that is called ssh, too


_PROGRAMS = "programs"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The hosts of one pssh.

    Attributes:
        argv: pssh's whole command, without ``-I``; it writes into ``out`` and ``err`` of the folder of all groups.
        names: host label → its name in pssh's host file, in the order of that file.
    """

    argv: Sequence[str]
    names: Mapping[str, str]


def may_run_programs(folder: Path) -> bool:
    """Put pssh's ``ssh`` there; False: nothing in that folder may be executed (a file system with noexec)."""
    path = folder / _PROGRAMS / "ssh"
    path.parent.mkdir()
    path.write_text(_SSH, encoding="ascii")
    path.chmod(0o700)
    return os.access(path, os.X_OK)


class _Line:
    """The named pipe to one host's ssh."""

    def __init__(self, path: str, pssh: subprocess.Popen[bytes]) -> None:
        os.mkfifo(path, 0o600)
        self._path, self.pssh = path, pssh
        self.pipe: int | None = None
        self.closed = False  # for good
        self.broken = False  # ssh has ended
        self.sent = 0  # bytes of the file of requests

    def send(self, source: int, size: int) -> None:
        """As much as the pipe takes now of what the file ``source`` holds from ``sent`` on."""
        if self.pipe is None:
            self._open()
        if self.pipe is not None and self.sent < size:
            self._send(source, size)

    def _open(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError):  # ENXIO: nobody reads it yet
                self.pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)

    def _send(self, source: int, size: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.pipe is not None and self.sent < size:
                try:
                    self.sent += os.write(self.pipe, os.pread(source, _CHUNK_BYTES, self.sent))
                except BrokenPipeError:
                    self.breaks()

    def close_after(self, size: int) -> None:
        """Close it when all is sent."""
        if self.sent >= size:
            self.close()

    def breaks(self) -> None:
        self.broken = True
        self.close()

    def close(self) -> None:
        """The agent reads the end of its input, and leaves."""
        if self.pipe is not None:
            os.close(self.pipe)
        self.pipe, self.closed = None, True


class LiveAgents:
    """A pssh for each group, and an agent on each host.

    Args:
        ssh: path of the real one.
        folder: one that ``may_run_programs`` and is removed at the end.
    """

    def __init__(self, groups: Sequence[Group], ssh: str, folder: Path) -> None:
        self.folder, self._began = folder, time.monotonic()
        self._names = {label: name for group in groups for label, name in group.names.items()}
        self._written = {label: f"{folder}/out/{name}" for label, name in self._names.items()}
        path = os.environ.get("PATH", os.defpath)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PSSH_")}
        env |= {"PATH": f"{folder / _PROGRAMS}:{path}", "PACELINE_PATH": path, "PACELINE_SSH": ssh}
        self._lines = dict[str, _Line]()
        self._reports, self._children = list[Path](), list[subprocess.Popen[bytes]]()
        for number, group in enumerate(groups):
            self._begin(group, env, folder / f"requests-{number}", folder / f"report-{number}")

    def _begin(self, group: Group, env: Mapping[str, str], requests: Path, report: Path) -> None:
        requests.mkdir()
        pssh = process.background(group.argv, env={**env, "PACELINE_REQUESTS": str(requests)}, log=report)
        self._children.append(pssh)
        self._reports.append(report)
        self._lines |= {label: _Line(f"{requests}/{number}", pssh) for number, label in enumerate(group.names)}

    def usable(self) -> bool:
        """Whether all of them wait for a request."""
        self._wait(0.0, {})
        alive = all(child.poll() is None for child in self._children) and time.monotonic() - self._began < _USABLE_S
        return alive and all(line.pipe is not None and not line.broken for line in self._lines.values())

    def ask(self, stdin: IO[bytes], at: int, token: str, timeout_s: float, *, last: bool) -> dict[str, Output]:
        """Send what ``stdin`` holds from byte ``at`` on; host label → what it wrote up to the answer with ``token``.

        ``last``: no other request follows, as also where to the first no host answers for seconds. Where a
        host doesn't answer at all, every agent is ended.
        """
        size = os.fstat(stdin.fileno()).st_size
        for line in self._lines.values():
            line.sent = at
        try:
            hang_up_s = 0.0 if last else _SILENT_S if at == 0 else LIFE_S
            outputs, late = self._answers(stdin.fileno(), size, token, timeout_s, hang_up_s)
            if len(outputs) < len(self._names):
                self._end(0.0 if late else _LEAVE_S)
        except BaseException:
            self._end(0.0)
            raise
        report = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self._reports)
        for label, name in self._names.items():
            if label in late:
                output = written(self.folder, name)
                outputs[label] = endless(output) or replace(output, code=None, note=late_note(timeout_s))
            elif label not in outputs:
                outputs[label] = output_of(self.folder, name, report, timeout_s)
        return outputs

    def _answers(
        self, source: int, size: int, token: str, timeout_s: float, hang_up_s: float
    ) -> tuple[dict[str, Output], set[str]]:
        """What the hosts that answered have written, and the labels of those that had not when the time was up.

        ``hang_up_s``: after how long without anything of any host (that its ssh has begun, or has read, or an answer)
        the agents are told that nothing more will come. With many hosts pssh begins the last long after the first has
        answered, and on a busy computer the first long after it was started itself.
        """
        outputs, seen = dict[str, Output](), dict[str, int]()
        waiting, began = dict(self._lines), time.monotonic()
        moved = began
        while waiting:
            if time.monotonic() - began > timeout_s:
                return outputs, set(waiting)
            for label, line in list(waiting.items()):
                before, over = (line.pipe, line.sent), line.pssh.poll() is not None
                line.send(source, size)
                if (line.pipe, line.sent) != before:
                    moved = time.monotonic()
                output = self._news(label, seen)
                if output is not None and answer_in(output, token).value is not None:
                    outputs[label], moved = output, time.monotonic()
                elif output is not None and endless(output) is not None:  # it fills the disk here
                    timeout_s = min(timeout_s, time.monotonic() - began + _MORE_S)
                if label in outputs or line.broken or over:
                    del waiting[label]
            if time.monotonic() - moved >= hang_up_s:
                for line in self._lines.values():
                    line.close_after(size)
            self._wait(max(_LOOK_S, _LOOK_AT_ONE_S * len(waiting)), waiting, size)
        return outputs, set()

    def _news(self, label: str, seen: dict[str, int]) -> Output | None:
        """All that a host has written, where it is more than at the last look: a hundred looks a second at each host,
        so nothing is made anew for one."""
        try:
            size = os.stat(self._written[label]).st_size  # noqa: PTH116
            if size > seen.get(label, 0):
                seen[label] = size
                return written(self.folder, self._names[label])
        except OSError:  # nothing yet
            pass
        return None

    def _wait(self, longest_s: float, waiting: Mapping[str, _Line], size: int = 0) -> None:
        """Until a pipe takes more, or an ssh ends; with many hosts a moment longer, in which more of them do."""
        time.sleep(min(longest_s, _LOOK_AT_ONE_S * len(waiting)))
        poll = select.poll()
        lines = {line.pipe: line for line in self._lines.values() if line.pipe is not None}
        unsent = {line.pipe for line in waiting.values() if line.sent < size}
        for pipe in lines:
            poll.register(pipe, select.POLLOUT if pipe in unsent else 0)
        for pipe, event in poll.poll(1000 * longest_s):
            if event & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                lines[pipe].breaks()

    def close(self) -> None:
        """End the agents; what pssh has written is removed."""
        self._end(_LEAVE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, leave_s: float) -> None:
        """``leave_s``: how long the agents have to leave by themselves once their input has ended."""
        for line in self._lines.values():
            line.close()
        for wait_s, number in ((leave_s, signal.SIGINT), (1.0, signal.SIGKILL)):
            until = time.monotonic() + wait_s
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, until - time.monotonic()))
            for child in self._children:
                if child.poll() is None:
                    child.send_signal(number)
        for child in self._children:
            child.wait()
