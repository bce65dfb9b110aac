"""Runs from Python: the same keys, locks and folders as the command line's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from pipeline.cli.session import session
from tests.integration.commands import ALONE, ROOT, Project
from tests.waiting import HANG_S, wait_until

WORDS = ("experiment=quickstart", "tracking=none", *ALONE)


@pytest.mark.long
@pytest.mark.ci
def test_a_notebook_trains_reads_and_compares_runs(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow  # seconds, for this test alone

    words = (*project.overrides, *WORDS)
    run = paceline.train(*words, max_steps=4, seed=3)
    assert f"FINISHED {run.key}: test/accuracy " in capsys.readouterr().out
    assert paceline.train(*words, "trainer.max_steps=4", "seed=3", quiet=True) == run
    assert json.loads(project.doit("plan", *WORDS, "trainer.max_steps=4", "seed=3", "json=1", apart=True).stdout)[
        "data"
    ][0]["key"] == run.key  # fmt: skip
    assert (run.state, run.config["seed"]) == ("FINISHED", 3)
    assert [*run.history()["step"]] == [4]
    weights, exported = run.state_dict(), run.model()
    known = exported.state_dict()
    assert all(torch.equal(known[f"network.{name}"], value) for name, value in weights.items())
    assert exported(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)

    trials = paceline.sweep(*words, max_steps=4, seed=[3, 4], quiet=True)
    assert run.key in set(trials["key"])
    assert set(trials["state"]) == {"FINISHED"}
    listed = paceline.runs(project.overrides[0])
    assert set(listed["seed"]) == {3, 4}
    assert paceline.run("last", project.overrides[0]).key == listed.index[0]
    compared = paceline.compare(project.overrides[0], "experiment=quickstart", metric="val/accuracy")
    assert "A (n 2)" in str(compared)
    picture = paceline.plot(project.overrides[0], "experiment=quickstart", metric="train/loss")
    assert picture.save(project.folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    page = (ROOT / "docs/using-weights.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "log_model" in code]
    monkeypatch.chdir(project.folder)
    exec(snippet.replace('"last"', f'"last", "{project.overrides[0]}"'))
    registered = mlflow.pytorch.load_model("models:/digits/1")
    assert registered(torch.zeros(5, 1, 8, 8, dtype=torch.uint8)).shape == (5, 10)


@pytest.mark.ci
@pytest.mark.long
def test_wrong_values_are_errors_with_what_was_meant(project: Project) -> None:
    with pytest.raises(paceline.CommandError, match=r"did you mean quickstart\?") as caught:
        paceline.train(*project.overrides, "experiment=quikstart", quiet=True)
    assert caught.value.code == "usage"
    with pytest.raises(
        paceline.UsageError, match=r"name is the last part of \d+ fields\n  try: dataset__name=… or model__name"
    ):
        paceline.train(*project.overrides, name="x", quiet=True)
    with pytest.raises(paceline.UsageError, match="no such run"):
        paceline.run("zzz", project.overrides[0])


@pytest.mark.long
@pytest.mark.ci
def test_an_interrupt_of_the_kernel_stops_the_run_and_the_same_call_goes_on(project: Project) -> None:
    words = [*project.overrides, *WORDS, "trainer.epochs=400", "trainer.checkpoint_every_steps=20"]
    call = f"import paceline; print(paceline.train(*{words!r}, quiet=True).state)"
    kernel = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    logged = [project.folder / "runs"]
    wait_until(lambda: any('"step": 60,' in path.read_text() for path in logged[0].glob("*/metrics.jsonl")))
    kernel.send_signal(signal.SIGINT)
    _, err = kernel.communicate(timeout=HANG_S)
    assert b"KeyboardInterrupt" in err
    session.cache_clear()
    run = paceline.run("last", project.overrides[0])
    assert run.state == "KILLED"
    assert paceline.train(*words[:-2], "trainer.epochs=400", words[-1], quiet=True).state == "FINISHED"
    assert "resumed from step" in "".join(path.read_text() for path in Path(run.path).glob("attempts/2/*.log"))


@pytest.mark.long
@pytest.mark.ci
def test_the_notebook_of_the_examples_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    project = tmp_path / "project"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(project)], check=True)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = [f"{first}\nprint(repr({last}))" if last else first for first, last in map(_last_line, sources)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(shown)],
        cwd=project / "examples",
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nTrue\n" in done.stdout  # the second call trained nothing
    assert "B against A: " in done.stdout


def _last_line(source: str) -> tuple[str, str]:
    """What a cell does, and the expression that it ends with."""
    first, _, last = source.rpartition("\n")
    return first, last
