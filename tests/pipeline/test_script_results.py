"""Results of scripts: what was read besides the key, proven or not, and the files that they left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.documents import write_sealed
from pipeline.core.files import sha256_file, write_atomic, write_json
from pipeline.execution.launch_folder import set_aside_outputs
from pipeline.execution.run import key_lacks, unkeyed_text
from pipeline.keys.content_key import ContentKey
from pipeline.runs import index, status
from pipeline.runs.folder import RunFolder
from tests.pipeline import finished_folder
from trainers.observation.input_changes import host_identity
from trainers.script.outputs import digests_of_results

SCRIPT = {"name": "script", "script": "a.py"}


def finished_script(
    runs_dir: Path, config: dict[str, Any], unkeyed: dict[str, str] | None = None
) -> tuple[RunFolder, ContentKey]:
    """The finished run of a script, as the node half and the controller leave it."""
    key = finished_folder.key_of(config)
    folder = RunFolder(runs_dir / key.short)
    for name in ("outputs/w.txt", "checkpoints/1.pt", "metrics.jsonl", "outputs.json", "config.yaml"):
        write_atomic(folder.path / name, "some bytes")
    write_json(folder.path / "config.json", config)
    write_json(folder.path / "key.json", {"key": key.short, "digest": key.digest, **key.parts})
    outputs = digests_of_results(folder.path)
    summary = {"metrics": {"loss": 1.0}, "unkeyed": unkeyed or {}, "outputs_sha256": outputs}
    write_sealed(folder.summary, summary)
    folder.write_result(key=key, summary=summary, hosts=["a"], attempts=1, duration_s=1.0, mlflow_run_id=None)
    return folder, key


@pytest.fixture
def ended(tmp_path: Path) -> tuple[RunFolder, ContentKey]:
    return finished_script(tmp_path, {"program": SCRIPT})


def test_a_result_made_without_the_seal_does_not_count_where_the_seal_is_asked_for(tmp_path: Path) -> None:
    folder, key = finished_script(tmp_path, {"program": {**SCRIPT, "seal": "off"}})
    assert key_lacks(folder, key) == "it was made with program.seal=off, so nobody looked for files that its key lacks"
    assert folder.stale_because(key.digest) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": "read"}, "a was read; add it"),
        ({"a": "looked for"}, "a was looked for and isn't in the snapshot; add it"),
        (
            {"a": "read", "b": "looked for", "c": "looked for"},
            "a was read; b, c were looked for and aren't in the snapshot; add them",
        ),
        (dict.fromkeys("abcde", "read"), "a, b, c and 2 more were read; add them"),
    ],
)
def test_what_the_key_lacks_was_read_or_only_looked_for(found: dict[str, str], said: str) -> None:
    word = f"program.inputs=[{','.join(found)}]"
    assert unkeyed_text(found, "program.inputs") == f"its key is not complete: {said} to program.inputs: '{word}'"
    assert unkeyed_text({}, "program.inputs") is None


def test_what_another_node_read_counts_as_what_the_first_one_did(
    ended: tuple[RunFolder, ContentKey], tmp_path: Path
) -> None:
    folder, key = ended
    part = tmp_path / "part1.txt"
    part.write_text("1")
    record = {"host": host_identity(), "files": {str(part): [sha256_file(part), None]}, "unkeyed": {}}
    write_sealed(folder.path / "nodes/1/dependencies.json", record)
    assert key_lacks(folder, key) is None
    part.write_text("2")
    assert key_lacks(folder, key) == f"{part}, which it read and its key lacks, changed"
    write_sealed(folder.path / "nodes/1/dependencies.json", {**record, "unkeyed": {"part1.txt": "read"}})
    assert (
        key_lacks(folder, key)
        == "its key is not complete: part1.txt was read; add it to program.inputs: 'program.inputs=[part1.txt]'"
    )


def test_a_run_whose_key_is_not_complete_is_no_other_ones_nearest_finished_run(tmp_path: Path) -> None:
    complete, _ = finished_script(tmp_path, {"program": SCRIPT, "lr": 0.1})
    _, key = finished_script(tmp_path, {"program": SCRIPT, "lr": 0.2}, {"lr.txt": "read"})
    for new in (key.parts, {**key.parts, "data": "of another run"}):  # its own, which is repeated, and another
        found = index.nearest(tmp_path, index.finished_parts(tmp_path), new)
        assert found is not None
        assert found[0] == complete.key


def test_the_run_of_a_script_is_unproven_until_it_came_out_equal_again(ended: tuple[RunFolder, ContentKey]) -> None:
    folder, key = ended
    assert index.row(folder).note == "unproven"
    folder.mark_proven()
    assert (folder.stale_because(key.digest), index.row(folder).note) == (None, "")


@pytest.mark.parametrize("name", ["outputs/w.txt", "checkpoints/1.pt", "metrics.jsonl", "outputs.json"])
def test_a_script_is_done_only_with_the_files_it_left(ended: tuple[RunFolder, ContentKey], name: str) -> None:
    folder, key = ended
    path, result = folder.path / name, folder.result.read_bytes()
    for told in (result, None):
        folder.result.unlink() if told is None else folder.result.write_bytes(told)
        assert folder.training_done(key)
        for data in (b"", b"same size!", None):
            path.unlink() if data is None else path.write_bytes(data)
            assert not folder.training_done(key), (data, told is None)
            path.write_bytes(b"some bytes")


def test_a_script_is_not_done_without_what_another_host_wrote(ended: tuple[RunFolder, ContentKey]) -> None:
    folder, key = ended
    of_other_host = folder.path / "nodes/1/outputs/w.txt"
    write_atomic(of_other_host, "some bytes")
    summary = folder.read_summary()
    assert summary is not None
    folder.write_result(key=key, summary=summary, hosts=["a", "b"], attempts=1, duration_s=1.0, mlflow_run_id=None)
    assert folder.training_done(key)
    of_other_host.unlink()
    assert folder.stale_because(key.digest) == "nodes/1/outputs/w.txt is missing"
    assert not folder.training_done(key)


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:40], lambda data: data.replace(b"1.0", b"9.0")]
)
def test_a_damaged_result_of_a_script_is_a_reason_to_make_it_again_and_no_error(
    ended: tuple[RunFolder, ContentKey], damage: Callable[[bytes], bytes]
) -> None:
    folder, key = ended
    assert (folder.stale_because(key.digest), key_lacks(folder, key)) == (None, None)
    folder.result.write_bytes(damage(folder.result.read_bytes()))
    assert key_lacks(folder, key) is None
    assert str(folder.stale_because(key.digest)).startswith("result.json was altered: it ")
    assert folder.training_done(key)


def test_a_file_that_comes_later_is_named_and_is_none_of_the_run_s(ended: tuple[RunFolder, ContentKey]) -> None:
    folder, key = ended
    assert status.files_added_later(folder) == []
    write_atomic(folder.path / "outputs/notes.txt", "mine")
    assert status.files_added_later(folder) == ["outputs/notes.txt"]
    assert "  outputs/notes.txt was added after the run; it is none of its outputs" in status.status(folder)
    assert folder.stale_because(key.digest) is None


def test_a_script_that_had_ended_starts_anew_with_empty_folders(ended: tuple[RunFolder, ContentKey]) -> None:
    folder, _ = ended
    folder.result.unlink()
    metrics = (folder.path / "metrics.jsonl").read_bytes()
    before = {path.relative_to(folder.path): path.read_bytes() for path in (folder.path / "outputs").rglob("*")}
    place = set_aside_outputs(folder, 2)
    assert place == folder.path / "attempts/2/before"
    assert not (folder.path / "outputs").exists()
    assert not (folder.path / "checkpoints").exists()
    assert not (folder.path / "metrics.jsonl").exists()
    assert (place / "metrics.jsonl").read_bytes() == metrics
    assert before
    assert {path: (place / path).read_bytes() for path in before} == before
    assert set_aside_outputs(folder, 2) is None
    folder.summary.unlink()
    write_atomic(folder.path / "checkpoints/1.pt", "of an attempt that was killed")
    assert set_aside_outputs(folder, 2) is None
    assert (folder.path / "checkpoints/1.pt").exists()
