"""A sweep of another command, followed by its folder: a lock that is held, a journal that grows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import trials
from pipeline.cluster.events import LogLine
from pipeline.core.errors import UsageError
from pipeline.core.locks import FileLock
from pipeline.core.specs import State
from pipeline.live.sweep_state import SweepPicture
from pipeline.live.watching import SweepFiles, follow
from pipeline.runs.lock import RunLock
from pipeline.sweep.folder import SweepFolder, TrialEntry
from pipeline.sweep.trial import TrialBegan
from tests.pipeline.comparing_folders import failed, swept, trained
from tests.pipeline.live.test_run_state import plan
from tests.pipeline.live.test_sweep_state import text
from tests.pipeline.live.test_watched_run import Heard

STARTED = 1.7e9


class Sweep:
    """Of three trials on disk; a finished one of 0.9, one that failed, one to come. Its command is at work."""

    def __init__(self, runs: Path) -> None:
        self.trials = [trained(runs, accuracy=0.9, metrics={"val/accuracy": 0.9}), failed(runs), trained(runs, seed=1)]
        swept(runs, self.trials, ["seed=range(3)"], at_once=2)
        self.folder = SweepFolder(runs / "sweeps" / "tuned")
        self.lock = FileLock(self.folder.lock)
        assert self.lock.take()
        self.note(0, State.RUNNING, 0)
        self.note(0, State.FINISHED, 60)
        self.note(1, State.RUNNING, 60)

    def note(self, number: int, state: State, second: float) -> None:
        self.folder.note(
            [
                TrialEntry(
                    number=number, key=self.trials[number].key, state=state, time=STARTED + second, detail="no loss"
                )
            ]
        )

    def speak(self, number: int) -> None:
        """The trial's first host says a line."""
        attempt = self.trials[number].path / "attempts" / "1"
        attempt.mkdir(parents=True, exist_ok=True)
        (self.trials[number].path / "plan.json").write_text(json.dumps(asdict(plan("node0"))))
        (attempt / "node0.log").write_text("0 | 19 steps an epoch, 380 steps\n- | torchrun's own\n")


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = Sweep(tmp_path)
    yield made
    made.lock.release()


def test_what_its_journal_has_stands_in_the_first_view(sweep: Sweep) -> None:
    state = SweepFiles(sweep.folder).so_far(STARTED + 90, 1000.0)
    assert text(state, 1000.0) == [
        "sweep tuned: ━━━━━───────────  1 of 3 done, 1 running, 60 s left",
        "best so far val accuracy 0.9000: lr=0.1 seed=0",
        "trial  state     differs in     epoch    best val accuracy",
        "    0  finished  lr=0.1 seed=0           0.9000",
        "    1  running   lr=9.0 seed=0                              starting",
    ]
    assert (state.took_s, state.running[1].began) == ((60.0,), 970.0)


def test_one_whose_folder_is_removed_is_said_by_whoever_shows_it(sweep: Sweep) -> None:
    files = SweepFiles(sweep.folder)
    shutil.rmtree(sweep.folder.path)
    assert [*files.new_events()] == []
    for ask in (
        partial(files.so_far, STARTED, 0.0),
        *(partial(f, sweep.folder) for f in (trials.show, trials.progress_line)),
    ):
        with pytest.raises(UsageError, match=r"sweeps/tuned/sweep\.json was removed"):
            ask()


def test_it_is_followed_to_its_end_and_left_alone(sweep: Sweep) -> None:
    heard, slept = Heard(), list[float]()
    files = SweepFiles(sweep.folder)
    picture = SweepPicture(files.so_far(STARTED + 90, 1000.0), sweep.folder.path.parent.parent)
    before = sorted(sweep.folder.path.parent.rglob("*"))

    def tell(event: Any) -> None:
        heard.told.append(event)
        picture.apply(event, 1000.0 + len(slept))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            sweep.speak(1)
        if len(slept) == 2:
            sweep.note(1, State.FAILED, 100)
            sweep.note(2, State.RUNNING, 100)
        if len(slept) == 3:
            sweep.note(2, State.KILLED, 120)
            sweep.lock.release()

    heard.show_event = tell
    follow(sweep.folder, files, heard, sleep)  # type: ignore[arg-type]
    assert len(slept) == 3
    lines = ["trial 1 | node0:0 | 19 steps an epoch, 380 steps", "✗ trial 1 FAILED: no loss", "trial 2 no loss"]
    assert heard.said == lines
    assert [event.key for event in heard.told if isinstance(event, TrialBegan)] == [sweep.trials[2].key]
    assert len([event for event in heard.told if isinstance(event, tuple) and isinstance(event[1], LogLine)]) == 2
    assert (
        text(picture.state, 1003.0)[0] == "sweep tuned: ━━━━━━━━━━━─────  2 of 3 done, 0 running, 60 s left, 1 failed"
    )
    assert sorted(sweep.folder.path.parent.rglob("*")) == before


def test_a_trial_that_begins_once_more_has_not_ended(sweep: Sweep) -> None:
    sweep.note(1, State.FAILED, 70)
    assert trials.progress_line(sweep.folder) == "sweep tuned: 2 of 3 done, 0 running"
    sweep.note(1, State.RUNNING, 71)
    assert trials.progress_line(sweep.folder) == "sweep tuned: 1 of 3 done, 1 running"


def test_the_sweep_is_what_is_watched_unless_the_newest_run_is_another_commands(sweep: Sweep, tmp_path: Path) -> None:
    assert trials.sweep_in_progress(tmp_path, sweep.trials[1]) == sweep.folder
    other = trained(tmp_path, seed=7)
    assert trials.sweep_in_progress(tmp_path, other) == sweep.folder
    lock = RunLock(other)
    assert lock.take()
    assert trials.sweep_in_progress(tmp_path, other) is None
    lock.release()
    sweep.lock.release()
    assert trials.sweep_in_progress(tmp_path, sweep.trials[1]) is None
