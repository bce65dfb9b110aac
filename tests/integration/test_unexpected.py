"""An error that nobody foresaw, wherever it is raised: one line, exit code 2, and the traceback in a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commands import ROOT
from tests.integration.light import light_python
from tests.integration.test_clone import DOIT, WORDS, call
from tests.integration.test_provenance import Checkout, copied
from tests.pipeline.comparing_folders import trained
from tests.waiting import HANG_S, unhurried

APPLICATION = (sys.executable, "-m", "pipeline")
LINE = r"ERROR: unexpected KeyError: .* at (\S+):\d+ \(a defect .* report it\): (\S+/\.errors/\S+\.txt)"
DEFECT = "raise KeyError('https://me:hunter2@host/x')\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, fetched: Path) -> Checkout:
    return copied(tmp_path_factory.mktemp("defects") / "project", fetched)


@pytest.fixture
def project(original: Checkout) -> Iterator[Checkout]:
    yield original
    original.git("checkout", "--", ".")
    original.git("clean", "-fdxq", "--exclude=data", "--exclude=.paceline", "--exclude=__pycache__")


def broken(project: Checkout, name: str, after: str) -> None:
    """A line that raises, inside the function or module that begins with the text ``after``."""
    path = project.root / name
    text = path.read_text()
    at = text.index("\n", text.index(after)) + 1
    space = re.match(r" *", text[at:].lstrip("\n"))
    path.write_text(text[:at] + (space[0] if space else "") + DEFECT + text[at:])


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "after", "argv"),
    [
        ("pipeline/runs/index.py", "def rows(", [DOIT, "runs"]),
        ("pipeline/execution/dry_run.py", "def steps(", [DOIT, "why", *WORDS]),
        ("dodo.py", "def task_verbs(", [DOIT, "list"]),
        ("pipeline/data/request.py", "def request(", [*APPLICATION, *WORDS]),
    ],
)
def test_an_unforeseen_error_is_one_line_and_a_file(project: Checkout, name: str, after: str, argv: list[str]) -> None:
    broken(project, name, after)
    done = call(argv, project.root, project.root)
    assert done.returncode == 2, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "hunter2" not in output
    (line,) = [line for line in output.splitlines() if "unexpected" in line]
    found = re.fullmatch(LINE, line)
    assert found is not None, line
    assert found[1] == Path(name).name
    kept = (project.root / found[2]).read_text()
    assert kept.startswith("Traceback (most recent call last):")
    assert "KeyError: 'https://***@host/x'" in kept


@pytest.mark.ci
@pytest.mark.long
def test_an_unforeseen_error_in_a_child_names_its_file_too(project: Checkout) -> None:
    broken(project, "pipeline/evaluation/report.py", "def _report(")
    words = ("train", *WORDS, "paths.runs=else/where")
    done = call([light_python(forks_ranks=True), "-m", "doit", *words], project.root, project.root)
    assert done.returncode == 1
    found = re.search(rf"the evaluation report of \w+ failed: {LINE}", done.stderr)
    assert found is not None, done.stderr
    assert found[2].startswith("else/where/.errors/")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.ci
@pytest.mark.long
def test_where_no_folder_of_runs_can_be_made_the_traceback_lies_in_tmp(project: Checkout) -> None:
    broken(project, "pipeline/runs/index.py", "def rows(")
    place = project.root / "no folder"
    place.symlink_to("/proc/nobody")  # leads nowhere, and nothing can be made there
    done = call([DOIT, "runs", f"paths.runs={place}"], project.root, project.root)
    found = re.search(r"report it\): (\S+/paceline-error-\S+\.txt)$", done.stderr.strip())
    assert done.returncode == 2
    assert found is not None, done.stdout + done.stderr
    Path(found[1]).unlink()


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("words", [["why", "experiment=quickstart"], ["runs"]])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, words: list[str]) -> None:
    """As in ``doit why … | head -1``."""
    trained(tmp_path / "runs")
    reading, writing = os.pipe()
    os.close(reading)
    where = [f"paths.runs={tmp_path}/runs", f"paths.data={tmp_path}/data"]
    done = subprocess.run(
        [sys.executable, "-m", "doit", *words, *where],
        cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, unhurried(done.stderr)) == (141, "")
    assert not (tmp_path / "runs/.errors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("info NOPE", "'NOPE' is not a task."),
        ("dumpdb", "doit keeps no database here: run folders say what is finished\n  try: doit runs"),
        ("list --template {nope}", "doit can't do that: KeyError: 'nope'"),
    ],
)
def test_a_wrong_word_for_one_of_doits_own_commands_is_no_defect_of_paceline(words: str, said: str) -> None:
    argv = [sys.executable, "-m", "doit", *words.split()]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, unhurried(done.stderr), done.stdout) == (3, f"ERROR: {said}\n", "")
