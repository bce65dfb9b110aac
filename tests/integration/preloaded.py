"""`doit` in a fork of a process that has imported what it imports, which is most of a small command's processor time.

Nothing else differs, as quick_composition.py composes what Hydra does: each command is a process of its own, with the
arguments, environment, working directory, outputs and exit code that `python -m doit` would have, and it ends as an
interpreter does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.integration.light import light_python
from tests.waiting import HANG_S, unhurried

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "doit.__main__", "doit.doit_cmd", "hydra_plugins.paceline_plugins", "omegaconf._impl", "pipeline.cli.doit_plugins",
    "pipeline.cli.loader", "pipeline.cli.project", "pipeline.cli.commands.explain", "pipeline.cli.finished",
    "pipeline.cli.commands.reproduce", "pipeline.cli.commands.status", "pipeline.cli.commands.sweep",
    "pipeline.cli.commands.train", "pipeline.cluster.attempt.run",
    "pipeline.cluster.launchers.local", "pipeline.config.build", "pipeline.config.compose",
    "pipeline.config.memo", "pipeline.data.datasets.digits", "pipeline.execution.attempting",
    "pipeline.execution.complete", "pipeline.execution.dry_run", "pipeline.sweep", "pipeline.tracking.description",
)  # fmt: skip
_idle: dict[Path, list[_Server]] = defaultdict(list)


def doit(
    *words: str, root: Path = ROOT, apart: bool = False, timeout_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """`python -m doit` with these words in the project ``root``, to its end; stdout and stderr together in ``stdout``,
    or ``apart``. Raises TimeoutExpired.
    """
    while True:
        server = _idle[root].pop() if _idle[root] else _Server(root)
        with suppress(_StaleError):
            done = server.run([light_python(forks_ranks=True), "-m", "doit", *words], apart, timeout_s)
            _idle[root].append(server)
            return done


class _StaleError(Exception):
    """What was imported has been edited since."""


class _Server:
    """A process that waits for commands, one at a time. It ends with the one that made it."""

    def __init__(self, root: Path) -> None:
        from tests.shared_fixture import shared_folder  # imports pytest

        self._path = {} if root == ROOT else {"PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [light_python(forks_ranks=True), "-m", __name__, str(shared_folder() / "readings")],
            cwd=root,
            env=os.environ | self._path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        atexit.register(self._process.communicate)

    def run(self, argv: list[str], apart: bool, timeout_s: float) -> subprocess.CompletedProcess[str]:
        with NamedTemporaryFile() as out, NamedTemporaryFile() as err:
            outputs = [out.name, err.name if apart else out.name]
            request = {"argv": argv, "env": os.environ | self._path, "outputs": outputs}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            pid = self._answer(timeout_s)["pid"]
            try:
                code = self._answer(timeout_s)["code"]
            except TimeoutError:
                self._process.kill()
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(argv, timeout_s, out.read()) from None
            texts = [unhurried(file.read().decode()) for file in (out, err)]
            return subprocess.CompletedProcess(argv, code, *texts)

    def _answer(self, timeout_s: float) -> dict[str, int]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise _StaleError
        answer: dict[str, int] = json.loads(line)
        return answer


def _serve() -> int:
    """Fork a process for each line of stdin. Returns in a forked one, with the exit code of its command."""
    import doit.plugin  # none of these is for the tests' own process
    from hydra.core.plugins import Plugins

    from pipeline.config import compose
    from pipeline.keys import readings
    from tests.quick_composition import quickly
    from tests.quick_readings import shared_reading

    for name in _IMPORTED:
        importlib.import_module(name)
    Plugins.instance()  # imports every one that Hydra finds
    vars(readings)["_parse"] = functools.partial(shared_reading, Path(sys.argv[1]))
    vars(compose)["compose"] = quickly
    root = Path.cwd()
    compose.compose_config(["experiment=quickstart", "tracking=none"])  # most commands have these
    if root == ROOT:  # few commands are for a checkout of a test's own, and none of them records
        compose.compose_config(["experiment=quickstart"])
    vars(doit.plugin)["entry_points"] = known = functools.cache(entry_points)  # it looks through all distributions
    for category in ("COMMAND", "BACKEND", "REPORTER", "LOADER"):
        known(group=f"doit.{category}")
    gc.collect()
    gc.freeze()  # or the first look for garbage copies these pages
    os.chdir("/")  # a file system that is to be unmounted would be busy
    requests = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  (as long as the process)
    imported = _imported(root)
    while (line := requests.readline()) and _imported(root) == imported:
        pid = os.fork()
        if pid == 0:
            os.chdir(root)
            return _command(**json.loads(line))
        os.write(1, json.dumps({"pid": pid}).encode() + b"\n")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, json.dumps({"code": code}).encode() + b"\n")
    return 0


def _imported(root: Path) -> dict[Path, int]:
    """The project's modules that were imported, with the times of their sources (0: it is gone)."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    own = [root / "pipeline", root / "trainers"]
    found = [file for file in files if any(file.is_relative_to(folder) for folder in own)]
    return {file: file.stat().st_mtime_ns if file.exists() else 0 for file in found}


def _command(argv: list[str], env: dict[str, str], outputs: list[str]) -> int:
    """Become the process that ``argv`` starts."""
    import doit.__main__
    from doit.doit_cmd import DoitMain

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv[:] = argv
    sys.argv[:] = [doit.__main__.__file__, *argv[3:]]
    code: int = DoitMain().run(sys.argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(_serve())
