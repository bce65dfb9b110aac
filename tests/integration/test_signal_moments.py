"""A signal, or a removed folder, at the moments beside the training: it is said, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, ROOT, Project
from tests.integration.conftest import FINISHED
from tests.waiting import ended

WORDS = ("experiment=quickstart", "trainer.max_steps=2", *ALONE)
LAYING_OUT = "name == 'open' and '/.config.json' in str(args[0])"
EVALUATING = "name == 'subprocess.Popen' and 'pipeline.evaluation' in args[1]"
RECORDING = "name == 'open' and str(args[0]).endswith('tracking.json') and os.path.exists(REPORT)"
SEALING = "name == 'open' and '/.result.json' in str(args[0])"
COLLECTING = "name == 'tempfile.mkdtemp' and '/.collect' in str(args[0])"


def stopped_when(
    project: Project, moment: str, number: signal.Signals, *words: str
) -> subprocess.CompletedProcess[str]:
    """``doit train``, which is sent the signal as soon as the audit event ``moment`` happens in it."""
    return disturbed_when(project, moment, f"os.kill(os.getpid(), {number})", (*WORDS, *words))


def disturbed_when(project: Project, moment: str, what: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """``doit train``, in which the statement ``what`` is run as soon as the audit event ``moment`` happens."""
    hook = project.folder / "hook"
    hook.mkdir(exist_ok=True)
    run_dir = next((path.parent for path in project.folder.glob("runs/*/key.json")), Path("none"))
    report = run_dir / "evaluation" / "report.json"
    (hook / "sitecustomize.py").write_text(
        f"import os, shutil, sys\nREPORT, SENT = {str(report)!r}, []\n"
        "def stop(name, args):\n"
        f"    if not SENT and {moment}:\n"
        f"        SENT.append(1); {what}\n"
        "if 'doit' in sys.orig_argv[1:3]:\n    sys.addaudithook(stop)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{hook}"}
    return ended(project.argv("train", *words), cwd=ROOT, env=env)


@pytest.mark.long
def test_a_signal_before_and_after_the_training_stands_in_the_journal(recording: Project) -> None:
    done = stopped_when(recording, LAYING_OUT, signal.SIGTERM)
    assert done.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; no process of the run is left" in done.stdout
    assert not (recording.only_run() / "journal.jsonl").exists()  # nothing was started
    for moment, number, before in (
        (EVALUATING, signal.SIGTERM, "RUNNING"),
        (EVALUATING, signal.SIGHUP, "KILLED"),
        (RECORDING, signal.SIGTERM, "FINISHED"),
    ):
        done = stopped_when(recording, moment, number)
        key = recording.only_run().name
        assert done.returncode == 128 + number
        assert f"ERROR: KILLED {key}: stopped by {number.name}; no process of the run is left\n" in done.stdout
        assert "the same command again; the training is done and is not repeated" in done.stdout
        assert recording.states()[-2:] == [before, "KILLED"]
        assert not (recording.only_run() / "result.json").exists()
    done = stopped_when(recording, SEALING, signal.SIGTERM)
    assert f"ERROR: stopped by SIGTERM; run {key} is finished" in done.stdout
    assert recording.states()[-1] == "FINISHED"
    assert recording.states().count("RUNNING") == 1
    seconds = [json.loads(line)["time"] for line in (recording.only_run() / "journal.jsonl").read_text().splitlines()]
    assert 0 < recording.result()["duration_s"] < seconds[-1] - seconds[0]
    again = recording.doit("train", *WORDS)
    assert (again.returncode, "is finished" in again.stdout) == (0, True), again.stdout


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "folder", "missing"),
    [(EVALUATING, "checkpoints", "checkpoints/final.pt"), (SEALING, ".", ".result.json")],
)
def test_what_is_removed_after_the_training_makes_no_result(
    finished: Project, moment: str, folder: str, missing: str
) -> None:
    run_dir = finished.only_run()
    (run_dir / "result.json").unlink()
    removed = disturbed_when(finished, moment, f"shutil.rmtree({str(run_dir / folder)!r})", FINISHED)
    assert removed.returncode == 1
    assert f"{run_dir / missing}" in removed.stdout
    assert "is missing: it, or the whole folder, was removed while the run was going on" in removed.stdout
    assert "  try: the same command again\n" in removed.stdout
    assert "FINISHED" not in removed.stdout
    assert not (run_dir / "result.json").exists()
