"""Processes beside a training, and the scheduler of the real kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
SEEN = f"from pathlib import Path; import os; print(os.nice(0), Path('{AUTOGROUP}').read_text())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="a kernel without autogrouping")
@pytest.mark.parametrize(("leads", "session"), [(True, "nice 10"), (False, "nice 0")])
def test_a_process_beside_a_training_steps_back_with_its_session_and_with_no_other(leads: bool, session: str) -> None:
    own = f"from pipeline.core.giving_way import give_way; give_way(); {SEEN}"
    code = own if leads else f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.startswith("10 ")
    assert session in done.stdout
