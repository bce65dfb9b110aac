"""When attempts ran, as a report shows it."""

from __future__ import annotations

from pathlib import Path

from pipeline.comparing.reading import attempts, read
from pipeline.core.files import write_json
from pipeline.core.specs import State
from pipeline.runs import journal
from pipeline.runs.metrics_file import MetricsRow
from tests.pipeline.comparing_folders import trained

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
    first, second = attempts(run, rows(run.key, 1, 3, 4, 5, 50) + rows(run.key, 2, 103, 104))
    assert (first.state, first.why) == (State.FAILED, "rank 1: SIGKILL; rank 0 was held up")
    assert first.pauses == ((BEGUN + 5, BEGUN + 50),)
    assert (second.state, second.pauses) == (State.FINISHED, ())


def test_an_attempt_whose_command_was_killed_ends_with_the_last_line(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    folder.journal.unlink()
    journal.append(folder.journal, journal.Entry(state=State.PLANNED, attempt=1, time=BEGUN))
    journal.append(folder.journal, journal.Entry(state=State.RUNNING, attempt=1, time=BEGUN + 1))
    (only,) = attempts(read(folder), rows(folder.key, 1, 7))
    assert (only.state, only.started, only.ended) == ("", BEGUN + 1, BEGUN + 7)
