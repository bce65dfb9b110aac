"""What a step reads beside what its key holds is told, and makes it anew when it changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.steps.step import StepError
from tests.pipeline.steps.conftest import StepProject


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
    assert [*json.loads((project.out("make").parent / "step.json").read_text())["unkeyed"]] == ["rate.txt"]
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
