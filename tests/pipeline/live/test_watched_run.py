"""A run of another command, followed by its folder: a lock that is held, files that grow."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import status as watching
from pipeline.cluster.events import LogLine
from pipeline.core.errors import PacelineError
from pipeline.core.specs import LaunchPlan, State
from pipeline.live.state import FolderNews, Saved
from pipeline.live.watching import AttemptFiles, follow, is_under_way, may_go_on_until
from pipeline.runs import journal, ranks
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock
from pipeline.runs.ranks import RankRow
from tests.pipeline.comparing_folders import trained
from tests.pipeline.conftest import Printed
from tests.pipeline.live.test_run_state import plan
from tests.pipeline.test_printable import Terminal
from trainers.contract.beats import NodeBeat, Usage

USAGE = Usage(cpu=0.5, memory_bytes=1, memory_total_bytes=2, received_per_s=3.0, sent_per_s=4.0)


class Heard:
    """In a screen's place."""

    is_live = True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.said: list[str] = []
        self.show_event: Callable[[Any], None] = self.told.append
        self.say: Callable[[str], None] = self.said.append


def laid_out(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "cf08486f7c19")
    attempt = folder.path / "attempts/1"
    attempt.mkdir(parents=True)
    (folder.path / "plan.json").write_text(json.dumps(asdict(plan("node0", "node1"))))
    (attempt / "node0.log").write_text("0 | epoch 1/20\n- | torchrun's own\n0 | half a li")
    row = RankRow(rank=0, host="node0", step=7, phase=2, for_s=0.5, own_s=1.0)
    ranks.write(attempt, [row], (), {"node0": USAGE, "node1": USAGE})
    return folder


def test_a_run_without_a_command_may_go_on_for_its_lease_after_the_last_line(tmp_path: Path) -> None:
    folder = laid_out(tmp_path)
    assert may_go_on_until(folder) == 0.0, "never started"
    run_id = plan("node0").run_id
    journal.register_attempt(folder.path, run_id)
    journal.append(folder.journal, journal.Entry(state=State.RUNNING, attempt=1, time=1.0))
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (1000.0, 1000.0))
    os.utime(folder.path / "attempts/1/node0.log", (1300.0, 1300.0))
    assert may_go_on_until(folder) == 1300.0 + plan("node0").lease_s
    for host in ("node0", "node1"):
        (folder.path / f"attempts/1/{host}.exit.json").write_text("{}")
    assert may_go_on_until(folder) == 0.0, "its command has seen the ends of all hosts"


def test_the_run_that_begins_is_watched_and_not_the_newest_of_the_list(tmp_path: Path) -> None:
    ended, begun = RunFolder(tmp_path / "0123456789ab"), laid_out(tmp_path)
    ended.path.mkdir()
    for folder in (begun, ended):
        (folder.path / "key.json").write_text("{}")
    lock = RunLock(begun)
    assert lock.take()
    try:
        assert watching._await_next(tmp_path) == begun
    finally:
        lock.release()


def test_files_tell_plan_lines_and_beats_each_once(tmp_path: Path) -> None:
    folder = laid_out(tmp_path)
    files = AttemptFiles(folder)
    found = list(files.new_events())
    assert isinstance(found[0], LaunchPlan)
    assert [event.text for event in found if isinstance(event, LogLine)] == ["epoch 1/20", "torchrun's own"]
    beats = {event.host: event for event in found if isinstance(event, NodeBeat)}
    assert beats["node0"].ranks[0].step == 7
    assert beats["node1"].usage == USAGE
    assert list(files.new_events()) == []
    with (folder.path / "attempts/1/node0.log").open("a") as log:
        log.write("ne\n")
    assert [event.text for event in files.new_events()] == ["half a line"]


def test_of_a_log_whose_end_alone_is_read_the_numbers_of_steps_are_known_all_the_same(tmp_path: Path) -> None:
    folder = laid_out(tmp_path)
    lines = ["0 | 19 steps an epoch, 380 steps", *("0 | epoch 1/20  step 19/380" for _ in range(5_000)), "0 | last"]
    (folder.path / "attempts/1/node0.log").write_text("\n".join(lines) + "\n")
    said = [event.text for event in AttemptFiles(folder).new_events() if isinstance(event, LogLine)]
    assert said[0] == "19 steps an epoch, 380 steps"
    assert said[-1] == "last"
    assert len(said) < 3_000


def test_on_a_terminal_a_run_that_is_over_is_not_watched_but_the_next_one(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, watched = trained(tmp_path), list[str]()
    lock = RunLock(folder)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(
        "pipeline.cli.commands.status.time.sleep", lambda _: lock.take()
    )  # another command begins it meanwhile

    def watch(run: RunFolder) -> None:
        assert is_under_way(run)
        watched.append(run.key)
        lock.release()

    monkeypatch.setattr(watching, "watch", watch)
    printed(watching.status, tmp_path, "watch=1")
    assert watched == [folder.key]


def test_it_follows_until_the_command_is_gone_and_leaves_the_run_alone(tmp_path: Path) -> None:
    folder, heard, slept = laid_out(tmp_path), Heard(), []
    lock = RunLock(folder)
    assert lock.take()
    assert is_under_way(folder)
    before = sorted(folder.path.rglob("*"))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            lock.release()

    follow(folder, AttemptFiles(folder), heard, sleep)  # type: ignore[arg-type]
    assert heard.said == ["node0:0 | epoch 1/20"]
    assert len(slept) == 2
    assert sorted(folder.path.rglob("*")) == before


def test_metrics_and_checkpoints_are_news_once_and_a_torn_line_waits(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    news = FolderNews(tmp_path)
    assert list(news.new_events()) == []
    line = '{"t": 1.0, "step": 19, "epoch": 1, "metrics": {"train/loss": NaN}}\n'
    (tmp_path / "metrics.jsonl").write_text(line + line[:20])
    (tmp_path / "checkpoints/step-19.pt").touch()
    first = list(news.new_events())
    assert [type(event).__name__ for event in first] == ["MetricsRow", "Saved"]
    assert first[1] == Saved(step=19)
    assert list(news.new_events()) == []
    (tmp_path / "metrics.jsonl").write_text(line)  # cut back to a checkpoint
    assert list(news.new_events()) == []


def test_a_run_that_is_removed_while_it_is_watched_is_said(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = trained(tmp_path).key
    monkeypatch.setattr(watching, "watch", lambda folder: shutil.rmtree(folder.path))
    with pytest.raises(PacelineError, match=f"^run {key} was removed while it was watched\n  try: doit runs$"):
        printed(watching.status, tmp_path, key, "watch=1")
