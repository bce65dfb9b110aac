"""The processes that a sweep's trials share end with it: at once where nobody waits for them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from pipeline.sweep.worker_process import WorkerProcess

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
