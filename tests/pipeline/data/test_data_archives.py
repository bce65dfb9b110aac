from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.sources.folder import extract

WANTED = ("a.bin", "b.bin")


def tar_with(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            info.size = len(content) or info.size
            tar.addfile(info, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def refused(archive: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(DataError, match=text):
        extract(archive, WANTED, folder)
    written = set(tmp_path.rglob("*")) - set(before)
    assert all(folder in path.parents for path in written)
    assert {path.name for path in written if path.is_file()} <= set(WANTED)


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        (member("/tmp/a.bin"), "lies outside the archive's folder"),
        (member("../a.bin"), "lies outside the archive's folder"),
        (member("deep/../../a.bin"), "lies outside the archive's folder"),
        (member("a.bin", tarfile.SYMTYPE, linkname="/etc/passwd"), "'a.bin' is a link"),
        (member("folder", tarfile.SYMTYPE, linkname=".."), "'folder' is a link"),
        (member("a.bin", tarfile.LNKTYPE, linkname="b.bin"), "'a.bin' is a link"),
        (member("a.bin", tarfile.CHRTYPE, devmajor=1, devminor=3), "is a link or a device"),
        (member("a.bin", tarfile.FIFOTYPE), "is a link or a device"),
    ],
)
def test_hostile_tar_members_are_refused(hostile: tarfile.TarInfo, why: str, tmp_path: Path) -> None:
    content = b"x" if hostile.isreg() else b""
    archive = tar_with(tmp_path / "set.tar.gz", (member("b.bin"), b"fine"), (hostile, content))
    refused(archive, tmp_path, why)


@pytest.mark.parametrize("name", ["../a.bin", "/a.bin", "..\\a.bin", "C:\\a.bin"])
def test_zip_members_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as bundle:
        bundle.writestr(name, b"x")
    refused(tmp_path / "set.zip", tmp_path, "lies outside the archive's folder")


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("a.bin")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as bundle:
        bundle.writestr(info, "/etc/passwd")
    refused(tmp_path / "set.zip", tmp_path, "'a.bin' is a link or a device")


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    archive = tar_with(tmp_path / "set.tar.gz", (member("x/a.bin"), b"1"), (member("x/a.bin"), b"2"))
    refused(archive, tmp_path, "'x/a.bin' is there twice")


def test_what_is_not_wanted_stays_inside(tmp_path: Path) -> None:
    archive = tar_with(tmp_path / "set.tar.gz", (member("x/a.bin"), b"1"), (member("x/.bashrc"), b"2"))
    (tmp_path / "folder").mkdir()
    extract(archive, WANTED, tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder/x").iterdir()] == ["a.bin"]


@pytest.mark.parametrize("content", [b"", b"no archive", os.urandom(2000)])
def test_what_is_no_archive_says_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(content)
    refused(tmp_path / "set.tar.gz", tmp_path, "set.tar.gz is neither a tar nor a zip archive, or it is cut off")
