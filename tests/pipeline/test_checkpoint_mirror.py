"""Checkpoints copied to an address and taken from there: what belongs together, whole, the newest first."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.core.documents import write_sealed
from pipeline.core.errors import DataError
from pipeline.core.files import canonical_json, sha256_text, write_json
from pipeline.runs import journal
from pipeline.runs.checkpoints import CheckpointMirror, newest_step, read_verified
from tests.s3_fixture import BUCKET
from tests.small_disk import mounted
from trainers.core.config import ConfigError
from trainers.script.resume import newest_checkpoint

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore


def save(run_dir: Path, step: int) -> None:
    """A checkpoint as a trainer leaves it."""
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    path.write_bytes(b"weights of %d" % step)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    side = {"sha256": sha256, "step": step, "metrics": "", "attempt": f"abc-1-{step}"}
    write_json(path.with_suffix(".json"), {**side, "digest": sha256_text(canonical_json(side))})


@pytest.fixture(params=["memory", "file", "path", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that isn't there yet."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    place = tmp_path / "a mirror" / "below"
    return {
        "memory": f"memory://{uuid.uuid4()}/below",
        "file": f"file://{place}",
        "path": str(place),
        "s3": f"s3://{BUCKET}/{uuid.uuid4()}/a mirror",
    }[request.param]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    save(folder, 10)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A run folder that has lost its checkpoints."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def script_dir(tmp_path: Path) -> Path:
    """A script's run folder, in which the newer checkpoint has the name that comes first."""
    folder = tmp_path / "script"
    for at, (name, text) in enumerate({"b/model.pt": "first", "a/model.pt": "second"}.items()):
        path = folder / "checkpoints" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        os.utime(path, ns=(10**18 + at, 10**18 + at))
    write_json(folder / "config.json", {"program": {"name": "script", "script": "a.py"}})
    (folder / "metrics.jsonl").write_text("rows")
    return folder


def mirror_of(run_dir: Path, place: Path | str, say: Callable[[str], None] = pytest.fail) -> CheckpointMirror:
    """The mirror of a run folder, by default one that has nothing to say."""
    return CheckpointMirror(str(place), "abc", run_dir, say)


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_run_without_checkpoints_goes_on_from_the_newest_copy(address: str, run_dir: Path, empty: Path) -> None:
    lines: list[str] = []
    mirror = mirror_of(run_dir, address)
    mirror.try_writing()
    assert mirror._store.names("abc") == []
    mirror.push()
    mirror.push()
    assert mirror._store.names("abc") == ["contents", "files-00000001.json"]
    for step in (20, 30):
        save(run_dir, step)
        (run_dir / "checkpoints" / f"step-{step - 10:08d}.pt").unlink()
        (run_dir / "checkpoints" / f"step-{step - 10:08d}.json").unlink()
        mirror.push()
    assert mirror._store.names("abc") == ["contents", "files-00000002.json", "files-00000003.json"]
    mirror_of(empty, address, lines.append).restore()
    assert lines == [f"the run folder has no checkpoint; took that of step 30 from cluster.checkpoint_mirror={address}"]
    assert {*names(empty / "checkpoints")} >= {"step-00000030.json", "step-00000030.pt"}
    assert read_verified(empty / "checkpoints" / "step-00000030.pt")["step"] == 30
    assert journal.known_attempts(empty) == ["abc-1-30"]
    assert names(empty) == ["attempts.json", "checkpoints"]
    CheckpointMirror(address, "other", run_dir.with_name("nothing"), lines.append).restore()
    assert len(lines) == 1


def test_a_script_gets_all_back_and_its_newest_checkpoint_is_still_the_newest(script_dir: Path, tmp_path: Path) -> None:
    (script_dir / "nodes/1/checkpoints").mkdir(parents=True)
    (script_dir / "nodes/1/checkpoints/rng_state_1.pth").write_text("of another host")
    (script_dir / "checkpoints/a/.model.pt.tmp").write_text("is being written")
    mirror_of(script_dir, tmp_path / "mirror").push()
    (script_dir / "checkpoints/a/.model.pt.tmp").unlink()
    wanted, lines = files(script_dir), list[str]()
    for name in ("checkpoints", "nodes", "metrics.jsonl"):
        path = script_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = mirror_of(script_dir, tmp_path / "mirror", lines.append)
    again.restore()
    assert lines == [
        "the run folder has no checkpoint; took 4 files that its script had left from "
        f"cluster.checkpoint_mirror={tmp_path / 'mirror'}"
    ]
    assert files(script_dir) == wanted
    assert newest_checkpoint(script_dir / "checkpoints") == script_dir / "checkpoints/a/model.pt"
    again.restore()  # it has its own now
    assert len(lines) == 1


def test_what_is_no_checkpoint_any_more_is_removed_there_with_the_second_list_after_it(
    script_dir: Path, tmp_path: Path
) -> None:
    mirror = mirror_of(script_dir, tmp_path / "mirror")
    mirror.push()
    shutil.rmtree(script_dir / "checkpoints/b")
    for text in ("third", "fourth"):
        (script_dir / "checkpoints/a/model.pt").write_text(text)
        mirror.push()
    contents = (tmp_path / "mirror/abc/contents").iterdir()
    assert sorted(path.read_text() for path in contents) == ["fourth", "rows", "third"]


def test_a_run_without_checkpoints_copies_nothing(empty: Path, tmp_path: Path) -> None:
    write_json(empty / "config.json", {"program": {"name": "script", "script": "a.py"}})
    (empty / "metrics.jsonl").write_text("rows")
    mirror = mirror_of(empty, tmp_path / "mirror")
    mirror.push()
    mirror.restore()
    assert not (tmp_path / "mirror").exists()


@pytest.mark.parametrize("damage", ["content", "list", "gone"])
def test_the_copy_before_is_taken_where_the_newest_is_not_whole_and_pushed_out_by_no_damaged_one(
    run_dir: Path, empty: Path, tmp_path: Path, damage: str
) -> None:
    mirror, there = mirror_of(run_dir, tmp_path / "mirror"), tmp_path / "mirror" / "abc"
    mirror.push()
    save(run_dir, 20)
    mirror.push()
    weights = there / "contents" / hashlib.sha256(b"weights of 20").hexdigest()
    torn = there / "files-00000002.json" if damage == "list" else weights
    torn.unlink() if damage == "gone" else torn.write_text(torn.read_text()[:-2] + "x")
    lines: list[str] = []
    mirror_of(empty, tmp_path / "mirror", lines.append).restore()
    assert lines[0].startswith(f"WARNING: a copy in cluster.checkpoint_mirror={tmp_path}/mirror is not whole and is ")
    assert "took that of step 10 from" in lines[1]
    assert names(empty / "checkpoints") == ["step-00000010.json", "step-00000010.pt"]
    if damage == "list":
        save(run_dir, 30)
        mirror.push()
        assert names(there) == ["contents", "files-00000001.json", "files-00000003.json"]


def test_what_found_no_room_or_was_interrupted_is_removed(run_dir: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with mounted(tmp_path / "small") as place:
        mirror = mirror_of(run_dir, place, lines.append)
        mirror.push()
        whole = files(place)
        save(run_dir, 20)
        (run_dir / "checkpoints" / "step-00000020.pt").write_bytes(bytes(3_000_000))
        mirror.push()
        assert "No space left on device" in lines[0]
        assert files(place).keys() - whole.keys() <= {
            f"abc/contents/{hashlib.sha256((run_dir / 'checkpoints/step-00000020.json').read_bytes()).hexdigest()}"
        }
        (run_dir / "checkpoints" / "step-00000020.pt").unlink()
        (place / "abc" / "contents" / "0123").write_text("its command was killed")
        save(run_dir, 30)
        mirror.push()
        assert not (place / "abc" / "contents" / "0123").exists()
        assert names(place / "abc") == ["contents", "files-00000001.json", "files-00000002.json"]


@pytest.mark.slow
def test_a_copy_that_cannot_be_read_now_is_no_reason_to_go_on_from_an_older_one(
    s3: ObjectStore, run_dir: Path, empty: Path
) -> None:
    mirror, place = mirror_of(run_dir, f"s3://{BUCKET}/x"), f"s3://{BUCKET}/x"
    mirror.push()
    save(run_dir, 20)
    mirror.push()
    s3.refused_end = hashlib.sha256(b"weights of 20").hexdigest()
    with pytest.raises(
        DataError, match=rf"s3://{BUCKET}/x can't be read: PermissionError: Forbidden\n.*the same command"
    ):
        mirror_of(empty, place).restore()
    assert names(empty) == []
    s3.refused_end = None
    mirror_of(empty, place, print).restore()
    assert newest_step(empty) == 20


def test_a_name_that_leads_elsewhere_is_not_followed(empty: Path, tmp_path: Path) -> None:
    sha256, there, lines = hashlib.sha256(b"evil").hexdigest(), tmp_path / "mirror" / "abc", list[str]()
    (there / "contents").mkdir(parents=True)
    (there / "contents" / sha256).write_bytes(b"evil")
    elsewhere = ("../evil", "checkpoints/../../evil", "/evil", "config.json", "nodes/x/checkpoints/a")
    for number, name in enumerate(elsewhere):
        write_sealed(there / f"files-{number:08d}.json", {"files": {name: {"sha256": sha256, "mtime_ns": 0}}})
    mirror_of(empty, tmp_path / "mirror", lines.append).restore()
    assert [line.rpartition(" is ")[2] for line in lines] == ["no file of a checkpoint"] * 5
    assert names(empty) == []


def test_a_run_that_has_checkpoints_takes_none(run_dir: Path, empty: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    mirror_of(run_dir, tmp_path / "mirror").push()
    save(empty, 5)
    mirror = mirror_of(empty, tmp_path / "mirror", lines.append)
    mirror.restore()
    assert (newest_step(empty), lines) == (5, [])
    (empty / "checkpoints" / "step-00000005.pt").unlink()
    mirror.restore()
    assert newest_step(empty) == 10


def test_a_mirror_that_cannot_be_written_is_told_once_and_ends_nothing(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file")
    lines: list[str] = []
    mirror = mirror_of(run_dir, tmp_path / "mirror", lines.append)
    mirror.try_writing()
    mirror.push()
    (line,) = lines
    assert line.startswith(f"WARNING: cluster.checkpoint_mirror={tmp_path}/mirror can't be written: ")
    (tmp_path / "mirror").unlink()
    mirror.push()
    assert (tmp_path / "mirror" / "abc" / "files-00000001.json").exists()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_refused_and_not_made(s3: ObjectStore, run_dir: Path, empty: Path) -> None:
    lines: list[str] = []
    said = "s3://modells/mirror can't be .*: The specified bucket does not exist"
    with pytest.raises(DataError, match=said):
        mirror_of(empty, "s3://modells/mirror").restore()
    mirror_of(run_dir, "s3://modells/mirror", lines.append).push()
    assert re.search(said, lines[0])
    assert s3.buckets() == [BUCKET]


@pytest.mark.slow
def test_a_wrong_login_is_told_with_where_it_is_taken_from_and_never_shown(
    s3: ObjectStore, run_dir: Path, empty: Path
) -> None:
    s3.refuse_all()
    lines: list[str] = []
    with pytest.raises(DataError) as caught:
        mirror_of(empty, f"s3://{BUCKET}/x").restore()
    mirror_of(run_dir, f"s3://{BUCKET}/x", lines.append).push()
    refused = "PermissionError: The AWS Access Key Id you provided does not exist in our records."
    assert caught.value.what == f"cluster.checkpoint_mirror=s3://{BUCKET}/x can't be listed: {refused}"
    assert str(caught.value.hint).startswith("AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), ")
    assert lines[0] == (
        f"WARNING: cluster.checkpoint_mirror=s3://{BUCKET}/x can't be listed: {refused}; the training goes on without "
        "the mirror, which is tried again"
    )
    assert (lines[1].startswith("  try: AWS_ACCESS_KEY_ID=…"), len(lines)) == (True, 2)
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in "".join((str(caught.value), *lines))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("gs://bucket/x", r"cluster.checkpoint_mirror=gs://bucket/x: the driver of gs:// is not installed"),
        (
            "s3://me:secret@bucket/x",
            r"cluster.checkpoint_mirror=s3://bucket/x: an address with s3:// holds no login\n  try: AWS_ACCESS_KEY_ID=",
        ),
        ("nope://x", r"cluster.checkpoint_mirror=nope://x: .*protocols: http"),
    ],
)
def test_an_address_that_cannot_be_used_here_is_told_in_one_message(address: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why) as caught:
        mirror_of(tmp_path, address)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["relative/path", "https://host/x", "s3://", "s3:///", "memory://x"])
def test_what_is_no_address_to_write_to_is_refused_with_the_configuration(address: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.checkpoint_mirror={address} must be an address"):
        ClusterConfig(checkpoint_mirror=address)
