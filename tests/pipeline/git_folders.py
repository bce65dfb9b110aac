"""Git repositories of the tests, and the patch that a run keeps of one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.reproduction.recipe import Recipe, checkout
from pipeline.runs.folder import RunFolder
from pipeline.runs.provenance import Provenance, collect

AUTHOR = ("-c", "user.name=t", "-c", "user.email=t@t")
ALLOWED = ("-c", "protocol.file.allow=always")
NO_DETAILS = {"overrides": (), "hosts": (), "data_digest": "d", "unix_time": 1.0}


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "with space"
    root.mkdir()
    git(root, "init", "-q")
    (root / "code.py").write_bytes(b"x = 1  # caf\xe9\n")
    git(root, "add", "-A")
    git(root, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "one")
    return root


def of(root: Path, *argv: str) -> tuple[Provenance, bytes]:
    return collect(root, argv, {**NO_DETAILS, "overrides": argv, "hosts": ("a",)}, outputs=[root / "runs"])


def changed_in(patch: bytes) -> list[str]:
    """The paths of a patch as git prints them."""
    heads = [line for line in patch.decode(errors="replace").splitlines() if line.startswith("diff --git ")]
    return [line.rpartition(" b/")[2] if '"' not in line else line.rpartition(' "b/')[2][:-1] for line in heads]


def brought_back(repository: Path, patch: bytes, place: Path, say: Callable[[str], None] = print) -> Path:
    """A clone of the commit with the patch, as `doit reproduce` lays it out."""
    made = recipe(place, patch, git(repository, "rev-parse", "HEAD").strip())
    with checkout(made, root=repository, checkout_dir=place / "again", keep=True, say=say) as project:
        return project


def recipe(place: Path, patch: bytes, commit: str) -> Recipe:
    root = place / "run" / "0123456789ab"
    root.mkdir(parents=True)
    (root / "changes.patch").write_bytes(patch)
    return Recipe(
        folder=RunFolder(root), result={}, parts={"code": {}}, config={}, provenance={"git_commit": commit}, patch=patch
    )


def tree(root: Path) -> dict[str, tuple[bool, bytes]]:
    """Name → (executable, bytes or the link's target)."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if ".git" not in path.parts}
    return {
        name: (False, os.fsencode(path.readlink()))
        if path.is_symlink()
        else (os.access(path, os.X_OK), path.read_bytes())
        for name, path in files.items()
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def nested(repository: Path, tmp_path: Path) -> Path:
    """The repository with a submodule ``lib/outer`` that has one itself, committed and checked out."""
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / f"{name}.py").write_text(f"of = {name!r}\n")
        git(tmp_path / name, "add", "-A")
        git(tmp_path / name, *AUTHOR, "commit", "-qm", "one")
    git(tmp_path / "outer", *ALLOWED, "submodule", "--quiet", "add", str(tmp_path / "inner"), "in")
    git(tmp_path / "outer", *AUTHOR, "commit", "-qm", "two")
    git(repository, *ALLOWED, "submodule", "--quiet", "add", str(tmp_path / "outer"), "lib/outer")
    git(repository, *ALLOWED, "submodule", "--quiet", "update", "--init", "--recursive")
    git(repository, *AUTHOR, "commit", "-qm", "with a submodule")
    return repository
