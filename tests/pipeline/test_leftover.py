"""What attempts that are over have left on a host: which of it nothing uses, and which of it is still wanted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent import node
from pipeline.cluster.agent.files import leftovers
from pipeline.cluster.agent.requests import RemoveFoldersRequest
from pipeline.cluster.agent.running import processes
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.starts import why_kept
from pipeline.core.files import remove_leftovers, temporary_prefix, write_atomic
from pipeline.runs import journal
from tests.agent_records import HERE
from tests.pipeline.test_plan import cluster, facts
from trainers.contract import variables
from trainers.contract.host_facts import LeftFolder

HOUR_S, DAY_S = 3600.0, 86_400.0
KEY = "abcdef012345"


@pytest.fixture(scope="module")
def dead() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def folder(workdir: Path, run_id: str, *, idle_s: float, code: int | None = None, **entry: Any) -> Path:
    """As an attempt leaves it: ``entry`` is its agent.json."""
    made = workdir / "runs" / run_id / "node0"
    (made / "agent").mkdir(parents=True)
    if entry:
        entry = {"run_key": "k", "run_id": run_id, **entry}
        (made / "agent" / "agent.json").write_text(json.dumps(entry))
    if code is not None:
        (made / "agent" / "exit.json").write_text(json.dumps({"code": code}))
    then = time.time() - idle_s
    for path in (made / "agent", made):
        os.utime(path, (then, then))
    return made


def test_a_host_tells_and_removes_what_nothing_there_uses_and_nothing_else(
    tmp_path: Path, dead: int, capsys: pytest.CaptureFixture[str]
) -> None:
    me = node.identity(HERE)
    gone: dict[str, Any] = {
        "pid": dead,
        "born": "7",
        "identity": me,
        "mark": "no such mark:0",
        "state_dir": str(tmp_path / "none"),
    }
    alive = {**gone, "pid": os.getpid(), "born": processes.start_time(os.getpid())}
    expected = {
        "k-f00000-1-dead": True,
        "k-f00000-2-well": True,
        "k-f00000-3-followed": False,  # a controller was heard of just now
        "k-f00000-4-alive": False,
        "k-f00000-5-starting": False,  # no agent yet
        "k-f00000-6-never-started": True,
        "k-f00000-7-elsewhere": False,  # of a host that shares the home
        "k-f00000-8-marked": False,  # a rank lives
    }
    folder(tmp_path, "k-f00000-1-dead", idle_s=HOUR_S, code=1, **gone)
    folder(tmp_path, "k-f00000-2-well", idle_s=HOUR_S, code=0, **gone)
    followed = folder(tmp_path, "k-f00000-3-followed", idle_s=HOUR_S, code=1, **gone)
    (followed / "agent" / "lease").touch()
    folder(tmp_path, "k-f00000-4-alive", idle_s=9 * DAY_S, **alive)
    folder(tmp_path, "k-f00000-5-starting", idle_s=HOUR_S / 2)
    folder(tmp_path, "k-f00000-6-never-started", idle_s=2 * HOUR_S)
    folder(tmp_path, "k-f00000-7-elsewhere", idle_s=HOUR_S, code=1, **{**gone, "identity": "somebody else"})
    folder(tmp_path, "k-f00000-8-marked", idle_s=HOUR_S, code=1, **{**gone, "mark": "of this test:0"})
    rank = subprocess.Popen(["sleep", "60"], env={variables.NODE: "of this test:0"}, start_new_session=True)
    try:
        rows = {row.run_id: row for row in leftovers.attempts_left(str(tmp_path), me)}
        assert set(rows) == {name for name, unused in expected.items() if unused}
        assert [rows[name].holds_outputs for name in sorted(rows)] == [False, True, False]
        names = [f"{name}/node0" for name in expected] + ["../runs/k-f00000-2-well/node0", "k-f00000-1-dead/agent"]
        registry = tmp_path / "agents"
        leftovers.remove_folders(RemoveFoldersRequest(str(tmp_path), str(registry), {me: tuple(names)}, access=HERE))
    finally:
        rank.kill()
        rank.wait()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {name for name in expected if not expected[name]}
    assert json.loads(capsys.readouterr().out.partition(" {")[2].join(["{", ""]))["removed"] == [
        f"{name}/node0" for name in sorted(rows)
    ]


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("checkpoints/step-00000010.pt", True),
        ("checkpoints/last.ckpt", True),
        ("checkpoints/checkpoint-6/model.safetensors", True),  # as transformers does
        ("logs/a.pt", False),
    ],
)
def test_checkpoints_are_wanted_whatever_a_script_calls_them(tmp_path: Path, file: str, wanted: bool) -> None:
    made = folder(tmp_path, "k-f00000-1-aa", idle_s=2 * HOUR_S, code=137)
    (made / "checkpoints" / "half").mkdir(parents=True)
    (made / file).parent.mkdir(exist_ok=True)
    (made / file).write_text("weights")
    assert leftovers.holds_outputs(str(made)) == wanted


def one(run_dir: Path, attempt: int, *, idle_s: float, holds_outputs: bool = True, nonce: str = "aa") -> LeftFolder:
    name = f"{journal.new_attempt_id(KEY, run_dir, attempt, nonce)}/node0"
    return LeftFolder(name=name, idle_s=idle_s, holds_outputs=holds_outputs, bytes=1)


def test_what_a_run_can_still_be_gone_on_with_stays_and_what_is_here_already_goes(tmp_path: Path) -> None:
    run_dir = tmp_path / KEY
    run_dir.mkdir()
    first, second = one(run_dir, 1, idle_s=61.0), one(run_dir, 2, idle_s=90 * DAY_S)
    for left_there in (first, second):
        journal.register_attempt(run_dir, left_there.run_id)
    assert why_kept(first, tmp_path) == "", "a later attempt has begun"
    assert why_kept(second, tmp_path) == (f"run {KEY} goes on from its checkpoints: the same command fetches them"), (
        "at any age"
    )
    (run_dir / "attempts" / "2").mkdir(parents=True)
    (run_dir / "attempts" / "2" / "collected").write_text(second.run_id)
    assert why_kept(second, tmp_path) == ""


def test_of_runs_that_are_unknown_here_the_age_decides(tmp_path: Path) -> None:
    other = Path("/another/clone/runs") / KEY
    assert why_kept(one(other, 1, idle_s=6 * DAY_S), tmp_path) == (
        "it was in use 6 days ago, and has outputs of a run unknown here"
    )
    assert why_kept(one(other, 1, idle_s=8 * DAY_S), tmp_path) == ""
    assert why_kept(one(other, 1, idle_s=HOUR_S / 2, holds_outputs=False), tmp_path) == "it was in use 30 minutes ago"
    assert why_kept(one(other, 1, idle_s=2 * HOUR_S, holds_outputs=False), tmp_path) == ""
    removed = one(tmp_path / KEY, 1, idle_s=2 * HOUR_S)
    assert why_kept(removed, tmp_path) == "", "its run folder was removed: nobody can ask for it"
    (tmp_path / KEY).mkdir()
    assert why_kept(removed, tmp_path) != "", "its list of attempts can't be read"


def test_lines_tell_what_a_host_has_removed(tmp_path: Path) -> None:
    class Clears:
        def remove_folders(self, unwanted: list[tuple[Any, list[str]]]) -> dict[str, list[str]]:
            return {fact.host: names for fact, names in unwanted}

    left = LeftFolder(f"{KEY}-000000-1-aa/node1", idle_s=HOUR_S * 2, holds_outputs=False, bytes=3_000_000)
    found = [facts(1, left_folders=(left,))]
    launcher: Any = Clears()
    hosts = Hosts(cluster(1, 1))
    hosts._launcher, hosts._facts = launcher, found
    assert hosts.clear_leftovers(tmp_path) == ["node1: removed what was left of 1 attempt, 3.0 MB"]
    assert hosts.clear_leftovers(tmp_path) == [], "once for each probe"


WRITER = """
import os, sys, time
from pathlib import Path
from pipeline.core import files
def stop(descriptor):
    print(flush=True)
    time.sleep(60)
os.fsync = stop
files.write_atomic(Path(sys.argv[1]), "content")
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing ``path``."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_what_a_killed_writer_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    killed, living = writer(tmp_path / "config.json"), writer(tmp_path / "changes.patch")
    try:
        os.kill(killed.pid, signal.SIGKILL)
        # ended and not reaped: such a process owns nothing, though its number is still taken
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        (gone,) = remove_leftovers([tmp_path, tmp_path / "no such folder"])
        assert gone.name.startswith(".config.json.")
        (kept,) = tmp_path.iterdir()
        assert kept.name.startswith(".changes.patch.")
    finally:
        for child in (killed, living):
            child.kill()
            child.communicate()
    assert remove_leftovers([tmp_path]) == [kept]
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_was_given_owns_nothing(tmp_path: Path) -> None:
    mine = tmp_path / f"{temporary_prefix('.x')}abc"
    place, pid, start = mine.name.split(".")[2].split("-")
    of_another_start = tmp_path / f".x.{place}-{pid}-{int(start, 16) + 1:x}.abc"
    for folder in (mine, of_another_start):
        (folder / "inside").mkdir(parents=True)
    assert remove_leftovers([tmp_path]) == [of_another_start]
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_what_another_computer_has_in_a_shared_folder_stays_for_a_day(tmp_path: Path) -> None:
    other = tmp_path / ".x.0000000-1-1.abc"
    for age_s, gone in ((3600, []), (90_000, [other])):
        other.touch()
        os.utime(other, (time.time() - age_s,) * 2)
        assert remove_leftovers([tmp_path]) == gone


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_files_of_another_user_stay(tmp_path: Path) -> None:
    theirs = tmp_path / ".x.0000000-1-1.abc"
    theirs.touch()
    os.utime(theirs, (0, 0))
    os.chown(theirs, 12345, -1)
    assert remove_leftovers([tmp_path]) == []


@pytest.mark.parametrize("name", ["key.json", ".lock", ".config.json.Xa9_kq1z", "a.b-c-d.e", ".x.0000000-zz-1.abc"])
def test_a_file_with_another_kind_of_name_is_never_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.utime(tmp_path / name, (0, 0))
    assert remove_leftovers([tmp_path]) == []


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / ".x.0000000-1-1.abc"
    link.symlink_to(tmp_path / "data")
    os.utime(link, (0, 0), follow_symlinks=False)
    assert remove_leftovers([tmp_path]) == [link]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_long_name_can_still_be_written_whole(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write_atomic(tmp_path / name, "content")
        assert (tmp_path / name).read_text() == "content"
    assert len(list(tmp_path.iterdir())) == 2
