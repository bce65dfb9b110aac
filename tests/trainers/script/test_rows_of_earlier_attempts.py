"""Rows that an attempt logged stay, or are set aside, whatever the script of the next one goes on from."""

from __future__ import annotations

import json
import signal

import pytest

from tests.trainers.script.runs import ScriptRun

pytestmark = pytest.mark.slow

LOGS = {
    "module": "paceline.log(step, loss=step)",
    "table": "print(step, step, sep=',', file=table, flush=True)",
    "events": "events.add_scalar('loss', step, step); events.flush()",
    "objects": "print(json.dumps({'step': step, 'loss': step}), file=objects, flush=True)",
    "lines": "print(f'step={step} loss={step}', flush=True)",
}
_EVENTS = pytest.param("events", marks=[pytest.mark.long, pytest.mark.ci])  # each imports TensorBoard and torch
KEPT = ("module", "table", _EVENTS)
"""What is left of a killed attempt where the next one finds it: torchrun's logs are an attempt's own."""
SCRIPT = """
import json, os, pathlib, signal, paceline
{begins}
saved = pathlib.Path({saved!r}.format(run=paceline.run_dir(), checkpoints=paceline.checkpoints()))
first = int(saved.read_text()) if saved.exists() else 0
for step in range(first + 1, 11):
    {logs}
    if step == 4:
        saved.write_text(str(step))
    if step == 6 and not os.path.exists(os.environ["ONCE"]):
        open(os.environ["ONCE"], "w").close()
        os.kill({killed}, signal.SIGKILL)
        os._exit(1)
"""
BEGINS = {
    "table": "table = open(paceline.run_dir() / 'log.csv', 'a')\nprint('step,loss', file=table, flush=True)",
    "objects": "objects = open(paceline.run_dir() / 'log.jsonl', 'a')",
    "events": "from torch.utils.tensorboard import SummaryWriter\nevents = SummaryWriter(paceline.run_dir())",
}
ANEW = (
    "paceline: note: metrics.jsonl begins anew: what earlier attempts had logged (6 rows, of steps 1 to 6) is kept in "
)


def killed_at_6(run: ScriptRun, how: str, saved: str, killed: str = "os.getpid()") -> str:
    """What the second attempt printed; the first one's script, or what starts it, was killed after step 6."""
    script = SCRIPT.format(begins=BEGINS.get(how, ""), logs=LOGS[how], saved=saved, killed=killed)
    pattern = r"step=(?P<step>\d+) loss=(?P<loss>\S+)" if how == "lines" else None
    run.write(script, torchrun=False, metrics_pattern=pattern)
    for number in (1, 2):
        env = {"ONCE": f"{run.project}/once", "PACELINE_NODE": f"key-abc123-{number}-ffff:0"}
        log_dir = f"--log-dir={run.path}/ranks{number}"
        said = run.start("python3", log_dir, env=env, code=0 if number == 2 else -signal.SIGKILL)
    return said


def rows_before(run: ScriptRun) -> list[int]:
    path = run.path / "attempts/2/before/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("how", [*KEPT, "objects", "lines"])
def test_of_a_script_that_finds_its_checkpoint_itself_rows_before_it_stay(run: ScriptRun, how: str) -> None:
    said = killed_at_6(run, how, "{checkpoints}/state.txt")
    assert run.rows() == [(step, {"loss": step}) for step in range(1, 11)]
    assert rows_before(run) == [5, 6]
    assert "begins anew" not in said


@pytest.mark.parametrize(("how", "saved"), [("module", "{run}/state.txt"), ("lines", "state.txt")])
def test_of_a_script_that_starts_over_earlier_rows_are_set_aside_and_that_is_said(
    run: ScriptRun, how: str, saved: str
) -> None:
    said = killed_at_6(run, how, saved)
    assert run.rows() == [(step, {"loss": step}) for step in range(1, 11)]
    assert rows_before(run) == [1, 2, 3, 4, 5, 6]
    assert f"{ANEW}attempts/2/before/metrics.jsonl\n" in said


def test_a_script_that_saves_checkpoints_and_reads_none_starts_its_rows_anew(run: ScriptRun) -> None:
    run.write(
        "import paceline, sys\nfor step in range(1, 4): paceline.log(step, loss=step)\n"
        "(paceline.checkpoints() / 'a.pt').write_text('1')\nsys.exit(len(sys.argv) - 1)",
        args=["x"],
    )
    run.start(code=1)
    run.start(code=1, env={"PACELINE_NODE": "key-abc123-2-ffff:0"})
    assert [step for step, _ in run.rows()] == rows_before(run) == [1, 2, 3]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("how", KEPT)
def test_what_was_logged_in_the_last_moment_before_a_kill_of_all_is_set_aside_too(run: ScriptRun, how: str) -> None:
    """What starts the script is killed with it, before it has recorded a row."""
    killed_at_6(run, how, "state.txt", killed="os.getppid()")
    assert rows_before(run) == [1, 2, 3, 4, 5, 6]
    assert run.rows() == [(step, {"loss": step}) for step in range(1, 11)]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("how", KEPT)
def test_what_was_logged_in_the_last_moment_stays_up_to_the_checkpoint(run: ScriptRun, how: str) -> None:
    killed_at_6(run, how, "{checkpoints}/state.txt", killed="os.getppid()")
    assert rows_before(run) == [5, 6]
    assert run.rows() == [(step, {"loss": step}) for step in range(1, 11)]
