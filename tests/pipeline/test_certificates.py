"""Certificates of runs, and what `doit verify` says of them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from tests.pipeline.comparing_folders import failed, swept, trained
from tests.pipeline.conftest import Printed


@pytest.fixture
def certified(tmp_path: Path, reported: Printed) -> Path:
    """The certificate of a run in ``tmp_path``, whose files are intact."""
    run = trained(tmp_path)
    raw = json.loads((run.path / "key.json").read_text())
    assert raw["key"] == run.key
    reported(tmp_path, run.key)
    return tmp_path / "reports" / f"{run.key}.certificate.json"


def test_a_certificate_is_checked_with_its_run_and_without(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)  # no project's sources here
    said = verified(tmp_path, str(certified))
    checked = "key, code, 9 files, figures (not the data, which isn't here)"
    assert f"whole, and run {certified.name[:12]} is what it says: {checked}" in said
    assert "not who wrote it" in said
    assert verified(tmp_path, certified.name[:6]) == said
    elsewhere = verified(tmp_path / "nowhere", str(certified))
    assert f"Run {certified.name[:12]} isn't here, so nothing else was checked" in elsewhere


def test_a_certificate_names_the_file_of_the_run_that_was_altered(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    (tmp_path / certified.name[:12] / "checkpoints" / "final.pt").write_text("some byteS")
    (tmp_path / certified.name[:12] / "config.yaml").unlink()
    with pytest.raises(PacelineError, match=r"isn't what it says:\n  checkpoints/final.pt: its sha256 isn't \w{12}…\n"):
        verified(tmp_path, str(certified))


def test_nothing_is_certified_that_its_check_would_refuse(tmp_path: Path, reported: Printed) -> None:
    run = trained(tmp_path)
    weights = run.path / "checkpoints" / "final.pt"
    before = weights.stat()
    weights.write_text("some byteS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # which a list takes for a copied folder
    with pytest.raises(
        PacelineError, match=rf"{run.key} isn't .*: checkpoints/final\.pt was altered\n  try: the same doit"
    ):
        reported(tmp_path, run.key)
    assert not (tmp_path / "reports").exists()


@pytest.fixture
def of_sweep(tmp_path: Path, reported: Printed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificate of a sweep: two runs that are finished, and one that failed."""
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    swept(tmp_path, [trained(tmp_path, 0), trained(tmp_path, 1), failed(tmp_path)], ["seed=range(2)"])
    assert "certificate  " in reported(tmp_path)
    return tmp_path / "reports" / "sweep-tuned.certificate.json"


def test_a_sweeps_certificate_holds_each_finished_run_and_names_the_others(
    tmp_path: Path, of_sweep: Path, verified: Printed
) -> None:
    assert [*documents.read_sealed(of_sweep)["others"].values()] == ["FAILED"]
    said = verified(tmp_path, str(of_sweep))
    assert "whole, and 2 of its 2 runs are what it says: key, code, 18 files, figures (not the data" in said
    assert "made again   2 not made again when this was written" in said
    assert re.search(r"not checked  what it says of those that weren't finished: \w{12} FAILED", said)
    shutil.rmtree(tmp_path / documents.read_sealed(of_sweep)["runs"][1]["run"])
    assert "1 run: only that their keys follow" in verified(tmp_path, str(of_sweep))
    none_here = verified(tmp_path / "nowhere", str(of_sweep))
    assert "the keys of its 2 runs follow from their parts. None of them is here" in none_here


def test_a_sweeps_certificate_names_the_run_that_was_altered_and_the_one_that_was_edited(
    tmp_path: Path, of_sweep: Path, verified: Printed
) -> None:
    raw = documents.read_sealed(of_sweep)
    altered = raw["runs"][1]["run"]
    (tmp_path / altered / "checkpoints" / "final.pt").write_text("some byteS")
    with pytest.raises(PacelineError, match=f"not all of its runs are what it says:\n  {altered}: checkpoints/final"):
        verified(tmp_path, str(of_sweep))
    edits = [{"runs": runs} for runs in ([raw["runs"][0], {**raw["runs"][1], "what": 7}], [7], [], raw["runs"] * 2)]
    edits += [{"others": others} for others in (["x"], {altered: "FAILED"}, {"0" * 12: "FINISHED"}, {"\x1b": "FAILED"})]
    for edit in edits:
        of_sweep.write_text(documents.sealed({**raw, **edit}))
        with pytest.raises(PacelineError, match="was edited and sealed anew"):
            verified(tmp_path, str(of_sweep))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weights_sha256", "0" * 64, "weights_sha256: the run has "),
        ("finished_unix_time", 1, "finished_unix_time: the run has "),
        ("metrics", {"test/accuracy": 1.0}, "metrics: the run has "),
        ("origin_sha256", {}, "origin_sha256: the run has "),
        ("files_sha256", {}, "checkpoints/final.pt: the certificate doesn't name it"),
    ],
)
def test_a_certificate_that_was_sealed_anew_is_held_against_all_that_the_run_tells(
    tmp_path: Path,
    certified: Path,
    verified: Printed,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    said: str,
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    certified.write_text(documents.sealed({**documents.read_sealed(certified), name: value}))
    with pytest.raises(PacelineError, match=said):
        verified(tmp_path, str(certified))


def test_a_certificate_leads_to_no_file_elsewhere(tmp_path: Path, certified: Path, verified: Printed) -> None:
    raw = documents.read_sealed(certified)
    for name in ("/etc/passwd", "../../../../etc/passwd"):
        certified.write_text(documents.sealed({**raw, "files_sha256": {**raw["files_sha256"], name: "0" * 64}}))
        with pytest.raises(PacelineError, match=f"{name}: leads out of the run's folder"):
            verified(tmp_path, str(certified))


@pytest.mark.parametrize("name", ["result.json", "code", "key.json"])
def test_what_a_run_no_longer_has_is_not_called_checked(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    gone = tmp_path / certified.name[:12] / name
    gone.rename(tmp_path / "elsewhere")
    with pytest.raises(PacelineError, match=f"isn't what it says:\n(.*\n)*  {name}"):
        verified(tmp_path, str(certified))


def test_a_verdict_of_which_nothing_is_here_is_said_to_be_unchecked(
    tmp_path: Path, certified: Path, verified: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.comparing.certificate.check_parts", lambda *_: None)
    certified.write_text(documents.sealed({**documents.read_sealed(certified), "verdict": "reproduced"}))
    assert "that it was made again, of which nothing is here" in verified(tmp_path, str(certified))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files_sha256", None),
        ("files_sha256", ["a"]),
        ("files_sha256", {"key.json": 7}),
        ("files_sha256", {"a\0b": "0" * 64}),
        ("verdict", "reproduced\n\x1b[31mwhole"),
        ("what", "digits\nwhole"),
    ],
)
def test_a_field_that_nobody_writes_is_named(
    tmp_path: Path, certified: Path, verified: Printed, name: str, value: Any
) -> None:
    certified.write_text(documents.sealed({**documents.read_sealed(certified), name: value}))
    with pytest.raises(PacelineError, match=f"was edited and sealed anew: {name} is ") as caught:
        verified(tmp_path, str(certified))
    assert "\x1b" not in str(caught.value)


def test_a_field_that_is_missing_or_that_no_certificate_has_is_named(
    tmp_path: Path, certified: Path, verified: Printed
) -> None:
    whole = documents.read_sealed(certified)
    certified.write_text(documents.sealed({**whole, "claimed": 0.999}))
    with pytest.raises(PacelineError, match="sealed anew: it holds claimed, which no certificate does"):
        verified(tmp_path, str(certified))
    certified.write_text(documents.sealed({name: value for name, value in whole.items() if name != "verdict"}))
    with pytest.raises(PacelineError, match="sealed anew: verdict is missing"):
        verified(tmp_path, str(certified))


def edited(raw: dict[str, Any]) -> bytes:
    raw["made_of"]["config"]["seed"] = 7
    return documents.sealed(raw).encode()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda raw, data: data.replace(b'"seed": 0', b'"seed": 7'), PacelineError, "was edited or damaged"),
        (lambda raw, data: data[: len(data) // 2], PacelineError, "was edited or damaged"),
        (lambda raw, data: edited(raw), PacelineError, "was edited and sealed anew: its parts don't give key"),
        (
            lambda raw, data: documents.sealed({**raw, "version": 9}).encode(),
            UsageError,
            "has version 9; this Paceline",
        ),
        (lambda raw, data: documents.sealed({"kind": "x"}).encode(), UsageError, "is no certificate of a run"),
        (lambda raw, data: data.replace(b"\n", b"\r\n"), PacelineError, "its line ends or spacing were changed"),
        (lambda raw, data: b"\x00\x01", UsageError, "is no certificate of a run"),
        (lambda raw, data: b"", UsageError, "is no certificate of a run"),
    ],
)
def test_a_damaged_an_edited_and_a_foreign_file_are_told_apart(
    tmp_path: Path, certified: Path, verified: Printed, make: Any, error: type[PacelineError], said: str
) -> None:
    raw = documents.read_sealed(certified)
    certified.write_bytes(make(raw, certified.read_bytes()))
    with pytest.raises(PacelineError, match=said) as caught:
        verified(tmp_path, str(certified))
    assert type(caught.value) is error


def test_of_several_files_each_is_checked(
    tmp_path: Path, certified: Path, verified: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "edited.json"
    edited.write_bytes(certified.read_bytes().replace(b"0.9", b"0.8"))
    with pytest.raises(PacelineError, match=r"edited\.json was edited or damaged") as caught:
        verified(tmp_path, str(tmp_path / "x.json"), str(edited), str(certified))
    assert not isinstance(caught.value, UsageError)
    said = "".join(capsys.readouterr())
    assert "x.json can't be read: No such file" in said
    assert "certificate.json: whole, and run" in said


def test_a_file_that_is_not_there_is_said(tmp_path: Path, verified: Printed) -> None:
    trained(tmp_path)
    with pytest.raises(UsageError, match=r"x\.json can't be read: No such file"):
        verified(tmp_path, str(tmp_path / "x.json"))
    with pytest.raises(UsageError, match=r"has no certificate: there is no .*\n  try: doit report \w{12}"):
        verified(tmp_path, "last")
    with pytest.raises(UsageError, match="which run"):
        verified(tmp_path)
