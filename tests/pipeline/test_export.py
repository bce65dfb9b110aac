"""An exported run: equal bytes for equal folders, no password in it, and nothing foreign unpacked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import finished_folder
import pytest
from finished_folder import finished, key_of

from pipeline import export
from pipeline.errors import PacelineError, UsageError
from pipeline.runfolder import RunFolder

CONFIG = {**finished_folder.CONFIG, "tracking": {"uri": "https://me:secret@host/x"}}
KEY = key_of(CONFIG).short


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return finished(tmp_path / "runs", config=CONFIG, provenance={"git_commit": None})


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * min(member.size, 1 << 10)))
    return path


def named(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
    return member


def test_a_run_comes_back_as_it_was_without_weights_and_passwords(folder: RunFolder, tmp_path: Path) -> None:
    export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False)
    (folder.path / "config.json").touch()
    export.export(folder, root=tmp_path, to=tmp_path / "b.tar.gz", weights=False)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    back = export.unpack(tmp_path / "a.tar.gz", tmp_path / "back")
    assert back.key == KEY
    assert (back.read_json("config.json") or {})["tracking"] == {"uri": "https://***@host/x"}
    assert not (back.path / "checkpoints").exists()
    export.export(folder, root=tmp_path, to=tmp_path / "c.tar.gz", weights=True)
    again = export.unpack(tmp_path / "c.tar.gz", tmp_path / "again")
    assert (again.path / "checkpoints" / "final.pt").read_bytes() == b"some bytes"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([named(f"{KEY}/../../evil")], "leads out of the run's folder"),
        ([named("/etc/evil")], "leads out of the run's folder"),
        ([named(f"{KEY}/link", tarfile.SYMTYPE)], "is no plain file"),
        ([named(f"{KEY}/link", tarfile.LNKTYPE)], "is no plain file"),
        ([named(f"{KEY}/pipe", tarfile.FIFOTYPE)], "is no plain file"),
        ([named(f"{KEY}/a"), named("ba9876543210/a")], "holds more than one run"),
        ([named("some/file")], "is no exported run"),
        ([], "is no exported run"),
    ],
)
def test_an_archive_that_is_not_ours_is_refused_before_anything_is_written(
    tmp_path: Path, members: list[tarfile.TarInfo], said: str
) -> None:
    archive = archive_of(tmp_path / "x.tar.gz", *members)
    with pytest.raises(UsageError, match=said):
        export.unpack(archive, tmp_path / "place")
    assert not (tmp_path / "place").exists()


def test_an_archive_that_unpacks_to_too_much_or_is_cut_off_is_refused(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=True)
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="can't be read as an exported run"):
        export.unpack(tmp_path / "cut.tar.gz", tmp_path / "place")
    monkeypatch.setattr(export, "_LARGEST_BYTES", 10)
    with pytest.raises(UsageError, match="unpacks to more than"):
        export.unpack(tmp_path / "a.tar.gz", tmp_path / "place")


def test_weights_that_are_gone_are_named(folder: RunFolder, tmp_path: Path) -> None:
    (folder.path / "checkpoints" / "final.pt").unlink()
    with pytest.raises(PacelineError, match=r"final\.pt is missing"):
        export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=True)
