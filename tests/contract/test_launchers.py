"""What every launcher must do: the same assertions on each of them, with real torchrun where its part is tested."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest

from pipeline.cluster.attempt.run import stop_run
from pipeline.cluster.events import LogLine
from pipeline.core.errors import TrainingError
from tests.contract.conftest import HOSTILE, Bench, over_ssh_first
from tests.contract.stub import RUN_TO_END, SLEEP, make_script


def test_runs_to_the_end_and_brings_everything_back(bench: Bench) -> None:
    stub = bench.stub(RUN_TO_END, stand_in=bench.cluster.launcher == "pssh")  # with torchrun: test_two_node
    lines: list[LogLine] = []
    ran = bench.run(stub, lines)

    texts = {(line.rank, line.text) for line in lines}
    assert {(0, "hello from 0 of 2"), (1, "hello from 1 of 2")} <= texts
    assert {line.host for line in lines} == set(bench.hosts)
    assert (1, f"HOSTILE={json.dumps(HOSTILE)}") in texts

    summary = json.loads((stub.run_dir / "summary.json").read_text())
    assert summary == {"state": "FINISHED", "labels_bytes": 32}
    assert (stub.run_dir / "checkpoints" / "final.pt").read_bytes() == b"weights of final"
    assert (stub.run_dir / "predictions.json").exists()
    metrics = (stub.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"] for line in metrics] == [{"train/loss": 2.5}]

    plan = json.loads((stub.run_dir / "plan.json").read_text())
    assert plan["run_id"] == ran.run_id
    assert [node["first_rank"] for node in plan["nodes"]] == list(range(len(bench.hosts)))
    for host in bench.hosts:
        ended = json.loads((stub.run_dir / "attempts" / "1" / f"{host}.exit.json").read_text())
        assert (ended["event"], ended["code"]) == ("NodeExit", 0)
        assert "hello from" in (stub.run_dir / "attempts" / "1" / f"{host}.log").read_text()
    assert bench.left(stub) == 0
    assert not list(bench.folder.rglob("x")), "a value was run by a shell"


OF_ANYBODY = """
import os, sys, paceline
print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], [os.path.getsize(sys.argv[1]), *sys.argv[2:]])
if os.environ['RANK'] == '0':
    paceline.log(1, loss=2.5)
    (paceline.checkpoints() / 'checkpoint-1').mkdir()
    (paceline.checkpoints() / 'checkpoint-1' / 'model.bin').write_text('weights')
    open('model.txt', 'w').write('model')
"""


def test_a_script_gets_its_data_and_leaves_metrics_outputs_and_checkpoints(bench: Bench) -> None:
    stub = make_script(bench.folder, OF_ANYBODY, ["{data}", HOSTILE, "{seed}"])
    lines: list[LogLine] = []
    bench.run(stub, lines)
    texts = {(line.rank, line.text) for line in lines}
    assert {(rank, f"hello from {rank} of 2 {[32, HOSTILE, '7']}") for rank in (0, 1)} <= texts
    (row,) = map(json.loads, (stub.run_dir / "metrics.jsonl").read_text().splitlines())
    assert (row["step"], row["metrics"]) == (1, {"loss": 2.5})
    assert (stub.run_dir / "checkpoints/checkpoint-1/model.bin").read_text() == "weights"
    assert (stub.run_dir / "outputs/model.txt").read_text() == "model"
    assert json.loads((stub.run_dir / "summary.json").read_text())["metrics"] == {"loss": 2.5}
    assert bench.left(stub) == 0
    assert not list(bench.folder.rglob("x")), "an argument was run by a shell"


DETACHES = """
child = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
apart = {"APART": os.environ["PACELINE_NODE"]}  # and without the mark of the run
null = subprocess.DEVNULL
subprocess.run([sys.executable, "-c", child], env=apart, stdin=null, stdout=null, stderr=null, check=True)
finish(rank, run)
"""


@over_ssh_first
def test_a_detached_child_ends_with_the_run(bench: Bench) -> None:
    stub = bench.stub(DETACHES, stand_in=True)
    bench.run(stub)
    assert bench.count(f"APART={stub.digest[:12]}") == 0


PRUNED_WHEN_ASKED = """
print('up', flush=True)
while rank == 0 and not (run / 'prune').exists():
    time.sleep(0.01)
if rank == 0:
    finish(rank, run)
    for name in ('summary.json', 'checkpoints/final.pt', 'checkpoints/final.json'):
        (run / name).unlink()
    (run / 'pruned.json').write_text('{"step": 1, "epoch": 1, "metrics": {}}')
"""


@over_ssh_first
def test_the_wish_to_prune_reaches_rank_0_and_its_checkpoint_comes_back_without_a_result(bench: Bench) -> None:
    stub = bench.stub(PRUNED_WHEN_ASKED, stand_in=True)
    bench.run(stub, WhenUp(1, (stub.run_dir / "prune").touch))
    assert json.loads((stub.run_dir / "pruned.json").read_text())["epoch"] == 1
    assert (stub.run_dir / "checkpoints" / "step-00000001.pt").read_bytes() == b"weights of step-00000001"
    assert not (stub.run_dir / "summary.json").exists()
    assert bench.left(stub) == 0


def test_first_error_is_shown_with_host_rank_and_traceback_and_all_are_down(bench: Bench) -> None:
    by_torch = bench.cluster.launcher != "pssh"  # there the traceback on the rank's stderr tells
    program = "if rank == 1: raise ValueError('boom in rank 1')\ntime.sleep(600)"
    stub = bench.stub(program, record=by_torch, stand_in=not by_torch)
    with pytest.raises(TrainingError) as caught:
        bench.run(stub)
    host = bench.hosts[-1]
    assert re.search(rf"training failed on {host}, rank 1: ValueError: boom in rank 1", caught.value.what)
    assert "Traceback (most recent call last):" in caught.value.what
    assert bench.left(stub) == 0
    ended = json.loads((stub.run_dir / "attempts" / "1" / f"{host}.exit.json").read_text())
    assert [error["rank"] for error in ended["errors"]] == [1]


def test_killed_rank_is_named_and_nothing_is_left(bench: Bench) -> None:
    program = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    stub = bench.stub(program, stand_in=bench.cluster.launcher in ("local", "pssh"))  # with torchrun: the others
    with pytest.raises(TrainingError, match=r"rank 1: ended with signal 9 \(SIGKILL\)"):
        bench.run(stub)
    assert bench.left(stub) == 0


@pytest.mark.ci
@pytest.mark.long
@over_ssh_first
def test_a_run_folder_that_is_removed_ends_the_run_and_the_same_again_runs_to_its_end(bench: Bench) -> None:
    stub = bench.stub(
        "\nif (run / 'code' / 'again').exists():\n    finish(rank, run)\nelse:\n"
        "    print('up', flush=True)\n    time.sleep(600)",
        stand_in=True,
    )
    kept = bench.folder / "kept"
    shutil.copytree(stub.run_dir, kept)

    def remove() -> None:  # what has been sent to rank 0's node, where that has a folder of its own
        node = json.loads((stub.run_dir / "plan.json").read_text())["nodes"][0]
        bench.shell(node["host"], f"rm -rf {shlex.quote(node['run_dir'])}")

    with pytest.raises(TrainingError) as caught:
        bench.run(stub, WhenUp(2, remove))
    assert re.search(r"the run's folder \S.* was removed while the run was going on", caught.value.what)
    assert any(host in caught.value.what for host in bench.hosts)
    assert bench.left(stub) == 0
    shutil.copytree(kept, stub.run_dir, dirs_exist_ok=True)
    (stub.run_dir / "code" / "again").touch()
    bench.run(stub)
    assert (stub.run_dir / "checkpoints" / "final.pt").read_bytes() == b"weights of final"
    assert bench.left(stub) == 0


@pytest.mark.ci
@pytest.mark.long
@over_ssh_first
def test_stop_from_another_place_ends_a_run_whose_workers_ignore_sigterm(bench: Bench) -> None:
    stub = bench.stub(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '600'], env={});"
        "print('up', flush=True); time.sleep(600)",
        stand_in=True,
    )
    stop = partial(stop_run, bench.cluster, stub.run_dir, stub.digest[:12])
    with pytest.raises(TrainingError, match="stopped"):
        bench.run(stub, WhenUp(2, stop))
    assert bench.left(stub) == 0


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)], ids=["ctrl-c twice", "term"])
def test_signal_ends_every_process_and_says_killed(bench: Bench, numbers: tuple[int, ...]) -> None:
    stub = bench.stub(SLEEP, stand_in=True)
    with bench.spawn(stub) as attempt:
        lines = bench.see_both_up(attempt)
        for number in numbers:
            os.killpg(attempt.pid, number)
            time.sleep(0.3)
        rest = lines.read()
    assert attempt.returncode == 1
    assert f"KILLED stopped by {signal.Signals(numbers[0]).name}" in rest
    assert bench.left(stub) == 0


def test_signal_during_the_start_leaves_nothing(bench: Bench) -> None:
    stub = bench.stub(SLEEP, stand_in=True)
    with bench.spawn(stub) as attempt:
        while not (stub.run_dir / "plan.json").exists():
            time.sleep(0.005)
        os.kill(attempt.pid, signal.SIGINT)
        assert attempt.stdout is not None
        assert "KILLED stopped by SIGINT" in attempt.stdout.read()
    assert bench.left(stub) == 0


class WhenUp(list[LogLine]):
    """Calls ``action`` when the given number of ranks have printed "up"."""

    def __init__(self, ranks: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.missing, self.action = ranks, action

    def append(self, line: LogLine) -> None:
        if line.text == "up":
            self.missing -= 1
            if self.missing == 0:
                self.action()
