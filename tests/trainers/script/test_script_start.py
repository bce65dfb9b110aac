"""A script from its snapshot to its results, and the ways in which scripts misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipeline.core import documents
from tests.trainers.script.runs import ROOT, ScriptRun

pytestmark = pytest.mark.slow

LOGS = "import paceline; paceline.log(1, loss=0.5)\n"
HOSTILE = ["two words", "it's", '"', "$(touch pwned)", "a\nb", "", "{run}"]


def test_a_script_leaves_metrics_outputs_and_a_summary(run: ScriptRun) -> None:
    script = LOGS + "paceline.finish(best=0.25); open('model.pt', 'w').write('w')\n"
    script += "(paceline.run_dir() / 'a.txt').touch()"
    run.write(script, outputs=["*.pt", "{run}/*.txt"]).start()
    assert run.rows() == [(1, {"loss": 0.5}), (1, {"best": 0.25})]
    digest = "50e721e49c013f00c62cf59f2163542a9d8df02464efeb615d31051b0fddc326"
    assert run.read("outputs.json")["model.pt"] == {"sha256": digest, "bytes": 1}
    assert sorted(run.read("outputs.json")) == ["a.txt", "model.pt"]
    assert (run.path / "outputs" / "model.pt").read_text() == "w"
    summary = documents.read_sealed(run.path / "summary.json")
    assert 0 < summary.pop("duration_s") < 60
    assert (left := summary.pop("outputs_sha256"))["outputs/model.pt"] == digest
    assert sorted(left) == ["metrics.jsonl", "outputs.json", "outputs/a.txt", "outputs/model.pt"]
    assert summary == {"steps": 1, "metrics": {"loss": 0.5, "best": 0.25}, "unkeyed": {}}
    assert not (run.path / "work").exists()


def test_the_example_of_the_documentation_runs_as_printed(run: ScriptRun) -> None:
    page = (ROOT / "docs" / "script-metrics.md").read_text()
    (script,) = re.findall(r"^```python\n(import paceline.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    run.write(script, outputs=["notes.txt"]).start()
    assert (run.rows()[0], run.rows()[-1]) == ((10, {"loss": 0.1}), (100, {"final_loss": 0.01}))


def test_arguments_reach_the_script_as_they_were_typed(run: ScriptRun) -> None:
    script = "import json, sys; json.dump(sys.argv[1:], open('argv.json', 'w'))"
    run.write(script, args=HOSTILE, outputs=["argv.json"]).start()
    assert run.read("outputs/argv.json") == [*HOSTILE[:-1], str(run.path / "outputs")]
    assert not list(run.project.rglob("pwned"))


def test_the_script_gets_its_environment_and_can_not_alter_the_snapshot(run: ScriptRun) -> None:
    script = (
        "import helper, os, pathlib, sys\n"
        "assert sys.stdin.read() == '' and helper.X == 1 and os.environ['WHERE'].endswith('/checkpoints')\n"
        "pathlib.Path(__file__).with_name('helper.py').write_text('broken')\n"
        "pathlib.Path('out').mkdir(); os.chdir('/'); " + LOGS
    )
    run.write(script, files={"helper.py": "X = 1\n"}, env={"WHERE": "{checkpoints}"}).start()
    assert (run.path / "code" / "helper.py").read_text() == "X = 1\n"
    assert run.rows() == [(1, {"loss": 0.5})]


def test_a_script_that_logs_nothing_finishes_and_that_is_said(run: ScriptRun) -> None:
    assert "paceline: WARNING: the script logged no metric; what is recorded: paceline.log" in run.write("").start()
    assert (run.read("summary.json")["steps"], run.read("summary.json")["metrics"]) == (None, {})
    assert "nonfinite" not in run.read("summary.json")


def test_nan_is_told_once_with_how_often_it_came(run: ScriptRun) -> None:
    script = (
        "import paceline\nfor step in range(1, 1201): paceline.log(step, loss=float('nan'), lr=1.0)\n"
        "paceline.log(9, acc=float('inf'))\n"
    )
    assert run.write(script).start() == (
        "paceline: WARNING: values that are no finite numbers were not recorded: loss 1,200 times (first nan at step "
        "1), acc once (inf at step 9)\n"
    )
    assert run.read("summary.json")["nonfinite"] == {
        "loss": {"first": "nan", "step": 1, "count": 1200},
        "acc": {"first": "inf", "step": 9, "count": 1},
    }
    said = run.write("import paceline\nfor i in range(10): paceline.log(1, **{f'm{i}': float('nan')})").start()
    assert said.endswith(" m7 once (nan at step 1) and 2 more metrics\n")
    assert "no metric" not in said


def test_exit_code_0_without_its_outputs_is_a_failure(run: ScriptRun) -> None:
    said = run.write(LOGS, outputs=["outputs/*.pt", "train.py"]).start(code=1)
    assert "paceline: error: train.py ended with exit code 0 without outputs/*.pt, train.py\n" in said
    assert not (run.path / "summary.json").exists()


def test_the_exit_code_is_the_scripts(run: ScriptRun) -> None:
    run.write(LOGS + "raise SystemExit(3)").start(code=3)
    assert run.rows() == [(1, {"loss": 0.5})]
    assert not (run.path / "summary.json").exists()
    run.write("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").start(code=-signal.SIGKILL)


def test_term_reaches_the_script_and_one_that_ignores_it_is_waited_for(run: ScriptRun) -> None:
    script = (
        "import signal, time, sys\nsaw = []\nsignal.signal(signal.SIGTERM, lambda *_: saw.append(1))\n"
        "print('ready', flush=True)\nwhile not saw: time.sleep(0.01)\nprint('ignored', flush=True); sys.exit(4)"
    )
    process = run.write(script).begin()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=60)[0].startswith("ignored\n")
    assert process.returncode == 4


def test_a_script_that_saves_and_ends_well_when_it_is_stopped_has_not_finished(run: ScriptRun) -> None:
    script = (
        "import time, paceline\npaceline.should_stop()\nprint('ready', flush=True)\n"
        "while not paceline.should_stop(): time.sleep(0.01)\nopen('state.txt', 'w').write('step 1')\n"
    )
    process = run.write(script).begin()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert "train.py ended with exit code 0, but was stopped: it does not count as finished" in said
    assert process.returncode == 128 + signal.SIGTERM
    assert not (run.path / "summary.json").exists()
    assert [path.read_text() for path in run.path.rglob("state.txt")] == ["step 1"]


def test_an_idle_daemon_of_the_script_does_not_hold_up_the_end(run: ScriptRun, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    script = (
        LOGS + "import os, sys\nos.mkfifo(sys.argv[1])\nif os.fork() == 0:\n    os.setsid()\n"
        "    os.open(sys.argv[1], os.O_RDONLY); os._exit(0)\n"
    )
    run.write(script, args=[str(pipe)]).start("bash", "-c", '"$0" "$@" > /dev/null 2>&1', sys.executable)
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # it still waits there, where its agent would end it
    assert run.read("summary.json")["steps"] == 1


def test_another_node_records_no_metrics_and_leaves_what_it_took_in(run: ScriptRun) -> None:
    run.write(LOGS, outputs=["*.pt"]).start(node_rank=1)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints",
        "code",
        "config.json",
        "nodes",
        "outputs",
    ]
    assert [path.name for path in (run.path / "nodes/1").iterdir()] == ["dependencies.json"]


def test_starting_over_drops_earlier_rows_and_going_on_keeps_those_before(run: ScriptRun) -> None:
    script = (
        "import paceline, pathlib, sys\nfirst = int(pathlib.Path(sys.argv[2]).read_text()) if sys.argv[1:] else 0\n"
        "for step in range(first, first + 3): paceline.log(step, loss=step + 100 * bool(first))\n"
        "(paceline.checkpoints() / 'last.pt').write_text('2')\n"
    )
    run.write(script, args={"resume": "{resume}"}).start()
    assert [step for step, _ in run.rows()] == [0, 1, 2]
    run.start()
    assert run.rows() == [
        (0, {"loss": 0}),
        (1, {"loss": 1}),
        (2, {"loss": 102}),
        (3, {"loss": 103}),
        (4, {"loss": 104}),
    ]
    run.write(script.replace("sys.argv[1:]", "0")).start()
    assert [step for step, _ in run.rows()] == [0, 1, 2]


def test_the_last_rows_of_an_attempt_that_was_killed_are_not_lost(run: ScriptRun) -> None:
    """Going on from its last checkpoint the script logs none of them again, only its result."""
    script = (
        "import os, paceline, signal, sys\n"
        "if not sys.argv[1:]:\n"
        "    paceline.log(1, loss=1)\n"
        "    paceline.log(2, loss=2)\n"
        "    (paceline.checkpoints() / 'last.pt').write_text('2')\n"
        "    paceline.finish(best=0)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    sys.exit()\n"
        "paceline.finish(best=1)\n"
    )
    run.write(script, args={"resume": "{resume}"}, torchrun=False).start(code=-signal.SIGKILL)
    assert run.rows() == []
    run.start()
    assert run.rows() == [(1, {"loss": 1}), (2, {"loss": 2}), (2, {"best": 1})]
    assert documents.read_sealed(run.path / "summary.json")["metrics"] == {"loss": 2, "best": 1}
    assert not (run.path / "work").exists()


def test_a_script_that_hears_that_it_was_pruned_leaves_pruned_json(run: ScriptRun) -> None:
    run.write(LOGS + "assert paceline.should_stop()", outputs=["*.pt"])
    (run.path / "prune").touch()
    assert "paceline: pruned at step 1" in run.start()
    assert run.read("pruned.json") == {"step": 1, "epoch": 0, "metrics": {"loss": 0.5}}


def test_metrics_that_can_not_be_written_end_the_run_at_once(run: ScriptRun) -> None:
    script = "import os, sys, time\nos.remove(sys.argv[1] + '/../metrics.jsonl')\n" + LOGS + "time.sleep(600)"
    said = run.write(script, args=["{run}"]).start(code=1)
    assert said == f"paceline: error: {run.path}/metrics.jsonl: No such file or directory\n"


def test_a_program_that_is_not_there_is_told_in_one_line(run: ScriptRun) -> None:
    for word, said in (
        ("nosuchprogram", "no nosuchprogram in PATH=/usr/bin:sub; install it on this host, or set program.env.PATH"),
        ("x", "no x in PATH=/usr/bin:sub; "),  # not executable
        ("./sub", "work/node0/above/above/code/sub is no program here"),
        ("/no/such", "/no/such is no program here"),
    ):
        run.write("", files={"sub/x": ""}, script=None, command=[word], env={"PATH": "/usr/bin:sub"})
        told = run.start("/bin/echo", "started", code=1)
        assert told.startswith(f"paceline: error: program.command=[{word}]: "), told
        assert said in told
        assert told.count("\n") == 1
    (run.path / "code/sub/x").write_text("#!/bin/sh\n")
    (run.path / "code/sub/x").chmod(0o755)
    for word, found in (("x", "x"), ("./sub/x", f"{run.path}/work/node0/above/above/code/sub/x")):
        run.write("", script=None, command=[word], env={"PATH": "/usr/bin:sub"})
        assert f"--no-python -- {found}" in run.start("/bin/echo")


def test_the_launching_process_imports_neither_torch_nor_anything_else_that_is_installed() -> None:
    code = "import trainers.script.start, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = set(json.loads(done.stdout.replace("'", '"')))
    assert names - set(sys.stdlib_module_names) - {"__main__"} == {"paceline", "trainers"}


def test_without_torchrun_one_process_says_what_rank_0_would(run: ScriptRun) -> None:
    script = "import os, sys; assert 'RANK' not in os.environ; print('step=1 loss=0.5'); sys.exit(len(sys.argv) - 1)"
    run.write(script, torchrun=False, args=["a"], metrics_pattern=r"step=(?P<step>\d+) loss=(?P<loss>\S+)")
    said = run.start(sys.executable, "-m", "torch.distributed.run", f"--log-dir={run.path}/ranks", code=1)
    assert said == "paceline: error: train.py ended with exit code 1\n"
    assert run.rows() == [(1, {"loss": 0.5})]
    assert (run.path / "ranks/alone/attempt_0/0/stdout.log").read_text() == "step=1 loss=0.5\n"


def test_two_ranks_under_torchrun(run: ScriptRun) -> None:
    script = (
        "import os, paceline\nrank = int(os.environ['RANK'])\npaceline.log(1, rank=rank)\n"
        "print(f\"step=2 loss={int(os.environ['WORLD_SIZE']) / 4}\")\n"
        "open(os.path.join(os.environ['PROJECT'], 'hidden.txt')).read() if rank else None\n"
    )
    pattern = r"step=(?P<step>\d+) loss=(?P<loss>\S+)"
    run.write(script, metrics_pattern=pattern)
    (run.project / "hidden.txt").touch()
    options = ("--standalone", "--nproc-per-node=2", "--redirects=3", f"--log-dir={run.path}/ranks")
    said = run.start(sys.executable, "-m", "torch.distributed.run", *options, env={"PROJECT": str(run.project)})
    assert sorted(run.rows()) == [(1, {"rank": 0.0}), (2, {"loss": 0.5})]
    assert "paceline: the key is not complete: hidden.txt was read; add it to program.inputs: " in said


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("has_group", [False, True], ids=["without a group", "with a group"])
def test_ranks_that_never_had_a_process_group_are_warned_of(run: ScriptRun, has_group: bool) -> None:
    group = "import torch.distributed as d\nd.init_process_group('gloo')\nd.destroy_process_group()\n"
    run.write(f"import paceline\n{group * has_group}paceline.log(1, loss=1)\n")
    options = ("--nnodes=1", "--nproc-per-node=2", "--redirects=3", f"--log-dir={run.path}/ranks")
    said = run.start(sys.executable, "-m", "torch.distributed.run", "--standalone", *options)
    warning = "WARNING: no process group was ever made in ranks 0 to 1 of 2: each rank ran all of train.py and wrote"
    assert (warning in said) == (not has_group)


@pytest.mark.ci
@pytest.mark.long
def test_what_a_script_logs_to_mlflow_itself_is_recorded_and_leaves_nothing_in_its_folder(run: ScriptRun) -> None:
    script = """
        import os, mlflow
        with mlflow.start_run(run_name="mine"):
            mlflow.log_metrics({"loss": 0.5, "eval/acc": 0.25}, step=3)
        print("left", os.listdir())
        """
    said = run.write(textwrap.dedent(script)).start()
    assert run.rows() == [(3, {"eval/acc": 0.25, "loss": 0.5})]
    assert "left ['train.py']" in said
    run.write("import os; print(os.environ['MLFLOW_TRACKING_URI'])")
    assert "http://there" in run.start(env={"MLFLOW_TRACKING_URI": "http://there"})


LOGS_ON = {
    "module": "paceline.log(step, loss=step)",
    "table": "print(step, step, sep=',', file=table, flush=True)",
    "events": "events.add_scalar('loss', step, step); events.flush()",
    "objects": "print(json.dumps({'step': step, 'loss': step}), file=objects, flush=True)",
    "lines": "print(f'step={step} loss={step}', flush=True)",
}
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


def rows_before(run: ScriptRun) -> list[int]:
    path = run.path / "attempts/2/before/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


IN_CI = [pytest.mark.long, pytest.mark.ci]
RANK, PARENT = "os.getpid()", "os.getppid()"  # the parent has then recorded no row


@pytest.mark.parametrize(
    ("how", "saved", "killed", "before"),
    [
        *((how, "{checkpoints}/state.txt", RANK, [5, 6]) for how in ("module", "table", "objects", "lines")),
        ("module", "{run}/state.txt", RANK, [1, 2, 3, 4, 5, 6]),
        ("lines", "state.txt", RANK, [1, 2, 3, 4, 5, 6]),
        *(
            pytest.param(how, saved, PARENT, before, marks=IN_CI)
            # not "lines": each attempt has logs of its own
            for how in ("module", "table", "events")
            for saved, before in (("{checkpoints}/state.txt", [5, 6]), ("state.txt", [1, 2, 3, 4, 5, 6]))
        ),
    ],
)
def test_of_a_killed_attempt_rows_up_to_the_checkpoint_that_the_next_one_finds_stay(
    run: ScriptRun, how: str, saved: str, killed: str, before: list[int]
) -> None:
    """Without a checkpoint the script starts over: all rows are set aside."""
    script = SCRIPT.format(begins=BEGINS.get(how, ""), logs=LOGS_ON[how], saved=saved, killed=killed)
    pattern = r"step=(?P<step>\d+) loss=(?P<loss>\S+)" if how == "lines" else None
    run.write(script, torchrun=False, metrics_pattern=pattern)
    for number in (1, 2):
        env = {"ONCE": f"{run.project}/once", "PACELINE_NODE": f"key-abc123-{number}-ffff:0"}
        log_dir = f"--log-dir={run.path}/ranks{number}"
        said = run.start("python3", log_dir, env=env, code=0 if number == 2 else -signal.SIGKILL)
    assert run.rows() == [(step, {"loss": step}) for step in range(1, 11)]
    assert rows_before(run) == before
    if killed == RANK:
        assert (f"{ANEW}attempts/2/before/metrics.jsonl\n" in said) == (len(before) == 6)


def test_a_script_that_saves_checkpoints_and_reads_none_starts_its_rows_anew(run: ScriptRun) -> None:
    run.write(
        "import paceline, sys\nfor step in range(1, 4): paceline.log(step, loss=step)\n"
        "(paceline.checkpoints() / 'a.pt').write_text('1')\nsys.exit(len(sys.argv) - 1)",
        args=["x"],
    )
    run.start(code=1)
    run.start(code=1, env={"PACELINE_NODE": "key-abc123-2-ffff:0"})
    assert [step for step, _ in run.rows()] == rows_before(run) == [1, 2, 3]
