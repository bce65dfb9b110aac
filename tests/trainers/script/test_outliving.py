"""What a script has started and not waited for is waited for while it works, and else ended and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.script.runs import ScriptRun
from tests.waiting import wait_until
from trainers.script import outliving
from trainers.script.outliving import Work, has_moved

pytestmark = pytest.mark.slow

STARTS = """
import os, pathlib, subprocess, sys, paceline
paceline.log(1, loss=1.0)
child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
pathlib.Path(os.environ["PID"]).write_text(str(child.pid))
sys.exit(CODE)
"""
WRITES = """
import os, time
with open(os.environ["PACELINE_OUTPUTS"] + "/late.txt", "w") as file:
    for number in range(5):
        print(number, file=file, flush=True)
        time.sleep(1)
    print("whole", file=file)
"""
COMPUTES = "while True: pass"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
SLEEPS = "import time; time.sleep(600)"


def starts(run: ScriptRun, child: str, code: int = 0) -> dict[str, str]:
    """Writes the script; the environment in which it says the child's process id."""
    run.write(STARTS.replace("CHILD", repr(child)).replace("CODE", str(code)), torchrun=False)
    return {"PID": str(run.project / "pid")}


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_child_that_still_writes_an_output_is_waited_for(run: ScriptRun) -> None:
    said = run.start(env=starts(run, WRITES))
    assert (run.path / "outputs/late.txt").read_text() == "0\n1\n2\n3\n4\nwhole\n"
    assert "was ended" not in said


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("child", [SLEEPS, STOPPED])
def test_a_child_that_does_nothing_is_ended_and_named(run: ScriptRun, child: str) -> None:
    said = run.start(env=starts(run, child))
    pid = int((run.project / "pid").read_text())
    assert f"WARNING: went on after the script's end, and was ended: process {pid} ({sys.executable} -c " in said
    assert "; idle for 3 s\n" in said
    assert not is_alive(pid)


def test_nothing_is_waited_for_where_the_script_failed(run: ScriptRun) -> None:
    process = run.begin(env=starts(run, COMPUTES, code=3))
    assert process.wait() == 3
    pid = int((run.project / "pid").read_text())
    assert is_alive(pid), "its agent ends it"
    os.kill(pid, signal.SIGKILL)
    said, _ = process.communicate()
    assert "after the script's end" not in said


@pytest.mark.ci
@pytest.mark.long
def test_who_stops_the_run_meanwhile_waits_for_nothing(run: ScriptRun) -> None:
    process = run.begin(env=starts(run, COMPUTES))
    assert process.stdout is not None
    assert "waiting up to 60 s for what it started and still works: process" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert "; the run was stopped\n" in said
    assert not is_alive(int((run.project / "pid").read_text()))


def test_a_child_that_never_ends_is_ended_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(outliving, "WAIT_S", 1.5)
    monkeypatch.setattr(outliving, "REPORT_AFTER_S", 0.5)
    marks, looks, said = {"MARK_OF_TEST": str(tmp_path)}, list[int](), list[str]()
    with subprocess.Popen([sys.executable, "-c", COMPUTES], env={**os.environ, **marks}) as child:
        ended = outliving.wait_and_end(marks, look=lambda: looks.append(1), say=said.append, is_stopped=lambda: False)
    named = f"process {child.pid} ({sys.executable} -c {COMPUTES})"
    assert ended == f"{named}; still at work after 1.5 s"
    assert said == [f"the script has ended; waiting up to 1.5 s for what it started and still works: {named}"]
    assert looks, "metrics are read meanwhile"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="of processes only Linux tells the environment")
def test_children_of_children_count_also_without_the_scripts_environment(tmp_path: Path) -> None:
    marks = {"MARK_OF_TEST": str(tmp_path)}
    words = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}], env={{}})"
    with subprocess.Popen([sys.executable, "-c", words], env={**os.environ, **marks}) as child:
        wait_until(lambda: Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text() != "", child)
        grandchild = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
        ended = outliving.wait_and_end(marks, look=lambda: None, say=lambda _: None, is_stopped=lambda: False)
    assert f"process {grandchild} " in ended
    assert not is_alive(grandchild)


def test_what_counts_as_work() -> None:
    idle = Work(cpu_s=1.0, written_bytes=10, is_busy=False)
    assert not has_moved({7: idle}, {7: Work(cpu_s=1.05, written_bytes=10, is_busy=False)})
    for more in ({"cpu_s": 1.06}, {"written_bytes": 11}, {"is_busy": True}):
        assert has_moved({7: idle}, {7: Work(**{**vars(idle), **more})})
    assert has_moved({7: idle}, {7: idle, 8: idle}), "it has started another one"
    assert not has_moved({7: idle, 8: idle}, {7: idle})
