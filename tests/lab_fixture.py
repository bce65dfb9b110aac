"""The fixture ``lab``: two real hosts, raised once per test process (xdist worker) and removed at its end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from pipeline.lab import Lab, down, missing, up
from tests.waiting import HANG_S


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running lab of two hosts in a folder of its own (its path has a space). Leave it as it was."""
    require_lab()
    root = tmp_path_factory.mktemp("two hosts")
    try:
        yield up(root, 2)
    finally:
        down(root)


def require_lab() -> None:
    """Skip the test, with the reason, where no lab can run."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason.what)


def on(lab: Lab, host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command on a lab host over ssh, to its end; at most 60 s."""
    argv = ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", *options, host, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
