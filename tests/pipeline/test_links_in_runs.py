"""Links in a run folder that somebody copied: what lies elsewhere is neither exported nor recorded nor shown."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from pipeline.reproduction import archive
from pipeline.runs import status
from pipeline.runs.folder import RunFolder, leads_out
from pipeline.tracking import sent_files
from tests.pipeline.finished_folder import finished


@pytest.fixture
def linked(tmp_path: Path) -> RunFolder:
    """A log and an output are links to a file elsewhere, a folder of the evaluation is; one output leads to another."""
    folder = finished(tmp_path / "runs", provenance={"git_commit": None})
    for path in ("attempts/1", "outputs", "pack"):
        (folder.path / path if path != "pack" else tmp_path / path).mkdir(parents=True, exist_ok=True)
    (tmp_path / "private").write_text("of somebody else\n")
    (tmp_path / "pack" / "manifest.json").write_text("{}")
    for name, target in {
        "attempts/1/a.log": tmp_path / "private",
        "outputs/leak.txt": Path("../../../private"),
        "outputs/up": tmp_path,
        "outputs/latest.pt": Path("best.pt"),
        "data": tmp_path / "pack",
    }.items():
        (folder.path / name).symlink_to(target)
    (folder.path / "outputs/best.pt").write_bytes(b"weights")
    (folder.path / "attempts/1/b.log").write_text("a line\n")
    return folder


def test_no_link_takes_a_file_of_elsewhere_into_an_export(linked: RunFolder, tmp_path: Path) -> None:
    (linked.code / "private.py").symlink_to(tmp_path / "private")
    said: list[str] = []
    archive.export(linked, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False, say=said.append)
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"attempts/1/b.log", "data/manifest.json"} <= names
    assert not {"attempts/1/a.log", "code/private.py"} & names
    away = "attempts/1/a.log, code/private.py: a link leads out of the run folder, so it is not read"
    assert said == [away]


def test_no_link_takes_a_file_of_elsewhere_into_a_record(linked: RunFolder, tmp_path: Path) -> None:
    names = {path.relative_to(linked.path).as_posix() for path in sent_files.files_at_end(linked.path, 1)}
    assert {"attempts/1/b.log", "outputs/best.pt", "outputs/latest.pt"} <= names
    assert not {"attempts/1/a.log", "outputs/leak.txt"} & names
    away = "outputs/leak.txt, attempts/1/a.log: a link leads out of the run folder, so it is not read"
    assert [*sent_files.notes_on_left_out(linked.path)] == [away]
    (linked.path / "changes.patch").unlink()
    (linked.path / "changes.patch").symlink_to(tmp_path / "private")
    assert linked.path / "changes.patch" not in sent_files.files_at_start(linked.path)


def test_no_log_is_shown_that_a_link_leads_to_elsewhere(linked: RunFolder) -> None:
    away = "attempts/1/a.log: a link leads out of the run folder, so it is not read"
    assert list(status.logs(linked, None)) == [away, "==> attempt 1, b <==", "a line"]


def test_the_link_to_the_data_is_no_way_to_a_link_in_the_pack(linked: RunFolder, tmp_path: Path) -> None:
    assert not leads_out(linked.path / "data/manifest.json", linked.path)
    (tmp_path / "pack/manifest.json").unlink()
    (tmp_path / "pack/manifest.json").symlink_to(tmp_path / "private")
    assert leads_out(linked.path / "data/manifest.json", linked.path)
