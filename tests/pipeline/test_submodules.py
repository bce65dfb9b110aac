"""Submodules of a run's repository: brought back at their commits, or named with what gets them."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from pipeline.core.files import write_atomic
from pipeline.reproduction import archive
from pipeline.reproduction.recipe import Recipe, checkout
from pipeline.runs.folder import RunFolder
from tests.pipeline.git_folders import ALLOWED, AUTHOR, brought_back, git

pytestmark = pytest.mark.slow


def test_submodules_come_back_at_their_commits_from_the_git_folders_that_are_here(nested: Path, tmp_path: Path) -> None:
    for name in ("inner", "outer"):  # their addresses can't be reached any more
        shutil.rmtree(tmp_path / name)
    (nested / "lib/outer/outer.py").write_text("of = 'a later commit'\n")
    git(nested / "lib/outer", *AUTHOR, "commit", "-qam", "later")
    again = brought_back(nested, b"", tmp_path / "a")
    assert (again / "lib/outer/outer.py").read_text() == "of = 'outer'\n"
    assert (again / "lib/outer/in/inner.py").read_text() == "of = 'inner'\n"
    git(nested, "submodule", "--quiet", "deinit", "--force", "--all")
    assert (brought_back(nested, b"", tmp_path / "b") / "lib/outer/in/inner.py").is_file()
    git(nested, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert (brought_back(tmp_path / "tree", b"", tmp_path / "c") / "lib/outer/in/inner.py").is_file()


def test_a_submodule_that_is_not_here_is_named_with_the_command_that_gets_it(nested: Path, tmp_path: Path) -> None:
    commit = git(nested, "rev-parse", "HEAD:lib/outer").strip()
    copy = tmp_path / "a copy"
    git(tmp_path, "clone", "-q", str(nested), str(copy))
    said: list[str] = []
    brought_back(copy, b"", tmp_path / "a", said.append)
    head, _, fix = said[0].partition(": ")
    assert (len(said), head) == (1, f"  submodule    lib/outer at {commit[:10]} isn't here; if the run needs it")
    words = shlex.split(fix.removesuffix(", then the same command"))
    assert words[:3] == ["git", "-C", str(copy)]
    git(copy, *ALLOWED, *words[3:])
    assert (brought_back(copy, b"", tmp_path / "b") / "lib/outer/in/inner.py").is_file()


def test_an_archive_brings_its_submodules_and_says_which_it_lacks(nested: Path, tmp_path: Path) -> None:
    commit, folder = git(nested, "rev-parse", "HEAD").strip(), RunFolder(tmp_path / "run" / "0123456789ab")
    folder.path.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    git(tmp_path, "init", "-q", str(elsewhere))
    made = Recipe(folder=folder, result={}, parts={"code": {}}, config={}, provenance={"git_commit": commit}, patch=b"")

    def unpacked() -> tuple[bool, list[str]]:
        said: list[str] = []
        shutil.rmtree(folder.path / archive.SOURCE, ignore_errors=True)
        for name, content in archive._source(nested, commit).items():
            write_atomic(folder.path / name, content)
        with checkout(made, root=elsewhere, place=tmp_path / "again", keep=False, say=said.append) as project:
            return (project / "lib/outer/in/inner.py").is_file(), said

    assert unpacked() == (True, [])
    git(nested, "submodule", "--quiet", "deinit", "--force", "--all")
    shutil.rmtree(nested / ".git" / "modules")
    lacks = "  submodule    lib/outer isn't in the archive: it wasn't there when the run was exported"
    assert unpacked() == (False, [lacks])
