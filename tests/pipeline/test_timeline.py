"""When attempts and trials ran, as a report shows it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from pipeline.comparing import drawing, timeline
from pipeline.comparing.groups import grouped
from pipeline.comparing.reading import read
from pipeline.core.files import write_json
from pipeline.core.specs import State
from pipeline.runs import journal
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.folder import TrialEntry
from tests.pipeline.comparing_folders import swept, trained
from tests.pipeline.conftest import Printed

BEGUN = 1.7e9


def rows(key: str, attempt: int, *seconds: float) -> list[MetricsRow]:
    id_of = f"{key}-abcdef-{attempt}-abcdef"
    return [MetricsRow(time_s=BEGUN + at, step=1, epoch=1, metrics={}, attempt=id_of) for at in seconds]


def test_a_run_that_was_killed_paused_and_started_again_shows_all_of_it(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    folder.journal.unlink()
    for state, attempt, at, detail in (
        (State.PLANNED, 1, 0, ""),
        (State.RUNNING, 1, 2, ""),
        (State.FAILED, 1, 100, "rank 1: SIGKILL\nlogs: x"),
        (State.PLANNED, 2, 101, ""),
        (State.RUNNING, 2, 102, ""),
        (State.FINISHED, 2, 150, ""),
    ):
        journal.append(folder.journal, journal.Entry(state=state, attempt=attempt, time=BEGUN + at, detail=detail))
    write_json(folder.path / "attempts" / "1" / "ranks.json", {"ranks": [], "notes": ["rank 0 was held up"]})
    run = read(folder)
    first, second = timeline.attempts(run, rows(run.key, 1, 3, 4, 5, 50) + rows(run.key, 2, 103, 104))
    assert (first.state, first.why) == (State.FAILED, "rank 1: SIGKILL; rank 0 was held up")
    assert first.pauses == ((BEGUN + 5, BEGUN + 50),)
    assert (second.state, second.pauses) == (State.FINISHED, ())
    drawn = timeline.of_attempts({run.key: [first, second]})
    assert [(bar.begin, bar.end, bar.ink) for bar in drawn.bars] == [
        (0, 2, "soft"), (2, 100, "bad"), (5, 50, "q0"), (101, 102, "soft"), (102, 150, "good"),
    ]  # fmt: skip


def test_an_attempt_whose_command_was_killed_ends_with_the_last_line(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    folder.journal.unlink()
    journal.append(folder.journal, journal.Entry(state=State.PLANNED, attempt=1, time=BEGUN))
    journal.append(folder.journal, journal.Entry(state=State.RUNNING, attempt=1, time=BEGUN + 1))
    (only,) = timeline.attempts(read(folder), rows(folder.key, 1, 7))
    assert (only.state, only.started, only.ended) == ("", BEGUN + 1, BEGUN + 7)


def test_trials_stand_in_the_row_of_their_slot_until_it_takes_the_next(tmp_path: Path) -> None:
    runs = [read(trained(tmp_path, lr=lr, accuracy=lr)) for lr in (0.2, 0.1)]
    keys = [*(run.key for run in runs), "c" * 12]

    def entry(number: int, state: State, at: float, slot: int | None) -> TrialEntry:
        return TrialEntry(number=number, key=keys[number], state=state, time=BEGUN + at, slot=slot)

    entries = [
        entry(0, State.RUNNING, 0, 0),
        entry(1, State.RUNNING, 1, 1),
        entry(2, State.RUNNING, 10, 0),
        entry(0, State.FINISHED, 12, 0),  # evaluated while its slot had the next
        entry(2, State.FAILED, 20, 0),
        entry(1, State.FINISHED, 21, 1),
    ]
    drawn = timeline.of_sweep(entries, grouped(runs), {}, {"A": 0, "B": 1})
    assert drawn is not None
    assert drawn.rows == ("slot 1", "slot 2")
    assert [(bar.row, bar.begin, bar.end, bar.ink, bar.text) for bar in drawn.bars] == [
        (0, 0, 10, "c0", "A"), (0, 10, 20, "bad", ""), (1, 1, 21, "c1", "B"),
    ]  # fmt: skip
    assert drawn.bars[1].title == f"trial 2 {'c' * 12}: FAILED after 10.0 s"
    older = [dataclasses.replace(one, slot=None) for one in entries]
    assert timeline.of_sweep(older, grouped(runs), {}, {}) is None


@pytest.mark.slow
def test_the_page_of_a_sweep_has_its_trials_by_slot(tmp_path: Path, reported: Printed) -> None:
    folders = [trained(tmp_path, seed) for seed in (0, 1)]
    swept(tmp_path, folders, ["seed=0,1"])
    lines = [
        {"number": number, "key": folder.key, "state": state, "time": BEGUN + at + 60 * number, "slot": 0}
        for number, folder in enumerate(folders)
        for state, at in (("RUNNING", 0), ("FINISHED", 60))
    ]
    (tmp_path / "sweeps" / "tuned" / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reported(tmp_path)
    page = (tmp_path / "reports" / "sweep-tuned.html").read_text()
    chart = page[page.index('aria-label="the trials by slot: 2 bars in 1 row"') :].partition("</svg>")[0]
    assert re.findall("<title>([^<]*)", chart) == [
        f"trial {number} A digits small_cnn sgd: FINISHED after 1 min 00 s" for number in (0, 1)
    ]
    assert ">minutes<" in chart
    assert ">slot 1<" in chart
    assert drawing.timeline(["a"], [], said="nothing") != ""
