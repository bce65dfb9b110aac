"""What a script reads beyond its key, or leaves damaged, and whether its run counts then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import Project
from tests.integration.script_project import SCRIPT, script_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return script_project(tmp_path)


def test_a_run_that_read_what_its_key_lacks_does_not_count_until_that_is_added(project: Project) -> None:
    folder = project.folder / "my scripts"
    (folder / "lr.txt").write_text("0.25")
    (folder / "train.py").write_text(
        "import pathlib\ntry:\n    pathlib.Path(__file__).parent.joinpath('lr' + '.txt').read_text()\nexcept OSError:\n"
        "    pass\n" + SCRIPT
    )
    words = ("program.args.lr=0.1",)
    first = project.doit("train", *words)
    assert first.returncode == 0, first.stdout
    assert (
        "its key is not complete: _script/lr.txt was looked for and isn't in the snapshot; add it to program.inputs"
        in first.stdout
    )
    assert "train     to do  its key is not complete" in project.doit("plan", *words).stdout
    assert "is finished" in project.doit("train", *words, "program.seal=off").stdout
    again = project.doit("train", *words)
    assert "FINISHED" in again.stdout
    assert "attempt 2 starts from the beginning: no argument of the script has {resume}" in again.stdout
    whole = project.doit("train", *words, "program.inputs=[lr.txt]")
    assert "not complete" not in whole.stdout
    assert "is finished" in project.doit("train", *words, "program.inputs=[lr.txt]").stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_run_whose_data_changed_while_it_went_on_does_not_count(project: Project, tmp_path: Path) -> None:
    data = tmp_path / "texts/a.txt"
    data.parent.mkdir()
    data.write_text("0.25")
    once = tmp_path / "once"
    (project.folder / "my scripts/train.py").write_text(
        "import os, sys, paceline\npath = sys.argv[sys.argv.index('--data') + 1] + '/a.txt'\n"
        f"if not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w').close()\n"
        "    open(path, 'w').write('0.75')\npaceline.log(1, loss=float(open(path).read()))\n"
    )
    words = (f"program.args.data='{data.parent}'", "cluster.nproc_per_node=1")
    said = project.doit("train", *words).stdout
    assert "texts/a.txt was changed while the run went on, and the key has the content from before" in said
    data.write_text("0.25")
    assert "train     to do  texts/a.txt was changed while the run went on" in project.doit("plan", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout
    assert project.result()["metrics"] == {"loss": 0.25}
    assert "is finished" in project.doit("train", *words).stdout


OF_RANK_ONE = """
import os, paceline
if os.environ["RANK"] == "1":
    open(os.environ["PARTS"] + "/part1.txt").close()
paceline.log(1, loss=1.0)
"""


@pytest.mark.ci
@pytest.mark.long
def test_a_file_that_rank_one_alone_reads_repeats_the_run_when_it_changes(project: Project, tmp_path: Path) -> None:
    project.whole = True  # ranks that are forked have no sitecustomize
    part = tmp_path / "elsewhere/part1.txt"
    part.parent.mkdir()
    part.write_text("1")
    (tmp_path / "my scripts/train.py").write_text(OF_RANK_ONE)
    words = ("program.args.lr=0.1", f"program.env.PARTS='{part.parent}'")
    assert f"{part} was read outside of the project" in project.doit("train", *words).stdout
    assert "is finished" in project.doit("train", *words).stdout
    part.write_text("2")
    assert f"{part}, which it read and its key lacks, changed" in project.doit("why", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_variable_of_the_shell_that_a_script_reads_repeats_the_run_with_another_value(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.whole = True  # each command has this environment
    (tmp_path / "my scripts/train.py").write_text(
        "import os, paceline\npaceline.log(1, loss=len(os.environ['TZ']), lr=len(os.environ['LANG']))\n"
    )
    words = ("program.args.lr=0.1", "program.torchrun=false", "cluster.nproc_per_node=1", "program.env.LANG=C")
    monkeypatch.setenv("TZ", "UTC")
    assert "FINISHED" in project.doit("train", *words).stdout
    for name in ("LANG", "LC_TIME", "USER"):  # in the key, and read by nobody
        monkeypatch.setenv(name, "de_DE")
    assert "is finished" in project.doit("train", *words).stdout
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert "the variable TZ, which it read and its key lacks, changed" in project.doit("why", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout
    assert project.result()["metrics"] == {"loss": 10.0, "lr": 1.0}


@pytest.mark.ci
@pytest.mark.long
def test_a_script_whose_output_was_damaged_is_trained_again_and_an_intact_one_is_not(project: Project) -> None:
    words = ("program.args.lr=0.1", "program.args.resume={resume}", "cluster.nproc_per_node=1")
    assert project.doit("train", *words).returncode == 0
    folder = project.only_run()
    output, written = folder / "outputs/w.txt", (folder / "outputs/w.txt").read_text()
    (folder / "result.json").write_text("")
    again = project.doit("train", *words)
    assert "FINISHED" in again.stdout, again.stdout
    assert project.result()["attempts"] == 1
    output.write_text("")
    repeated = project.doit("train", *words).stdout
    assert "FINISHED" in repeated
    place = folder / "attempts/2/before"
    why = f"outputs/w.txt has 0 bytes, {len(written)} were written"
    assert f"earlier files of the script are kept in {place}, as the run is made anew: {why}" in repeated
    assert f"attempt 2 starts from the beginning: its checkpoints were set aside, to {place}/checkpoints" in repeated
    assert (place / "checkpoints/w.bin").is_file()
    assert len((place / "metrics.jsonl").read_text().splitlines()) == 3
    assert (project.result()["attempts"], output.read_text()) == (2, written)
    assert "is finished" in project.doit("train", *words).stdout
