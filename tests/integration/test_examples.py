"""The folders of examples/: the commands of each README as typed, which train, and train nothing when typed again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.places import HOME
from tests.integration.light import light_python
from tests.slurm_fixture import Slurm
from tests.waiting import HANG_S, ended, wait_until

EXAMPLES = HOME / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/dodo.py"))
_TRAINING = "train|sweep|torchrun|run"


@dataclass(frozen=True)
class Example:
    """A copy of an example's folder, in which its commands are typed."""

    folder: Path

    @property
    def commands(self) -> str:
        """What its README says to type."""
        (block,) = re.findall(r"^```\n(.*?)^```$", (self.folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        return str(block)

    def typed(self, lines: str) -> str:
        """What the lines print, in a shell that ends with the first that fails; nothing is recorded in MLflow."""
        python = light_python(forks_ranks=True)
        added = f'[[ $1 =~ ^({_TRAINING})$ ]] && set -- "$1" tracking=none "${{@:2}}"'
        doit = f'doit() {{ {added}; python -m doit "$@"; }}'
        started = f"set -e\npython() {{ '{python}' \"$@\"; }}\n{doit}\n{lines}"
        return ran(["bash", "-c", started], self.folder, {})

    def launches(self) -> int:
        return sum(path.read_text().count("RUNNING") for path in self.folder.glob("runs/*/journal.jsonl"))

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the only run: of whole lines."""
        lines = [
            line for path in self.folder.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines(True)
        ]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps_made(self) -> int:
        return len([*self.folder.glob("runs/steps/*/step.json")])


def ran(argv: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    done = ended(argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(HOME), **variables})
    assert done.returncode == 0, done.stdout
    return done.stdout


def copy_of(name: str, folder: Path) -> Example:
    left = shutil.ignore_patterns("runs", "data", "photos", ".paceline", "mlflow.db*", "__pycache__")
    return Example(Path(shutil.copytree(EXAMPLES / name, folder / name, ignore=left)))


def needs(*names: str) -> None:
    """None of these is in requirements.lock."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"not installed here: pip install {' '.join(lacking)}")


@pytest.mark.parametrize(
    ("name", "packages", "runs"),
    [
        ("ddp", (), 2),
        ("nanogpt", (), 2),
        ("resume", (), 1),
        ("own_model", (), 2),
        ("steps", (), 2),
        ("accelerate", ("accelerate",), 1),
        ("huggingface", ("transformers", "accelerate"), 2),
        ("lightning", ("lightning",), 3),
    ],
)
@pytest.mark.ci
@pytest.mark.long
def test_the_commands_of_an_example_train_and_start_nothing_when_typed_again(
    name: str, packages: tuple[str, ...], runs: int, tmp_path: Path
) -> None:
    needs(*packages)
    example = copy_of(name, tmp_path)
    said = example.typed(example.commands)
    assert "FINISHED" in said
    assert len([*example.folder.glob("runs/*/result.json")]) == example.launches() == runs, said
    assert "the key is not complete" not in said
    made = example.steps_made()
    again = example.typed(example.commands)
    assert "is finished" in again
    assert (example.launches(), example.steps_made()) == (runs, made), again


@pytest.mark.ci
@pytest.mark.long
def test_a_resume_is_proven_and_without_a_line_of_it_the_culprit_is_named(tmp_path: Path) -> None:
    example = copy_of("resume", tmp_path)
    said = example.typed(example.commands.replace("prove last", "prove last --kills 1"))
    assert re.search(r"PROVEN \w{12}: killed 1 time \(after [\d.]+ s\), and outputs, metrics and steps are equal", said)
    (line,) = [line for line in example.commands.splitlines() if " torchrun " in line][:1]
    assert re.search(r"PROVEN \w{12} before: runs/", example.typed(line.replace("torchrun ", "torchrun --prove ", 1)))
    script = example.folder / "train.py"
    whole = script.read_text()
    for line, culprit in (
        ("torch.set_rng_state", "random state not"),
        ("optimizer.load_state_dict", "optimizer state"),
    ):
        script.write_text("".join(part for part in whole.splitlines(True) if line not in part))
        lines = example.commands.replace("prove last", "prove last --kills 1 || true")
        said = example.typed(lines)
        if (
            "it isn't deterministic" in said
        ):  # torch aborts now and then when a process group ends: the run went on, too
            shutil.rmtree(example.folder / "runs")
            said = example.typed(lines)
        assert f"culprit  {culprit}" in said, said


@pytest.mark.ci
@pytest.mark.long
def test_the_weights_of_a_run_are_data_of_the_run_that_fine_tunes_them(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    example = copy_of("huggingface", tmp_path)
    (line,) = re.findall(r"`(doit torchrun .*)`", (example.folder / "README.md").read_text())
    example.typed(example.commands.splitlines()[0])
    (first,) = example.folder.glob("runs/*/result.json")
    before = json.loads(first.read_text())["metrics"]["eval_accuracy"]
    example.typed(line.replace("KEY", first.parent.name))
    (second,) = {*example.folder.glob("runs/*/result.json")} - {first}
    assert json.loads((second.parent / "key.json").read_text())["data"]
    assert json.loads(second.read_text())["metrics"]["eval_accuracy"] > before
    assert "is finished" in example.typed(line.replace("KEY", first.parent.name))


@pytest.mark.ci
@pytest.mark.long
def test_the_sweep_of_the_slurm_example_is_one_array_and_starts_nothing_when_typed_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    example = copy_of("slurm_sweep", tmp_path)
    python = f"cluster.python={sys.executable}"
    lines = example.commands.replace("sweep=rates", f"sweep=rates {python}")
    said = example.typed(lines)
    assert "Slurm would take such a job" in said
    assert "4 of 4 trials finished" in said
    assert example.launches() == 4
    wait_until(lambda: not slurm.jobs())  # Slurm completes the last one for a moment
    assert "4 of 4" in example.typed(lines)
    assert example.launches() == 4


@pytest.mark.parametrize(
    ("name", "packages", "words", "saved"),
    [
        ("huggingface", ("transformers", "accelerate"), (), "checkpoint-1/trainer_state.json"),
        ("lightning", ("lightning",), ("--devices", "2"), "last.ckpt"),
    ],
)
@pytest.mark.ci
@pytest.mark.long
def test_a_training_that_is_asked_to_stop_leaves_a_checkpoint_of_its_first_step(
    name: str, packages: tuple[str, ...], words: tuple[str, ...], saved: str, tmp_path: Path
) -> None:
    needs(*packages)
    (tmp_path / "prune").touch()
    asked = {
        "PACELINE_RUN_DIR": str(tmp_path),
        "PACELINE_OUTPUTS": str(tmp_path),
        "PACELINE_LOG": str(tmp_path / "log"),
    }
    ran([sys.executable, "train.py", *words], EXAMPLES / name, asked)
    assert (tmp_path / "checkpoints" / saved).exists()
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row for row in rows if row.get("stopping")]
    assert {row["step"] for row in rows if row["step"] is not None} <= {1}


@pytest.mark.parametrize(
    ("name", "packages", "experiment", "exactly"),
    [
        ("huggingface", ("transformers", "accelerate"), "convnext", {"loss"}),
        ("lightning", ("lightning",), "digits", set()),  # its loader begins the epoch again
    ],
)
@pytest.mark.long
def test_a_run_that_is_stopped_goes_on_to_the_last_step_with_the_same_command(
    name: str, packages: tuple[str, ...], experiment: str, exactly: set[str], tmp_path: Path
) -> None:
    needs(*packages)
    words = ["train", f"experiment={experiment}", "program.args.epochs=20", "tracking=none"]
    unbroken, stopped = copy_of(name, tmp_path / "unbroken"), copy_of(name, tmp_path / "stopped")
    unbroken.typed(f"doit {' '.join(words)}")
    child = subprocess.Popen(
        [light_python(forks_ranks=True), "-m", "doit", *words],
        cwd=stopped.folder,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: len(stopped.rows()) > 5, child)
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=HANG_S)
    assert "stopped by SIGTERM" in said
    reached = stopped.rows()[-1]["step"]
    assert 0 < reached < 480
    assert "{resume} is checkpoints/" in stopped.typed(f"doit {' '.join(words)}")
    ends = [[row for row in one.rows() if row["step"] == 480] for one in (unbroken, stopped)]
    assert [len(rows) for rows in ends] == [len(ends[0])] * 2
    for metric in exactly:
        first, second = ([row["metrics"][metric] for row in rows if metric in row["metrics"]] for rows in ends)
        assert first == second != []


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_project_with_a_page_of_twenty_lines_at_most(name: str) -> None:
    folder = EXAMPLES / name
    assert len((folder / "README.md").read_text().splitlines()) <= 20
    assert [*folder.glob("conf/experiment/*.yaml")]
    template = (HOME / "pipeline/template/pyproject.toml.txt").read_text().partition("\n[tool.pytest")[0]
    assert (folder / "pyproject.toml").read_text().splitlines()[1:] == template.rstrip("\n").splitlines()[1:]
