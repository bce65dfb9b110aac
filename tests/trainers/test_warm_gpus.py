"""Whether forks of a launcher can use its host's GPUs, and what it does where they can't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.tiny_runs import ROOT

RANK = """
import os, sys
def main():
    print("torch imported:", "torch" in sys.modules, "asks:", os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
if __name__ == "__main__":
    main()
"""
LAUNCH = """
import sys, torch
from trainers import torchrun
if {asked}:
    torch._C._cuda_getDeviceCount()  # as torch.cuda.is_available does without NVML
torch.cuda.is_available = lambda: {gpus}
sys.argv[:] = [torchrun.__file__, "--nproc-per-node=1", "--master-port=0", "--master-addr=127.0.0.1", "-m", "a_rank"]
torchrun.main(show_as=lambda words: None)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "gpus", "forked"),
    [
        pytest.param(False, True, True, id="GPUs, of which only NVML was asked"),
        pytest.param(True, True, False, id="GPUs, of which the runtime was asked"),
        pytest.param(True, False, True, id="no GPU"),
    ],
)
def test_ranks_are_forks_where_forks_can_use_the_gpus(tmp_path: Path, asked: bool, gpus: bool, forked: bool) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    launched = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(asked=asked, gpus=gpus)],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert launched.stdout == f"torch imported: {forked} asks: None\n", launched.stderr
