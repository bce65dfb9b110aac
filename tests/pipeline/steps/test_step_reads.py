"""What a step reads beside what its key holds is told, and makes it anew when it changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import PacelineError
from pipeline.steps.step import StepError
from tests.pipeline.steps.conftest import StepProject
from trainers.observation.input_changes import first_change


@pytest.mark.slow
def test_a_python_path_of_its_own_keeps_nothing_from_the_look_at_what_it_reads(project: StepProject) -> None:
    project.write("lib/rates.py", "RATE = 1")
    project.write("beside.py", "NAME = 'x'")
    project.write("make.py", "import beside, pathlib, rates, sys\npathlib.Path(sys.argv[1], beside.NAME).touch()")
    project.step("make", "command: [python, make.py, '{out}']\nenv: {PYTHONPATH: lib}\noutputs: [x]\n")
    project.make("make")
    said = "WARNING: the key of step make is not complete: lib/rates.py was read; add it to its inputs"
    assert said in project.said
    project.write("lib/rates.py", "RATE = 2")
    assert project.why("make") == ("lib/rates.py, which it read and its key lacks, changed",)


def test_a_path_that_python_would_cut_at_its_colon_is_refused(tmp_path: Path) -> None:
    project = StepProject(tmp_path / "a:b")
    project.step("one", 'command: touch "$out/x"\noutputs: [x]\n')
    with pytest.raises(StepError, match=r"step one can't be made here: .*a:b.* holds ':', which separates folders"):
        project.make("one")
    assert project.left == ["one-" + project.left[0][4:16] + ".log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "[python, make.py, '{out}']",
        "'python make.py \"$out\"'",
        "[python, -c, 'import subprocess, sys; subprocess.check_call([sys.executable, sys.argv[1], sys.argv[2]])', "
        "make.py, '{out}']",
    ],
)
def test_a_file_that_a_step_reads_and_its_key_lacks_is_told(project: StepProject, command: str) -> None:
    project.write("rate.txt", "0.1")
    project.write("given.txt", "1")
    project.write("own_part.py", "RATE = 1")
    project.write(
        "make.py",
        """
        import sys
        from pathlib import Path
        import own_part
        Path(sys.argv[1], "x").write_text(Path("rate.txt").read_text() + open("given.txt").read())
        Path(sys.argv[1], "x").read_text()
        """,
    )
    project.step("make", f"command: {command}\ninputs: [given.txt]\noutputs: [x]\n")
    project.make("make")
    said = "WARNING: the key of step make is not complete: rate.txt was read; add it to its inputs"
    assert project.said.count(said) == 1
    assert [*json.loads((project.out("make").parent / "step.json").read_text())["dependencies"]["files"]] == [
        "rate.txt"
    ]
    assert said in (project.out("make").parent / "log.txt").read_text()
    assert project.make("make") == 0
    project.write("rate.txt", "0.2")
    assert project.why("make") == ("rate.txt, which it read and its key lacks, changed",)
    project.step("make", f"command: {command}\ninputs: [given.txt, rate.txt]\noutputs: [x]\n")
    project.make("make")
    assert project.said.count(said) == 1
    assert (project.out("make") / "x").read_text() == "0.21"
    assert sorted(path.name for path in project.out("make").parent.iterdir()) == ["log.txt", "out", "step.json"]


@pytest.mark.slow
def test_a_file_that_a_step_looks_for_in_vain_makes_it_anew_when_it_appears(project: StepProject) -> None:
    """Also a module by a computed name, and what a pattern matches; nothing that the step itself has made."""
    project.write(
        "make.py",
        """
        import glob, importlib, os, sys
        from pathlib import Path
        found = [os.path.exists("by_exists.txt"), glob.glob("parts/*.txt"), os.path.exists("made.txt")]
        try: found.append(open("by_open.txt").read())
        except FileNotFoundError: pass
        try: importlib.import_module("by_" + "name")
        except ImportError: pass
        Path("made.txt").write_text("1")
        Path(sys.argv[1], "x").write_text(str(found))
        """,
    )
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\n")
    project.write("parts/a.txt", "")
    assert (project.make("make"), project.make("make")) == (1, 0)
    for name in ("by_exists.txt", "by_name.py", "by_open.txt", "parts/b.txt"):
        project.write(name, "")
        assert project.why("make") == (f"{name}, which it looked for, is new",)
        assert (project.make("make"), project.make("make")) == (1, 0)
    (project.root / "parts/b.txt").unlink()
    assert project.why("make") == ("parts/b.txt, which it looked for, is gone",)


@pytest.mark.slow
def test_a_module_that_was_edited_within_the_same_second_runs_as_it_is(project: StepProject) -> None:
    """Byte code tells an edit by size and second: the old code ran under the new key, for good."""
    project.write("make.py", "import pathlib, sys, value\npathlib.Path(sys.argv[1], 'x').write_text(str(value.VALUE))")
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\n")
    for value in range(4):
        os.utime(project.write("value.py", f"VALUE = {value}"), (1.7e9, 1.7e9))
        project.make("make")
        assert (project.out("make") / "x").read_text() == str(value)


@pytest.mark.slow
def test_a_step_gets_the_variables_that_it_names_and_says_which_it_read_in_vain(
    project: StepProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the shell decided, and no key held it."""
    monkeypatch.setenv("SCALE", "3")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    text = "import os, pathlib, sys\n{**os.environ}\nfound = os.environ.get('SCALE', __debug__)\n"
    project.write("make.py", f"{text}pathlib.Path(sys.argv[1], 'x').write_text(str(found))")
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\n")
    project.make("make")
    assert (project.out("make") / "x").read_text() == "True"
    said = (
        "WARNING: step make read SCALE, which this shell sets and the step doesn't get; "
        'env: {SCALE: "${oc.env:SCALE}"} in its file passes it, as a part of its key'
    )
    assert [line for line in project.said if "WARNING" in line] == [said]
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\nenv: {SCALE: '${oc.env:SCALE}'}\n")
    project.make("make")
    assert (project.out("make") / "x").read_text() == "3"
    monkeypatch.setenv("SCALE", "4")
    assert project.why("make") == ("env.SCALE: 3 → 4",)


@pytest.mark.slow
def test_a_variable_of_the_shell_that_a_step_gets_and_its_code_reads_makes_it_anew_with_another_value(
    project: StepProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LANG", "TZ", "LC_API_TOKEN"):
        monkeypatch.setenv(name, f"{name}-1")
    text = "import os, pathlib, sys\nfound = os.getenv('TZ'), os.environ.get('LC_API_TOKEN'), os.path.expanduser('~')\n"
    project.write("make.py", f"{text}pathlib.Path(sys.argv[1], 'x').write_text(str(found))")
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\n")
    project.make("make")
    (record,) = project.root.rglob("step.json")
    assert "TZ-1" not in record.read_text()
    for name in ("LANG", "LC_API_TOKEN", "HOME"):  # read by nobody, secret, read by a library
        monkeypatch.setenv(name, "/nowhere")
    assert project.why("make") == ()
    monkeypatch.setenv("TZ", "TZ-2")
    assert project.why("make") == ("the variable TZ, which it read and its key lacks, changed",)
    project.make("make")
    monkeypatch.delenv("TZ")
    assert project.why("make") == ("the variable TZ, which it read and its key lacks, changed",)
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\nenv: {TZ: UTC}\n")
    project.make("make")
    monkeypatch.setenv("TZ", "TZ-3")
    assert project.why("make") == ()


READS = """
    import os, sqlite3, sys
    from pathlib import Path
    out = Path(sys.argv[1])
    for name in ("data/a.txt", ".hidden", "runs_of_mine/b.txt", os.environ["OUTSIDE"]):
        open(name).close()
    os.close(os.open("created.txt", os.O_RDONLY | os.O_CREAT))
    folder = os.open("folder", os.O_RDONLY)
    os.close(os.open("by_dir_fd.txt", os.O_RDONLY, dir_fd=folder))
    sqlite3.connect("known.db").execute("select * from sqlite_master").fetchall()
    os.path.exists("flag")
    os.listdir("folder")
    (Path(sys.argv[2]).parent / "more.txt").read_text()
    (out / "own.txt").write_text("x"); (out / "own.txt").read_text()
    Path("scratch").mkdir(exist_ok=True); Path("scratch/x").write_text("x"); Path("scratch/x").read_text()
    (out / "x").touch()
"""
READ = [".hidden", "created.txt", "data/a.txt", "folder/by_dir_fd.txt", "known.db", "runs_of_mine/b.txt"]


@pytest.mark.slow
def test_whatever_a_step_opens_counts_wherever_it_lies(project: StepProject, tmp_path_factory: Any) -> None:
    """Also more of another step's outputs than it names, and a file that it only asks for."""
    outside = tmp_path_factory.mktemp("outside") / "values.txt"
    outside.write_text("1")
    for name in (*READ, "flag"):
        project.write(name, "")
    project.write("make.py", READS)
    project.step("first", 'command: touch "$out/named.txt" "$out/more.txt"\noutputs: [\'*\']\n')
    env = f"env: {{OUTSIDE: {outside}}}\ninputs: [step:first/named.txt]\n"
    project.step("make", f"command: [python, make.py, '{{out}}', '{{inputs}}']\noutputs: [x]\n{env}")
    project.make("make")
    made = json.loads((project.out("make").parent / "step.json").read_text())
    more = (project.out("first") / "more.txt").relative_to(project.root).as_posix()
    assert sorted(made["dependencies"]["files"]) == sorted([*READ, more, str(outside)])
    (said,) = [line for line in project.said if "WARNING" in line]
    assert "step:first/more.txt" in said
    assert project.make("make") == 0
    for path, text, why in (
        (project.root / ".hidden", "2", ".hidden, which it read and its key lacks, changed"),
        (outside, "2", f"{outside}, which it read and its key lacks, changed"),
        (project.root / "folder/new.txt", "", "the names in the folder folder, which it listed, changed"),
        (project.root / "flag", None, "flag, which it looked for, is gone"),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        assert project.why("make") == (why,)
        assert (project.make("make"), project.make("make")) == (1, 0)


@pytest.mark.slow
def test_another_version_of_what_a_step_imported_by_a_computed_name_makes_it_anew(
    project: StepProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in or an optional part is required by nothing that the key follows."""
    site = tmp_path.with_name("site")
    monkeypatch.syspath_prepend(str(site))

    def install(version: str, before: str = "") -> None:
        if before:
            shutil.rmtree(site / f"Acme_Plugin-{before}.dist-info")
        for name, text in (("acme_parts/__init__.py", f"VALUE = {version}"), ("other.py", "")):
            (site / name).parent.mkdir(exist_ok=True, parents=True)
            (site / name).write_text(text)
        for about, record in (
            (f"Acme_Plugin-{version}.dist-info", "acme_parts/__init__.py,,\n"),
            ("other-1.dist-info", "acme_parts_too.py,,\nother.py,,\n"),
        ):
            (site / about).mkdir(exist_ok=True)
            (site / about / "RECORD").write_text(record)

    install("1.0")
    project.write(
        "make.py",
        """
        import importlib, sys
        from pathlib import Path
        value = importlib.import_module("acme_" + "parts").VALUE
        Path(sys.argv[1], "x").write_text(str(value))
        """,
    )
    project.step("make", f"command: [python, make.py, '{{out}}']\noutputs: [x]\nenv: {{PYTHONPATH: {site}}}\n")
    assert (project.make("make"), project.make("make")) == (1, 0)
    record = json.loads((project.out("make").parent / "step.json").read_text())["dependencies"]
    assert (record["files"], record["installed"]) == ({}, {"acme-plugin": ["1.0", str(site)]})
    install("1.1", before="1.0")
    said = "acme-plugin, which it imported and its key lacks, was 1.0 and is 1.1"
    assert project.why("make") == (said,)
    assert first_change(record, project.root, ["acme-plugin"]) is None
    assert (project.make("make"), project.make("make")) == (1, 0)
    assert (project.out("make") / "x").read_text() == "1.1"
    shutil.rmtree(site / "Acme_Plugin-1.1.dist-info")
    gone = "acme-plugin, which it imported and its key lacks, was 1.1 and isn't installed any more"
    assert project.why("make") == (gone,)


@pytest.mark.slow
def test_an_edit_that_was_taken_back_counts(project: StepProject) -> None:
    """A file is hashed when it is first opened: both races gave "up to date" on another content."""
    text = """
        import os, subprocess, sys
        from pathlib import Path
        os.environ["NAME"] = name = "given" + ".txt"
        subprocess.check_call(["sh", "-c", "echo edited > $NAME"])
        Path(sys.argv[1], "x").write_text(Path(name).read_text())
        subprocess.check_call(["sh", "-c", "echo known > $NAME"])
        """
    project.write("make.py", text)
    project.write("given.txt", "known\n")
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\ninputs: [given.txt]\n")
    with pytest.raises(PacelineError, match=r"step make read given\.txt with another content than its key holds: some"):
        project.make("make")
    project.step("make", "command: [python, make.py, '{out}']\noutputs: [x]\n")
    project.make("make")
    assert project.why("make") == ("given.txt, which it read and its key lacks, changed",)
