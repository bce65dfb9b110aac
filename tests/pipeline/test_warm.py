"""Launches by a warm parent of ranks, or without one where none can be had."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.running import warm
from pipeline.cluster.agent.running.processes import end_tree, find_processes
from pipeline.core.places import HOME
from tests.waiting import wait_until
from trainers.contract import variables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets, memory files")

TORCHRUN = """
import json, os, sys, time
def main(show_as=None):
    shown = {"argv": sys.argv, "cwd": os.getcwd(), "forked": bool(show_as), "wanted": os.environ.get("WANTED")}
    shown |= {"imported": "graphlib" in sys.modules, "site": "sitecustomize" in sys.modules, "pid": os.getpid()}
    print(json.dumps(shown), flush=True)
    time.sleep(float(os.environ.get("SLEEPS", 0)))
    sys.exit(3)
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches(tmp_path, monkeypatch)
    yield found
    found.end()


class Launches:
    """A run folder, and parents that import a small module instead of torch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.mark = folder, f"{uuid.uuid4().hex}-1-abc:0"
        self.code = folder / "code"
        (self.code / "trainers").mkdir(parents=True)
        (self.code / "trainers" / "__init__.py").touch()
        (self.code / "trainers" / "torchrun.py").write_text(TORCHRUN)
        self.text = (HOME / "trainers" / "ranks.py").read_text()
        imports = next(line for line in self.text.splitlines() if line.startswith("IMPORTS = "))
        self.text = self.text.replace(imports, 'IMPORTS = ("graphlib",)')
        monkeypatch.setattr(warm, "_ranks_source", lambda: self.text)
        self.own = {"PYTHONHASHSEED": "0", "OF_THIS_TEST": self.mark}  # so it shares its parent with no other test
        self.last = self.env()

    def env(self, **more: str) -> dict[str, str]:
        return {**self.own, "PYTHONPATH": str(self.code), variables.NODE: self.mark, **more}

    def begin(self, **more: str) -> Any:
        argv = [sys.executable, str(self.code / "trainers" / "torchrun.py"), "--nnodes=1"]
        with (self.folder / "log").open("ab") as output:
            self.last = self.env(**more)
            return warm.launch(argv, self.last, str(self.folder), output.fileno())

    def shown(self, launch: Any) -> dict[str, Any]:
        wait_until(lambda: launch.poll() is not None)
        value: dict[str, Any] = json.loads((self.folder / "log").read_text().splitlines()[-1])
        return value

    def parent(self) -> int:
        connection = warm._connected(warm._name(self.last))
        assert connection is not None
        with connection:
            return warm._peer(connection)[0]

    def end(self) -> None:
        end_tree(self.mark, 0.5)
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.parent(), signal.SIGKILL)


def test_a_launch_is_a_fork_that_does_what_the_command_does(launches: Launches) -> None:
    (launches.code / "sitecustomize.py").touch()
    launch = launches.begin(WANTED_TOKEN="secret", PACELINE_DEVICE="cpu", PET_X="1")
    shown = launches.shown(launch)
    assert shown["argv"] == [str(launches.code / "trainers" / "torchrun.py"), "--nnodes=1"]
    assert (shown["forked"], shown["imported"], shown["site"]) == (True, True, True)
    assert (shown["cwd"], shown["pid"], launch.returncode) == (str(launches.folder), launch.pid, 3)


def test_a_fork_is_found_and_ended_by_its_mark_and_its_parent_stays(launches: Launches) -> None:
    launch = launches.begin(SLEEPS="600")
    wait_until(lambda: launch.poll() is None and (launches.folder / "log").stat().st_size > 0)
    assert find_processes(launches.mark) == {launch.pid}
    assert "trainers/torchrun.py\0--nnodes=1\0" in Path(f"/proc/{launch.pid}/cmdline").read_text(), "as ps shows it"
    assert find_processes(launches.mark.partition("-")[0] + "-") == {launch.pid}, "by what all attempts share"
    parent = launches.parent()
    assert end_tree(launches.mark, 1.0)
    wait_until(lambda: launch.poll() is not None)
    assert (launch.returncode, launches.parent()) == (-signal.SIGTERM, parent)


def test_what_was_given_up_before_it_was_forked_never_begins(launches: Launches) -> None:
    launches.text = launches.text.replace('"graphlib",', '"slow",')
    (launches.folder / "slow.py").write_text("import time; time.sleep(1.5)")
    launches.text = launches.text.replace("del sys.path[0]", f"sys.path[0] = {str(launches.folder)!r}")
    launch = launches.begin()
    assert launch.poll() is None
    launch.give_up()
    assert launch.poll() == -signal.SIGTERM
    launches.shown(launches.begin())  # served after it
    assert len((launches.folder / "log").read_text().splitlines()) == 1


@pytest.mark.parametrize("why", ["module", "import", "stopped"])
def test_what_a_parent_cannot_serve_is_started_as_a_process_of_its_own(launches: Launches, why: str) -> None:
    if why == "module":  # the run brings what the parent has imported
        (launches.code / "graphlib.py").touch()
    if why == "import":
        launches.text = launches.text.replace('"graphlib",', '"no_such_module",')
    if why == "stopped":
        launches.shown(launches.begin())
        os.kill(launches.parent(), signal.SIGSTOP)
    launch = launches.begin()
    shown = launches.shown(launch)
    assert (shown["forked"], shown["imported"], launch.returncode) == (False, False, 3)


def test_another_environment_has_another_parent(launches: Launches) -> None:
    names = {warm._name(launches.env(**more)) for more in ({}, {"OMP_NUM_THREADS": "2"}, {"MALLOC_ARENA_MAX": "1"})}
    assert len(names) == 3
    later = {"CUDA_VISIBLE_DEVICES": "1", "PACELINE_NNODES": "2", "MY_TOKEN": "x", "GLOO_SOCKET_IFNAME": "eth0"}
    assert warm._name(launches.env(**later)) == warm._name(launches.env())


def test_a_parent_that_is_idle_ends(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "IDLE_S", 0.5)
    launches.shown(launches.begin())
    parent = launches.parent()
    wait_until(lambda: not Path(f"/proc/{parent}").exists() or _is_zombie(parent))


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_secret_stands_in_no_list_of_processes(launches: Launches) -> None:
    launch = launches.begin(MY_TOKEN="hunter2hunter2", SLEEPS="600")
    wait_until(lambda: launch.poll() is None and (launches.folder / "log").stat().st_size > 0)
    for pid in (launch.pid, launches.parent()):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"hunter2" not in shown


def test_without_a_parent_the_command_is_a_process_of_its_own(launches: Launches) -> None:
    with (launches.folder / "log").open("ab") as output:
        begun = warm.launch(["/bin/sh", "-c", "exit 4"], launches.env(), "/", output.fileno())
    assert isinstance(begun, subprocess.Popen)
    assert begun.wait() == 4
