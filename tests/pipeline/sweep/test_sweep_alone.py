"""One command at a time runs a sweep: what the others say, and what a disk that can't take its folder means."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.cli.commands import sweep
from pipeline.core.errors import PacelineError
from pipeline.core.locks import held
from pipeline.core.processes import threads
from pipeline.sweep.folder import SweepFolder
from pipeline.sweep.shared import WorkerProcess


def test_a_full_disk_in_the_middle_of_a_sweep_is_told_with_its_mend(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "sweep.json")
    said = r"sweep abc can't be kept in .*: No space left on device"
    with pytest.raises(PacelineError, match=said) as told, sweep.lock_of_sweep(SweepFolder(tmp_path / "abc")):
        raise full
    free = r"make room on the disk of .*, of which [\d,]+ bytes are free \(doit clean shows which runs may go\)"
    assert re.search(free, str(told.value))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_who_waits_for_another_sweep_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threads.WaitReports.__init__, "__defaults__", (0.1,))
    folder = SweepFolder(tmp_path / "abc")
    folder.path.mkdir()
    taken = threading.Event()

    def other() -> None:
        with held(folder.lock):
            taken.set()
            time.sleep(1.0)

    threading.Thread(target=other).start()
    taken.wait()
    with sweep.lock_of_sweep(folder):
        pass
    assert "still waiting for the command that runs sweep abc" in capsys.readouterr().err


IMPORTS = "import time; time.sleep(60)"
ANSWERS = """
import sys, time
line = sys.stdin.readline()
time.sleep(1)
open(sys.argv[1], "w").write(line)
"""


def worker(folder: Path, program: str) -> WorkerProcess:
    argv = [sys.executable, "-c", program, str(folder / "done")]
    return WorkerProcess(argv, os.environ, folder / "worker.log")


@pytest.mark.slow
def test_one_that_was_asked_nothing_is_not_waited_for_and_one_at_work_is(tmp_path: Path) -> None:
    began = time.monotonic()
    worker(tmp_path, IMPORTS).close()
    assert time.monotonic() - began < 30.0
    asked = worker(tmp_path, ANSWERS)
    asked.ask(run_dir="x")
    asked.close()
    assert (tmp_path / "done").read_text() == '{"id": 0, "run_dir": "x"}\n'
