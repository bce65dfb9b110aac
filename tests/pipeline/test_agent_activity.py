"""What the processes of a script's rank do, seen from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.agent.running.examination import RankBeats
from tests.agent_records import node_start
from tests.waiting import HANG_S
from trainers.contract.beats import Phase, RankBeat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANK = """
import os, subprocess, sys, time
from trainers.contract.beats import hook_arguments
from trainers.script import rank_hook
eval("rank_hook.publish(" + hook_arguments() + ")")
print("up", flush=True)
for line in sys.stdin:
    if line.strip() == "child":
        subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"])
    if line.strip() == "write":
        open(sys.argv[1], "w").write("x")
    print("done", flush=True)
"""


class Rank:
    """A process that is a rank of a script, and what the agent of its node sees."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        place = self.state / "ranks" / "x" / "attempt_0" / "0"
        place.mkdir(parents=True)
        argv = [sys.executable, "-c", RANK, str(folder / "data")]
        env = {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(place / "error.json"), "PYTHONPATH": "."}
        root = Path(__file__).parents[2]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(argv, cwd=root, env=env, text=True, **pipes)  # type: ignore[call-overload]
        assert self.process.stdout.readline() == "up\n"
        self.beats = RankBeats(node_start(state_dir=str(self.state), run_dir=str(folder), first_rank=4))
        self.beat()

    def beat(self) -> RankBeat:
        (beat,) = self.beats.read()
        return beat

    def moves_while(self, word: str) -> int:
        before = self.beat().moves
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        return self.beat().moves - before


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    one = Rank(tmp_path)
    yield one
    one.process.kill()
    one.process.wait(HANG_S)


def test_a_rank_is_seen_by_its_number_and_counts_as_idle_while_it_waits(rank: Rank) -> None:
    time.sleep(0.1)
    rank.beat()
    first = rank.beat()
    time.sleep(0.3)
    then = rank.beat()
    assert (first.rank, first.pid, first.phase) == (4, rank.process.pid, Phase.RUNNING_A_SCRIPT)
    assert (then.moves, then.for_s >= 0.3) == (first.moves, True)


@pytest.mark.slow
def test_work_of_a_child_a_file_and_a_printed_line_are_moves_but_no_line_of_the_agent(rank: Rank) -> None:
    rank.moves_while("write")
    assert rank.moves_while("child") == 1
    assert rank.moves_while("write") == 1
    time.sleep(0.1)  # it prints, and waits again
    before = rank.beat().moves
    (rank.state / "ranks/x/attempt_0/0/stdout.log").write_text("step 50 loss 0.3\n")
    assert rank.beat().moves == before + 1
    (rank.state / "log").write_text("- | paceline: WARNING: process 12 is stopped\n")
    assert rank.beat().moves == before + 1
