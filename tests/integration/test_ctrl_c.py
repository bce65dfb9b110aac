"""Ctrl-C before a run's own handlers are in place: imports, composition, the fetch, the plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.commands import ALONE, ROOT, Project
from tests.integration.test_clone import DOIT, WORDS
from tests.integration.test_unexpected import APPLICATION
from tests.waiting import HANG_S


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("pipeline.core.processes.unexpected", [DOIT, "runs"]),  # the first import but for the handler itself
        ("doit.plugin", [sys.executable, "-m", "pipeline.cli.main", "runs"]),  # paceline
        ("hydra", [DOIT, "train", *WORDS]),
        ("pipeline.sweep", [DOIT, "sweep", *WORDS, "seed=1,2"]),
        ("omegaconf", [*APPLICATION, *WORDS]),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(project: Project, module: str, argv: list[str]) -> None:
    """The signal is sent at the moment when the command begins to import ``module``, so it comes then or soon after."""
    where = [f"paths.runs='{project.folder}/runs'", f"paths.data='{project.folder}/data'"]
    (project.folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        f"sys.addaudithook(lambda name, args: name == 'import' and args[0] == {module!r} and "
        "os.kill(os.getpid(), signal.SIGINT))\n"
    )
    done = subprocess.run(
        [*argv, *where] if "runs" not in argv else argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project.folder}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stderr == "stopped by Ctrl-C; the same command continues\n"
    assert done.returncode == -signal.SIGINT


def test_ctrl_c_in_a_library_that_swallows_its_exception_ends_the_command(project: Project) -> None:
    """A callback of the interpreter's own (a weak reference's, a finalizer) swallows it too, wherever it comes."""
    (project.folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def swallow(name, args):\n"
        "    if name == 'import' and args[0] == 'omegaconf':\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT); list(range(1000))\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
        "sys.addaudithook(swallow)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project.folder}"}
    argv = [*APPLICATION, *WORDS]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.stderr, done.returncode) == ("stopped by Ctrl-C; the same command continues\n", -signal.SIGINT)


@pytest.mark.parametrize("after_s", [0.0, pytest.param(0.5, marks=pytest.mark.long)])
def test_ctrl_c_at_any_moment_shows_no_traceback(project: Project, after_s: float) -> None:
    child = project.start("train", "experiment=quickstart", "tracking=none", *ALONE)
    assert child.stdout is not None
    child.stdout.readline()  # it has composed and looks for the data
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in output
    assert "stopped by " in output
