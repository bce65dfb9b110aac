"""A finished run whose files were altered: what the verbs still show of it, and what they no longer suggest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.commands import explain, records, reproduce, status
from pipeline.cli.session import Session
from pipeline.core.errors import PacelineError
from pipeline.runs.folder import RunFolder
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import finished


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = finished(tmp_path / "runs")
    log = found.path / "attempts/1/node0.log"
    log.parent.mkdir(parents=True)
    log.write_text("0 | loss 0.5\n")
    (log.parent / "node1.log").touch()
    return found


def altered(folder: RunFolder, name: str, old: str, new: str) -> None:
    text = (folder.path / name).read_text()
    assert old in text
    (folder.path / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("config.json", '"seed": 0', '"seed": 12', "config.json has "),
        ("checkpoints/final.pt", "some", "more", "checkpoints/final.pt was altered"),
        ("result.json", "0.5", "0.9", "result.json was altered: it doesn't agree"),
    ],
)
def test_logs_of_an_altered_run_are_shown_and_a_line_says_what_was_altered(
    folder: RunFolder, printed: Printed, name: str, old: str, new: str, said: str
) -> None:
    lines = "==> attempt 1, node0 <==\n0 | loss 0.5\n==> attempt 1, node1: no lines <==\n"
    assert printed(status.logs, folder.path.parent, f"run={folder.key}") == lines
    altered(folder, name, old, new)
    shown = printed(status.logs, folder.path.parent, f"run={folder.key}")
    assert shown.startswith(f"{lines}WARNING: run {folder.key} is ALTERED (")
    assert said in shown
    assert shown.endswith("; its logs are shown as they are now\n")


@pytest.mark.parametrize("verb", [reproduce.reproduce, explain.why, records.record])
def test_what_differs_is_said_and_no_altered_word_is_suggested(
    folder: RunFolder, printed: Printed, verb: Callable[[Session], None]
) -> None:
    altered(folder, "config.json", '"name": "small_cnn"', '"name": "resnet50"')
    with pytest.raises(PacelineError) as caught:
        printed(verb, folder.path.parent, f"run={folder.key}")
    assert caught.value.what == (
        f"{folder.path}/config.json was altered: it isn't the configuration that the key was taken of: "
        "model.name: small_cnn → resnet50"
    )
    assert str(caught.value.hint).startswith("doit train with the words of the run   (makes it again ")
