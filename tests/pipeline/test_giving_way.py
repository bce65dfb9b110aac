"""Processes beside a training, and the scheduler of the real kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.processes.process import LEAST, set_priority
from pipeline.tracking import __main__ as tracking
from pipeline.tracking.client import DestinationRecorder
from pipeline.tracking.destinations import Destination

AUTOGROUP = Path("/proc/self/autogroup")
SEEN = f"from pathlib import Path; import os; print(os.nice(0), Path('{AUTOGROUP}').read_text())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="a kernel without autogrouping")
@pytest.mark.parametrize(("leads", "session"), [(True, "nice 10"), (False, "nice 0")])
def test_a_process_beside_a_training_steps_back_with_its_session_and_with_no_other(leads: bool, session: str) -> None:
    own = (
        f"import os; from pipeline.core.processes import process as of; of.set_priority(os.getpid(), of.BESIDE); {SEEN}"
    )
    code = own if leads else f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.startswith("10 ")
    assert session in done.stdout


@pytest.mark.parametrize(
    ("line", "gives_way"),
    [
        ("record RUN --experiment x --follow", False),  # the controller sets it back, and forward again
        ("serve --experiment x", True),
        ("fetch ID PLACE", False),
    ],
)
def test_only_what_works_beside_a_training_gives_way(
    monkeypatch: pytest.MonkeyPatch, line: str, gives_way: bool
) -> None:
    """Beside six busy loops doit ui was refused after two minutes: its store was made with the least priority."""
    given: list[bool] = []
    monkeypatch.setattr(tracking, "set_priority", lambda *_: given.append(True))
    for work in ("_record_one", "_serve", "_fetch", "_store"):
        monkeypatch.setattr(tracking, work, lambda *_: 0)
    for of_a_process in ("_leave_out_data_frames", "masking.begin", "unexpected.install", "unexpected.keep_in"):
        monkeypatch.setattr(f"{tracking.__name__}.{of_a_process}", lambda *_: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert tracking.main([*line.split(), "--uri", "sqlite:////nowhere/mlflow.db"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert bool(given) == gives_way


def test_the_recorder_of_a_run_under_way_gets_hardly_anything_until_the_training_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It doesn't step back by itself: one that came to it after the training had ended stayed there."""
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("pipeline.tracking.recorder_command", lambda *_, **__: waiting)
    recorder = DestinationRecorder(tmp_path, Destination(uri="sqlite:///mlflow.db", experiment="paceline"))
    recorder.start()
    assert recorder._child is not None
    with recorder._child as child:
        before = _niceness(child.pid)
        recorder.restore_priority()
        after = _niceness(child.pid)
        child.kill()
    assert before == (19, 19)
    assert after == (0 if os.geteuid() == 0 else 19, 0)
    recorder.restore_priority()  # it is gone: nothing happens


def test_of_a_process_that_leads_no_session_the_session_stays_as_it_is() -> None:
    own = _niceness(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        set_priority(child.pid, LEAST)
        assert _niceness(child.pid)[0] == 19
    assert _niceness(os.getpid()) == own


def _niceness(pid: int) -> tuple[int, int]:
    """The process's, and its session's where that has one: the file is empty where nothing ever began a session."""
    own, session = os.getpriority(os.PRIO_PROCESS, pid), Path(f"/proc/{pid}/autogroup")
    words = session.read_text().split() if session.exists() else []
    return own, int(words[-1]) if words else own
