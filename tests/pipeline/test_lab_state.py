"""Which of the lab's processes live, whatever else runs on this computer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.lab import state

NAMED = r"""
import sys, time
open("/proc/self/comm", "wb").write(b"caf\xe9")
print("named", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the lab needs Linux")
def test_a_process_whose_name_is_no_utf8_is_no_error_of_the_lab() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"named\n"
            assert b"(caf\xe9)" in Path(f"/proc/{child.pid}/stat").read_bytes()
            assert state._child(os.getpid(), "caf\ufffd") == child.pid
        finally:
            child.kill()
