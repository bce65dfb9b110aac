"""All ways in which the controller half starts processes; no other module of it does.

``run`` waits for a short command. ``run_group`` and ``run_apart`` also wait, for a command that Ctrl-C must not end at
once. ``stream``, ``guarded`` and ``background`` return a running child. ``attached`` is for a long command whose output
the user sees. ``python_answer`` asks another Python for one JSON value.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from pipeline.core.errors import PacelineError
from pipeline.core.places import HOME, IS_INSTALLED

_STDERR_BYTES = 1 << 16  # of the end of a command's stderr that are kept
_POLL_S = 1.0
BESIDE, LEAST, NORMAL = 10, 19, 0
"""Niceness of a process next to a training; of one that may take almost nothing from it; of others."""
_PRIORITY_TRIES, _PRIORITY_AGAIN_S = 10, 0.1  # the kernel accepts ten changes a second from all users but root together


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A finished command: its exit code (negative: the signal) and all of its output."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def why(self) -> str:
        """The reason of a failure: stderr, and the exit code if a signal ended the command or stderr is empty."""
        output = self.stderr.strip()
        if output and self.code >= 0:
            return output
        ended = f"exit code {self.code}" if self.code >= 0 else f"ended by {signal_name(-self.code)}"
        if self.code == -signal.SIGKILL:
            ended += " (by a user, or by the system where memory is short)"
        return f"{output}; {ended}" if output else ended


def signal_name(number: int) -> str:
    """Return ``SIGKILL``, or the number for a signal without a name (a real-time one)."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def find(*names: str) -> str | None:
    """Return the path of the first of these programs that is on PATH; None if none is."""
    return next((path for name in names if (path := shutil.which(name))), None)


def set_priority(pid: int, niceness: int) -> None:
    """Set the niceness of a process to ``BESIDE``, ``LEAST`` or ``NORMAL``.

    With Linux autogrouping (sched(7)) niceness counts only within a session, and sessions share the processor evenly.
    So if the process leads a session, the session's own niceness is set too.
    """
    with contextlib.suppress(OSError):  # not root, or the process has ended
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):  # not Linux, without autogrouping, or it has ended
        for _ in range(_PRIORITY_TRIES if os.getsid(pid) == pid else 0):
            try:
                Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")
                return
            except BlockingIOError:
                time.sleep(_PRIORITY_AGAIN_S)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files, often 1,024, of this process and its children to ``count`` where permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def child_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment and ``added``, for a child that runs ``python -m pipeline.…``.

    With it the child imports the same package as this process, whatever its working directory is.
    """
    env = {**os.environ, **(added or {})}
    if IS_INSTALLED:  # site-packages on PYTHONPATH would shadow the standard library
        return env
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(HOME), env.get("PYTHONPATH"))))}


def run(
    argv: Sequence[str],
    *,
    input: bytes | None = None,  # noqa: A002  (named as in subprocess.run)
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    errors: str = "replace",
) -> Completed:
    """Run ``argv`` to its end, without a shell; any exit code is returned as data.

    ``env`` replaces the whole environment; ``errors`` is the decoding of output that isn't UTF-8. Raises PacelineError:
    the program can't be run, or was still running after ``timeout_s``.
    """
    try:
        with _start_errors_explained(argv):
            done = subprocess.run(
                list(argv), input=input or b"", capture_output=True, timeout=timeout_s, env=env, cwd=cwd, check=False
            )
    except subprocess.TimeoutExpired as error:
        raise PacelineError(f"{argv[0]} was still running after {timeout_s:g} s") from error
    return _completed(argv, done.returncode, done.stdout, done.stderr, errors)


def run_group(
    argv: Sequence[str],
    *,
    input: bytes,  # noqa: A002  (named as in subprocess.run)
    env: Mapping[str, str],
    timeout_s: float,
    running: set[int],
) -> Completed:
    """Like ``run``, in its own process group, which is killed after ``timeout_s``.

    If the command leaves background processes, they are not awaited and keep running. Only the end of stderr is kept.
    ``running`` contains the group's id until the command ends, so that another thread can call ``end_groups``. Raises
    PacelineError: the program can't be run, or it was killed.
    """
    # Files instead of pipes: a command that doesn't read its stdin would block the writer, and a background process
    # that keeps stderr open would block the reader.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(input)
        stdin.seek(0)
        with _start_errors_explained(argv):
            child = _in_session(argv, env=env, stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr)
        running.add(child.pid)
        try:
            child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise PacelineError(f"{argv[0]} was still running after {timeout_s:g} s") from error
        finally:
            running.discard(child.pid)
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_BYTES))
        return _completed(argv, child.returncode, b"", stderr.read())


def end_groups(running: set[int]) -> None:
    """Kill the groups that ``run_group`` waits for."""
    for group in [*running]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def run_apart(
    argv: Sequence[str],
    *,
    stdin: IO[bytes],
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    enough: Callable[[], bool] = lambda: False,
) -> Completed:
    """Like ``run``, in its own session: Ctrl-C in the terminal doesn't reach the child, so clean-up continues.

    The child reads the file ``stdin`` from its beginning; it may be too large for memory. The child gets SIGINT (on
    which pssh ends its ssh clients) if an exception interrupts the wait, or if ``enough()``, called every second, is
    True. Raises PacelineError: the program can't be run, or was still running after ``timeout_s``.
    """
    stdin.seek(0)
    child, until = stream(argv, stdin=stdin, env=env), time.monotonic() + timeout_s
    try:
        while True:
            try:
                stdout, stderr = child.communicate(timeout=max(0.0, min(_POLL_S, until - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                if enough():
                    stdout, stderr = _interrupt(child)
                    break
                if time.monotonic() >= until:
                    raise
    except BaseException as error:  # also a Ctrl-C: the child must not stay behind
        _interrupt(child)
        if isinstance(error, subprocess.TimeoutExpired):
            raise PacelineError(f"{argv[0]} was still running after {timeout_s:g} s") from error
        raise
    return _completed(argv, child.returncode, stdout, stderr)


def _interrupt(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Send SIGINT, after one second SIGKILL, and return the child's (stdout, stderr)."""
    child.send_signal(signal.SIGINT)
    try:
        return child.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


def attached(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], meanwhile: Callable[[int], None] | None = None
) -> int:
    """Run ``argv`` in ``cwd``, all of its output on this process's stderr, and return its exit code.

    If an exception interrupts the wait, the child gets SIGTERM and up to 60 s for its clean-up. ``meanwhile`` is
    called with its process id ten times a second. Raises PacelineError: the program can't be run.
    """
    with _start_errors_explained(argv):
        child = subprocess.Popen(list(argv), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=2)
    try:
        while meanwhile is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.1)
            meanwhile(child.pid)
        return child.wait()
    except BaseException:  # also a Ctrl-C: the child must not stay behind
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def replace(argv: Sequence[str]) -> NoReturn:
    """Replace this process by ``argv`` (execv), in the same folder and environment. Raises OSError."""
    sys.stdout.flush()
    os.execv(argv[0], list(argv))


def stream(
    argv: Sequence[str], *, stdin: IO[bytes] | int = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a long-lived child with three pipes in its own session. Raises PacelineError.

    If ``stdin`` is a file, the child reads it from its current position, so that no write to a pipe can block.
    """
    with _start_errors_explained(argv):
        return _in_session(argv, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _completed(argv: Sequence[str], code: int, stdout: bytes, stderr: bytes, errors: str = "replace") -> Completed:
    return Completed(
        argv=tuple(argv), code=code, stdout=stdout.decode(errors=errors), stderr=stderr.decode(errors="replace")
    )


@contextlib.contextmanager
def _start_errors_explained(argv: Sequence[str]) -> Iterator[None]:
    """Turn the OSError of a start in the block into a PacelineError that names the program."""
    try:
        yield
    except FileNotFoundError as error:
        raise PacelineError(f"program not found: {argv[0]}") from error
    except OSError as error:  # a folder, not executable, wrong architecture
        raise PacelineError(f"{argv[0]} can't be run: {error.strerror}") from error


def guarded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    log: Path | None = None,
    keeps_output: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child that ends, with its descendants, when its ``stdin`` pipe is closed or this process ends.

    Stdout and stderr go together to a pipe, or to ``log`` (truncated first), or with ``keeps_output`` to those of this
    process. The command itself has an empty stdin. Raises PacelineError.
    """
    guard = [sys.executable, "-I", "-S", str(HOME / "pipeline/core/processes/guard.py")]
    try:
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("wb") as output:
            return subprocess.Popen(
                [*guard, *argv],
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=None if keeps_output else output,
                stderr=None if keeps_output else subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone
            )
    except OSError as error:
        raise PacelineError(f"{argv[0]} can't be started: {error.strerror}") from error


def background(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, answers: bool = False
) -> subprocess.Popen[bytes]:
    """Start a child next to the controller, with its output in ``log`` (truncated first). Raises OSError.

    A child that ``answers`` reads lines from a pipe on stdin and writes lines to a pipe on stdout; only its stderr goes
    to ``log``. It must end when its stdin closes, which also happens when this process is killed.
    """
    stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if answers else (subprocess.DEVNULL, None)
    with log.open("wb") as output:
        return _in_session(argv, env=env, stdin=stdin, stdout=stdout or output, stderr=output)


def _in_session(argv: Sequence[str], *, env: Mapping[str, str] | None, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a child that a Ctrl-C in the terminal doesn't end: the recorder must still record the run as KILLED."""
    return subprocess.Popen(list(argv), env=env, start_new_session=True, **streams)


_ANSWER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an import prints is no part of the answer
json.dump(answer(json.loads(sys.argv[1])), answers)
answers.close()
os._exit(0)  # whatever threads an import has started
"""


def python_answer(
    program: str, request: object, *, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Any:
    """Run a program text in a new process of this Python; return the JSON result of its function ``answer(request)``.

    The program may import modules from ``cwd`` if that is given. ``env`` is the whole environment. Raises PacelineError
    with the last line of its traceback, or that it was still running after ``timeout_s``.
    """
    # -P: torch must not import a file cuda.py from the folder in which the user happens to be
    isolation = [] if cwd is not None else ["-P"]
    argv = [sys.executable, "-B", *isolation, "-c", program + _ANSWER, json.dumps(request)]
    done = run(argv, timeout_s=timeout_s, env=env, cwd=cwd)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise PacelineError(done.why.splitlines()[-1]) from None
