import errno
import json
import os
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import MakeRun, write_pack
from trainers.core.errors import TrainerError
from trainers.data.augment import normaliser
from trainers.data.pack import DamagedPackError, PackWatch, check_digests, open_pack, read_manifest, set_aside
from trainers.training.loop import Trainer
from trainers.training.session import run


def test_a_pack_is_mapped_with_the_shapes_of_its_manifest(tmp_path: Path) -> None:
    pack = open_pack(write_pack(tmp_path))
    assert (pack.images.shape, pack.images.dtype) == ((88, 1, 8, 8), torch.uint8)
    assert (pack.labels.shape, pack.labels.dtype) == ((88,), torch.int64)
    assert bytes(pack.images[3].flatten().tolist()) == (tmp_path / "images.bin").read_bytes()[192:256]
    check_digests(pack)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = write_pack(tmp_path) / "images.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TrainerError, match=r"images.bin has 5627 bytes, the manifest says 5632"):
        open_pack(tmp_path)


def test_an_altered_file_is_named(tmp_path: Path) -> None:
    path = write_pack(tmp_path) / "images.bin"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])
    with pytest.raises(TrainerError, match=r"images.bin was altered: its sha256 is"):
        check_digests(open_pack(tmp_path))


@pytest.mark.parametrize("name", ["manifest.json", "images.bin", "labels.bin"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_pack(tmp_path) / name).unlink()
    with pytest.raises(TrainerError, match=rf"{name} cannot be read \(No such file"):
        open_pack(tmp_path)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    path = write_pack(tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace('"num_classes": 3', '"num_classes": 4'))
    with pytest.raises(TrainerError, match=r"manifest.json was altered, .*: its digest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"digest": "x"})])
def test_something_else_than_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(TrainerError, match=r"manifest.json (was altered|has no field)"):
        read_manifest(tmp_path)


def test_a_constant_channel_is_not_divided_by_its_spread_of_zero(tmp_path: Path) -> None:
    pack = open_pack(write_pack(tmp_path, mean=[0.0], std=[0.0]))
    images = normaliser(pack.manifest, normalise=True, device=torch.device("cpu"))(pack.images)
    torch.testing.assert_close(images, pack.images / 255)


@pytest.mark.parametrize("name", ["images.bin", "labels.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_bad_pack_is_set_aside_and_counts_for_none(make_run: MakeRun, name: str, damage: str) -> None:
    run_dir = make_run()
    path = run_dir / "data" / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[9] ^= 1
    path.write_bytes(content[:-3] if damage == "cut" else content)
    if damage == "gone":
        path.unlink()
    with pytest.raises(TrainerError, match=rf"{name} .*data is set aside: the same command makes it or sends it again"):
        run(run_dir / "config.json")
    assert not (run_dir / "data" / "manifest.json").exists()
    write_pack(run_dir / "data")
    run(run_dir / "config.json")


def test_a_bad_pack_that_cannot_be_set_aside_is_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    told = str(set_aside(DamagedPackError(write_pack(tmp_path), "images.bin was altered")))
    assert told.startswith(
        f"images.bin was altered; remove {tmp_path} there (Permission denied), then the same command"
    )


def flip(path: Path) -> None:
    """One bit, in place, with the old time stamp."""
    stat = path.stat()
    with path.open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_pack_that_is_written_to_is_noticed_and_one_that_is_touched_or_replaced_is_not(tmp_path: Path) -> None:
    watch = PackWatch(open_pack(write_pack(tmp_path)))
    path = tmp_path / "images.bin"
    assert watch.damage() is None
    path.touch()
    assert watch.damage() is None
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    (tmp_path / "other").replace(path)  # the mapping has the old file
    assert watch.damage() is None
    flip(tmp_path / "labels.bin")
    assert "labels.bin was altered" in str(watch.damage())


def test_nothing_is_kept_of_what_was_computed_from_data_that_changed_under_the_training(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(trainer__epochs=3)
    log = Trainer._log

    def altering(self: Trainer, epoch: int, *, evaluates: bool) -> object:
        if self.steps.place(self.step)[0] == 2 and self.saved_step:
            flip(run_dir / "data" / "images.bin")
        return log(self, epoch, evaluates=evaluates)

    monkeypatch.setattr(Trainer, "_log", altering)
    with pytest.raises(TrainerError, match=r"images\.bin was altered.* is set aside: the same command"):
        run(run_dir / "config.json")
    steps = sorted(int(path.stem[5:]) for path in (run_dir / "checkpoints").glob("step-*.pt"))
    assert steps == [5]
    assert not (run_dir / "summary.json").exists()
