"""An exported run: equal bytes for equal folders, no password in it, and nothing foreign unpacked."""

from __future__ import annotations

import gzip
import io
import random
import re
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest

from pipeline.cli import invocation
from pipeline.cli.commands import reproduce
from pipeline.cli.session import session
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import canonical_json, sha256_bytes, sha256_text
from pipeline.keys.content_key import ContentKey
from pipeline.reproduction import archive as export
from pipeline.runs.folder import RunFolder
from tests.pipeline import finished_folder
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import finished, key_of
from tests.pipeline.hostile_tars import hostile, huge
from tests.waiting import promised_s

CONFIG = {**finished_folder.CONFIG, "tracking": {"uri": "https://me:secret@host/x"}}
KEY = key_of(CONFIG).short


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return finished(tmp_path / "runs", config=CONFIG, provenance={"git_commit": None})


@pytest.mark.slow
def test_files_are_meant_from_the_folder_where_the_command_was_typed(
    folder: RunFolder, tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (typed_in := tmp_path / "typed").mkdir()
    monkeypatch.setattr(invocation, "typed_in", lambda: typed_in)
    monkeypatch.setattr("pipeline.reproduction.archive.check_parts", lambda *_: None)  # no project's sources here
    printed(reproduce.export, tmp_path / "runs", f"run={KEY}", "to=mine.tar.gz")
    assert reproduce._find_run(session(), "mine.tar.gz", tmp_path / "scratch").key == KEY


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
    back = export.unpack(tmp_path / "a.tar.gz", tmp_path / "back", root=tmp_path)
    assert back.key == KEY
    assert (back.read_json("config.json") or {})["tracking"] == {"uri": "https://***@host/x"}
    assert not (back.path / "checkpoints").exists()
    export.export(folder, root=tmp_path, to=tmp_path / "c.tar.gz", weights=True)
    again = export.unpack(tmp_path / "c.tar.gz", tmp_path / "again", root=tmp_path)
    assert (again.path / "checkpoints" / "final.pt").read_bytes() == b"some bytes"


def test_every_file_of_the_code_travels_and_the_copy_still_gives_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {**key_of().parts}
    sources = {"trainers/x.py": finished_folder.CODE, "conf/net.yaml": b"width: 3\n", "m1/five.txt": b"5\n"}
    parts["code"] = {name: sha256_bytes(content) for name, content in sources.items()}
    folder = finished(tmp_path / "runs", ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts))
    for name in ("conf/net.yaml", "m1/five.txt", "m1/__pycache__/five.cpython-312.pyc"):
        (folder.code / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.code / name).write_bytes(sources.get(name, b"of Python's own"))
    back = export.unpack(exported(folder, tmp_path), tmp_path / "back", root=tmp_path)
    files = {path.relative_to(back.code).as_posix(): path.read_bytes() for path in back.code.rglob("*.*")}
    assert files == sources
    (folder.code / "conf/net.yaml").write_bytes(b"from: https://me:secret@host/x\n")
    monkeypatch.setattr(export, "check_parts", lambda *_: None)  # as if the key were taken of it
    with pytest.raises(PacelineError, match=r"code/conf/net\.yaml holds a login in an"):
        exported(folder, tmp_path)


@pytest.mark.parametrize("content", [b"root:x:0:0\n", b""])
def test_a_file_that_is_no_archive_at_all_is_refused_in_plain_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "passwd").write_bytes(content)
    with pytest.raises(UsageError, match=f"^run={tmp_path}/passwd is no archive of doit export$"):
        export.unpack(tmp_path / "passwd", tmp_path / "place", root=tmp_path)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([named(f"{KEY}/../../evil")], "leads out of its folder"),
        ([named("/etc/evil")], "leads out of its folder"),
        ([named("evil")], "leads out of the run's folder"),
        ([named(f"{KEY}/link", tarfile.SYMTYPE)], "is no plain file"),
        ([named(f"{KEY}/link", tarfile.LNKTYPE)], "is no plain file"),
        ([named(f"{KEY}/pipe", tarfile.FIFOTYPE)], "is no plain file"),
        ([named(f"{KEY}/a"), named("ba9876543210/a")], "holds more than one run"),
        ([named("some/file")], "is no exported run"),
        ([], "is no exported run"),
        ([named(f"{KEY}/a"), named(f"{KEY}/a")], "'[0-9a-f]+/a' is in it twice"),
        ([named(f"{KEY}/a"), named(f"{KEY}/A")], "holds '[0-9a-f]+/A' twice"),
        ([named(f"{KEY}/a")], "has no manifest.json: it isn't an exported run, or an older Paceline wrote it"),
    ],
)
def test_an_archive_that_is_not_ours_is_refused_before_anything_is_written(
    tmp_path: Path, members: list[tarfile.TarInfo], said: str
) -> None:
    archive = archive_of(tmp_path / "x.tar.gz", *members)
    with pytest.raises(UsageError, match=said):
        export.unpack(archive, tmp_path / "place", root=tmp_path)
    assert not (tmp_path / "place").exists()


def test_an_archive_that_unpacks_to_too_much_or_is_cut_off_is_refused(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=True)
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="can't be read as an exported run"):
        export.unpack(tmp_path / "cut.tar.gz", tmp_path / "place", root=tmp_path)
    monkeypatch.setattr(export, "_LARGEST_BYTES", 10)
    with pytest.raises(UsageError, match="it unpacks to more than"):
        export.unpack(tmp_path / "a.tar.gz", tmp_path / "place", root=tmp_path)


def test_weights_that_are_gone_are_named(folder: RunFolder, tmp_path: Path) -> None:
    (folder.path / "checkpoints" / "final.pt").unlink()
    with pytest.raises(PacelineError, match=r"final\.pt is missing"):
        export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=True)


def exported(folder: RunFolder, tmp_path: Path) -> Path:
    export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=True)
    return tmp_path / "a.tar.gz"


def files_of(folder: RunFolder) -> dict[Path, bytes]:
    return {path.relative_to(folder.path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


def test_no_single_flipped_bit_of_an_archive_passes(folder: RunFolder, tmp_path: Path) -> None:
    archive = exported(folder, tmp_path)
    whole = archive.read_bytes()
    good = export.unpack(archive, tmp_path / "good", root=tmp_path)
    files = files_of(good)
    draw, passed, refused = random.Random(20261121), [], []
    for number in range(200):
        at = draw.randrange(len(whole) * 8) if number >= 10 else draw.randrange(10 * 8)  # its header, too
        archive.write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ 1 << at % 8]) + whole[at // 8 + 1 :])
        place = tmp_path / f"flipped-{number}"
        try:
            back = export.unpack(archive, place, root=tmp_path)
        except UsageError as error:
            refused.append((f"run={archive}" in str(error), place.exists()))
        else:  # gzip's own flags, time, level and system, or another spelling of the same bytes: nothing of the run
            passed.append(at // 8)
            assert files_of(back) == files
            assert gzip.decompress(archive.read_bytes()) == gzip.decompress(whole)
    assert len(passed) <= 20  # of 200: no check that lets everything pass
    assert set(refused) == {(True, False)}


def repacked(archive: Path, change: dict[str, bytes | None], *, top: str = KEY, sealed: bool = False) -> None:
    """Members replaced, added or (None) taken out, by someone who knows tar; ``sealed``: and the manifest."""
    with tarfile.open(archive, "r:gz") as tar:
        files = {name.partition("/")[2]: tar.extractfile(name) for name in tar.getnames()}
        content = {name: file.read() for name, file in files.items() if file is not None}
    content |= {name: data for name, data in change.items() if data is not None}
    for name, data in change.items():
        if data is None:
            del content[name]
    if sealed:
        about = documents.open_sealed(content.pop(export.MANIFEST))
        about |= {"key": top, "files": {name: sha256_bytes(data) for name, data in content.items()}}
        content[export.MANIFEST] = documents.sealed(about).encode()
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"code/trainers/x.py": b"SCALE = 7.0\n"}, "'code/trainers/x.py' was altered; its sha256 isn't"),
        ({"code/trainers/y.py": b""}, "'code/trainers/y.py' was added; manifest.json doesn't name it"),
        ({"changes.patch": None}, "'changes.patch' was taken out; manifest.json names it"),
        ({"manifest.json": None}, "has no manifest.json"),
        ({"manifest.json": b"{}"}, "can't be read as an exported run: has no sha256 of its own text"),
    ],
)
def test_what_the_manifest_does_not_name_is_refused_by_name(
    folder: RunFolder, tmp_path: Path, change: dict[str, bytes | None], said: str
) -> None:
    archive = exported(folder, tmp_path)
    repacked(archive, change)
    with pytest.raises(UsageError, match=said):
        export.unpack(archive, tmp_path / "place", root=tmp_path)
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"code/trainers/x.py": b"SCALE = 7.0\n"}, "code was altered: it isn't the code that the key was taken of"),
        ({"config.json": b'{"seed": 1}'}, "config.json was altered: it isn't the configuration that the key was"),
        ({"key.json": b"{}"}, "key.json was altered: it doesn't agree with its own digest"),
        ({"result.json": b"{}"}, "result.json was altered: it has no sha256 of its own text"),
        ({"provenance.json": b"{}"}, "provenance.json was altered: it isn't what it was when the run finished"),
        ({"changes.patch": b""}, "changes.patch was altered: it isn't what it was when the run finished"),
    ],
)
def test_under_a_manifest_made_anew_the_parts_still_have_to_give_the_key(
    folder: RunFolder, tmp_path: Path, change: dict[str, bytes | None], said: str
) -> None:
    archive = exported(folder, tmp_path)
    repacked(archive, change, sealed=True)
    with pytest.raises(UsageError, match=said):
        export.unpack(archive, tmp_path / "place", root=tmp_path)


def test_a_renamed_folder_in_an_archive_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    archive = exported(folder, tmp_path)
    repacked(archive, {}, top="ba9876543210")
    with pytest.raises(UsageError, match=f"manifest.json is that of run {KEY}"):
        export.unpack(archive, tmp_path / "place", root=tmp_path)
    repacked(archive, {}, top="ba9876543210", sealed=True)
    with pytest.raises(UsageError, match=r"key\.json was altered: it doesn't agree with its own digest and the"):
        export.unpack(archive, tmp_path / "place", root=tmp_path)


def test_what_keeps_a_run_from_being_exported_is_named(folder: RunFolder, tmp_path: Path) -> None:
    path = folder.path / "provenance.json"
    for damage, said in ((b"{", "is damaged"), (None, "is missing")):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(PacelineError, match=rf"provenance\.json {said}: nothing could tell where an export of run"):
            export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False)
    (folder.path / "key.json").write_text('{"version": ' + "9" * 5000)
    with pytest.raises(PacelineError, match=r"key\.json was altered: it doesn't agree with its own digest"):
        export.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False)


def test_an_export_of_a_run_that_was_never_trained_says_so(tmp_path: Path) -> None:
    never = RunFolder(tmp_path / "0123456789ab")
    with pytest.raises(
        PacelineError, match=r"run 0123456789ab was never trained here: .*\n  try: the command that started it"
    ):
        export.export(never, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False)


@pytest.mark.parametrize("case", hostile(f"{KEY}/a"))
def test_a_hostile_archive_is_refused_at_once_and_with_little_memory(case: str, tmp_path: Path) -> None:
    sent, why = hostile(f"{KEY}/a")[case]
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(sent, 1))
    refuses_at_once(tmp_path, f"can't be read as an exported run: .*{re.escape(why)}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar.gz"]


def test_a_manifest_of_6_gib_is_refused_before_it_is_read(tmp_path: Path) -> None:
    header = huge(f"{KEY}/manifest.json", tarfile.REGTYPE, 6 << 30)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(header + bytes(64 << 20), 1))
    refuses_at_once(tmp_path, r"manifest\.json' has 6,442,450,944 bytes, of at most 67,108,864")


def refuses_at_once(folder: Path, why: str) -> None:
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(UsageError, match=why):
            export.unpack(folder / "x.tar.gz", folder / "place", root=folder)
        assert time.monotonic() - began < promised_s(1)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
