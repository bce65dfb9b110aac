"""Make Python environments on this node, each from one lock file for one Python (`doit sync`).

``workdir/environments/<digest>`` is a link to a folder with another name. The link is made last, so an environment
appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec

from trainers.contract.host_facts import OLDEST_PYTHON

from ..files.folders import make_folder
from ..requests import FindEnvironmentRequest, MakeEnvironmentRequest
from ..wire import say

LAST_LINES = 12  # of an installer's output, in an error
_NOISE = re.compile(r"^Ignoring \S+: markers|Retrying \(")  # lines of pip that explain no error
_REPORT_S = 1.0
_ENDING_S = 5.0  # limit for an installer to end after TERM


def find_environment(request: FindEnvironmentRequest) -> None:
    """Answer with the environment's folder, its interpreter (None: it doesn't exist), and this Python's version."""
    environment = environment_path(request)
    python = os.path.join(environment, "bin", "python")
    version = ".".join(map(str, sys.version_info[:3]))
    say(place=environment, python=python if os.path.exists(python) else None, python_version=version)


def environment_path(request: FindEnvironmentRequest | MakeEnvironmentRequest) -> str:
    """Return the path of the environment for this lock file, Python version and platform."""
    kind = f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))} {sysconfig.get_platform()}"
    digest = hashlib.sha256(f"{request.lock_sha256} {kind}".encode()).hexdigest()
    return os.path.join(os.path.expanduser(request.workdir), "environments", digest[:16])


def make_environment(request: MakeEnvironmentRequest) -> None:
    """Install the lock into a new environment; report each second how many distributions are installed."""
    environment = environment_path(request)
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise SystemExit(f"{sys.executable} is Python {sys.version.split()[0]}, and 3.11 or newer is needed")
    make_folder(os.path.dirname(environment))
    requirements = f"{environment}.txt"
    with open(f"{environment}.lock", "a", encoding="utf-8") as mutex:  # also across hosts that share the folder
        fcntl.flock(mutex, fcntl.LOCK_EX)
        if not os.path.exists(os.path.join(environment, "bin", "python")):
            remove_unfinished(environment)
            # only now, under the lock: another installer may have been reading the file
            with open(requirements, "w", encoding="utf-8") as file:
                file.write(request.lock)
            folder = tempfile.mkdtemp(prefix=f"{os.path.basename(environment)}.", dir=os.path.dirname(environment))
            try:
                os.chmod(folder, 0o755)
                failure = run_commands(commands(folder, requirements, request.wheelhouse), folder)
                if failure:  # the same commands, for the user to repeat
                    by_hand = commands("/tmp/paceline-try", requirements, request.wheelhouse)
                    say(error=failure, repeat=" && ".join(map(shlex.join, by_hand)))
                    return
                os.symlink(os.path.basename(folder), f"{folder}.link")
                os.replace(f"{folder}.link", environment)
            finally:
                if os.path.realpath(environment) != os.path.realpath(folder):
                    shutil.rmtree(folder, ignore_errors=True)
    say(python=os.path.join(environment, "bin", "python"), packages=count_of(environment))


def remove_unfinished(environment: str) -> None:
    """Remove what a killed agent left of this environment; the caller holds the lock."""
    if os.path.islink(environment):
        os.unlink(environment)
    for path in glob.glob(f"{glob.escape(environment)}.*"):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.islink(path):
            os.unlink(path)


def commands(folder: str, requirements: str, wheelhouse: str | None) -> list[list[str]]:
    """Return the commands that create an environment in ``folder``, by uv, else by venv and pip; both check hashes.

    If this Python has pip (22.3 or newer), it installs into the new environment, which then gets no pip of its own:
    that saves seconds, and Debian's Python has no ensurepip.
    """
    python, offline = os.path.join(folder, "bin", "python"), []
    if wheelhouse is not None:
        offline = ["--no-index", "--find-links", os.path.expanduser(wheelhouse)]
    uv = shutil.which("uv")
    if uv:
        sync = [uv, "pip", "sync", "--compile-bytecode", "--python", python, "--require-hashes", *offline, requirements]
        return [[uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], sync]
    has_pip = find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    options = ["--disable-pip-version-check", "--require-hashes", "--no-deps", *offline]
    install = [*pip, "install", *options, "-r", requirements]
    return [[sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), folder], install]


def run_commands(steps: list[list[str]], folder: str) -> str:
    """Run the commands; return why one failed, with its last lines, or ''."""
    with tempfile.TemporaryFile() as output:
        for argv in steps:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = wait_for(child, folder)
            except BaseException:  # the controller is gone: don't install on without it
                end_command(child)
                raise
            if code != 0:
                output.seek(0)
                lines = output.read().decode(errors="replace").splitlines()
                shown = [line for line in lines if line.strip() and not _NOISE.search(line)]
                last_lines = [f"      {line}" for line in shown or lines][-LAST_LINES:]
                head = f"{os.path.basename(argv[0])} ended with code {code} while it made the environment:"
                return "\n".join([head, *last_lines])
    return ""


def wait_for(child: subprocess.Popen[bytes], folder: str) -> int:
    """Return the exit code of an installer; report its progress meanwhile. Raises OSError: the controller is gone."""
    while True:
        try:
            return child.wait(_REPORT_S)
        except subprocess.TimeoutExpired:
            say(received=count_of(folder))


def end_command(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_ENDING_S)
            return


def count_of(folder: str) -> int:
    """Return how many distributions an environment has."""
    return len(glob.glob(os.path.join(glob.escape(folder), "lib", "python*", "site-packages", "*.dist-info")))
