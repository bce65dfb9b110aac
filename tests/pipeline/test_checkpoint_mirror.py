"""Checkpoints copied to an address and taken from there: whole ones only, the newest first, no more than two."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.launchers.settings import ClusterConfig
from pipeline.core.errors import DataError
from pipeline.core.files import canonical_json, sha256_text, write_json
from pipeline.runs import journal
from pipeline.runs.checkpoint_mirror import CheckpointMirror, Mirroring
from pipeline.runs.checkpoints import newest_step, read_verified
from tests.s3_fixture import BUCKET
from tests.small_disk import mounted
from trainers.core.config import ConfigError

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore


def save(run_dir: Path, step: int, **shards: str) -> None:
    """A checkpoint as a trainer leaves it."""
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    path.write_bytes(b"weights of %d" % step)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    side = {"sha256": sha256, "step": step, "metrics": "", "attempt": f"abc-1-{step}"}
    named = {name.replace("_", "/"): text for name, text in shards.items()}
    for name, text in named.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if named:
        side["shards"] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in named.items()}
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_run_without_checkpoints_goes_on_from_the_newest_copy(address: str, run_dir: Path, empty: Path) -> None:
    mirror = CheckpointMirror(address, "abc")
    mirror.try_writing()
    assert mirror._store.names("abc") == []
    assert (mirror.push(run_dir), mirror.push(run_dir)) == (10, 0)
    for step in (20, 30):
        save(run_dir, step, **{f"shards-{step:08d}_0.distcp": "slice"})
        assert mirror.push(run_dir) == step
    another = CheckpointMirror(address, "abc")
    assert [name for name in another._store.names("abc") if name.endswith(".pt")] == [
        "step-00000020.pt",
        "step-00000030.pt",
    ]
    assert another.restore(empty) == (30, [])
    assert names(empty / "checkpoints") == ["shards-00000030", "step-00000030.json", "step-00000030.pt"]
    assert read_verified(empty / "checkpoints" / "step-00000030.pt")["step"] == 30
    assert journal.known_attempts(empty) == ["abc-1-30"]
    assert names(empty) == ["attempts.json", "checkpoints"]
    assert CheckpointMirror(address, "other").restore(empty) == (0, [])


def test_a_copy_that_is_torn_or_has_no_end_yet_is_not_taken(run_dir: Path, empty: Path, tmp_path: Path) -> None:
    mirror = CheckpointMirror(str(tmp_path / "mirror"), "abc")
    mirror.push(run_dir)
    save(run_dir, 20)
    mirror.push(run_dir)
    there = tmp_path / "mirror" / "abc"
    (there / "step-00000020.pt").write_bytes(b"torn")
    (there / "step-00000030.pt").write_bytes(b"its json isn't written yet")
    step, (warning,) = mirror.restore(empty)
    assert step == 10
    assert warning.startswith(f"step-00000020 of cluster.checkpoint_mirror={tmp_path}/mirror is skipped: the sha256 of")
    assert names(empty / "checkpoints") == ["step-00000010.json", "step-00000010.pt"]


def test_damaged_copies_of_higher_steps_push_no_new_one_out(tmp_path: Path) -> None:
    there, run_dir, mirror = tmp_path / "m" / "abc", tmp_path / "run", CheckpointMirror(f"{tmp_path}/m", "abc")
    there.mkdir(parents=True)
    for stem in ("step-00000080", "step-00000090"):
        (there / f"{stem}.json").write_text('{"step": 1}')
        (there / f"{stem}.pt").write_text("junk")
    kept = []
    for step in (10, 20, 30, 100, 110):
        save(run_dir, step)
        mirror.push(run_dir)
        kept.append([int(path.stem[5:]) for path in sorted(there.glob("*.json"))])
    assert kept == [[10, 80, 90], [10, 20, 80, 90], [20, 30, 80, 90], [90, 100], [100, 110]]


def test_copies_that_were_interrupted_or_found_no_room_are_removed(run_dir: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small") as place:
        there, mirror = place / "abc", CheckpointMirror(str(place), "abc")
        mirror.push(run_dir)
        save(run_dir, 20)
        (run_dir / "checkpoints" / "step-00000020.pt").write_bytes(bytes(3_000_000))
        with pytest.raises(DataError, match="No space left on device"):
            mirror.push(run_dir)
        assert names(there) == ["step-00000010.json", "step-00000010.pt"]
        (there / "step-00000015.pt").write_text("its command was killed")
        save(run_dir, 30)
        assert mirror.push(run_dir) == 30
        assert names(there) == [f"step-000000{step}.{end}" for step in (10, 30) for end in ("json", "pt")]


@pytest.mark.slow
def test_a_copy_that_cannot_be_read_now_is_no_reason_to_go_on_from_an_older_one(
    s3: ObjectStore, run_dir: Path, empty: Path
) -> None:
    mirroring = Mirroring(CheckpointMirror(f"s3://{BUCKET}/x", "abc"), run_dir, print)
    mirroring.push()
    save(run_dir, 20)
    mirroring.push()
    s3.refused_end = "20.pt"
    again = Mirroring(CheckpointMirror(f"s3://{BUCKET}/x", "abc"), empty, print)
    with pytest.raises(
        DataError, match=rf"s3://{BUCKET}/x can't be read: PermissionError: Forbidden\n.*the same command"
    ):
        again.restore()
    assert names(empty) == []
    s3.refused_end = None
    again.restore()
    assert newest_step(empty) == 20


def test_a_name_that_leads_elsewhere_is_not_followed(run_dir: Path, empty: Path, tmp_path: Path) -> None:
    side = {"sha256": "0", "step": 20, "metrics": "", "shards": {"../../evil": "0"}}
    (tmp_path / "mirror" / "abc").mkdir(parents=True)
    write_json(
        tmp_path / "mirror" / "abc" / "step-00000020.json", {**side, "digest": sha256_text(canonical_json(side))}
    )
    (tmp_path / "mirror" / "abc" / "step-00000020.pt").touch()
    _, (warning,) = CheckpointMirror(str(tmp_path / "mirror"), "abc").restore(empty)
    assert "is no file of a checkpoint" in warning
    assert names(empty) == []


@pytest.mark.slow
def test_a_run_that_has_checkpoints_takes_none_and_one_that_lost_them_says_what_it_took(
    address: str, run_dir: Path, empty: Path
) -> None:
    lines: list[str] = []
    Mirroring(CheckpointMirror(address, "abc"), run_dir, lines.append).push()
    save(empty, 5)
    mirroring = Mirroring(CheckpointMirror(address, "abc"), empty, lines.append)
    mirroring.restore()
    assert (newest_step(empty), lines) == (5, [])
    (empty / "checkpoints" / "step-00000005.pt").unlink()
    mirroring.restore()
    assert lines == [f"the run folder has no checkpoint; took that of step 10 from cluster.checkpoint_mirror={address}"]


def test_a_mirror_that_cannot_be_written_is_told_once_and_ends_nothing(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file")
    lines: list[str] = []
    mirroring = Mirroring(CheckpointMirror(str(tmp_path / "mirror"), "abc"), run_dir, lines.append)
    mirroring.try_writing()
    mirroring.push()
    (line,) = lines
    assert line.startswith(f"WARNING: cluster.checkpoint_mirror={tmp_path}/mirror can't be written: ")
    (tmp_path / "mirror").unlink()
    mirroring.push()
    assert (tmp_path / "mirror" / "abc" / "step-00000010.json").exists()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_refused_and_not_made(s3: ObjectStore, run_dir: Path, empty: Path) -> None:
    mirror = CheckpointMirror("s3://modells/mirror", "abc")
    for act in (mirror.restore, mirror.push):
        with pytest.raises(DataError, match=r"s3://modells/mirror can't be .*: The specified bucket does not exist"):
            act(empty if act == mirror.restore else run_dir)
    assert s3.buckets() == [BUCKET]


@pytest.mark.slow
def test_a_wrong_login_is_told_with_where_it_is_taken_from_and_never_shown(
    s3: ObjectStore, run_dir: Path, empty: Path
) -> None:
    s3.refuse_all()
    mirror, lines = CheckpointMirror(f"s3://{BUCKET}/x", "abc"), list[str]()
    with pytest.raises(DataError) as caught:
        Mirroring(mirror, empty, lines.append).restore()
    Mirroring(mirror, run_dir, lines.append).push()
    refused = "PermissionError: The AWS Access Key Id you provided does not exist in our records."
    assert caught.value.what == f"cluster.checkpoint_mirror=s3://{BUCKET}/x can't be listed: {refused}"
    assert str(caught.value.hint).startswith("AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), ")
    assert lines[0] == (
        f"WARNING: cluster.checkpoint_mirror=s3://{BUCKET}/x can't be written: {refused}; the training goes on without "
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
def test_an_address_that_cannot_be_used_here_is_told_in_one_message(address: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        CheckpointMirror(address, "abc")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["relative/path", "https://host/x", "s3://", "s3:///", "memory://x"])
def test_what_is_no_address_to_write_to_is_refused_with_the_configuration(address: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.checkpoint_mirror={address} must be an address"):
        ClusterConfig(checkpoint_mirror=address)
