"""Where a run comes from: commit, a patch that applies, no secret, and a repository left as it was."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.provenance import Provenance, collect


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
    return collect(
        root=root, argv=argv, overrides=argv, hosts=["a"], outputs=[root / "runs"], data_digest="d", unix_time=1.0
    )


def test_a_clean_tree_has_its_commit_and_no_patch(repository: Path) -> None:
    found, patch = of(repository)
    assert (found.git_commit, found.git_dirty, patch) == (git(repository, "rev-parse", "HEAD").strip(), False, b"")


def test_the_patch_brings_back_changes_and_untracked_files(repository: Path, tmp_path: Path) -> None:
    (repository / "code.py").write_bytes(b"x = 2  # caf\xe9\n")
    (repository / "new.bin").write_bytes(bytes(range(256)))
    (repository / "runs").mkdir()
    (repository / "runs" / "result.json").write_text("no source")
    before = sorted(path for path in (repository / ".git").rglob("*"))
    found, patch = of(repository)
    assert found.git_dirty is True
    assert sorted(path for path in (repository / ".git").rglob("*")) == before
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    (tmp_path / "p").write_bytes(patch)
    git(copy, "apply", str(tmp_path / "p"))
    assert (copy / "code.py").read_bytes() == (repository / "code.py").read_bytes()
    assert (copy / "new.bin").read_bytes() == bytes(range(256))
    assert not (copy / "runs").exists()


def test_folders_of_results_that_git_ignores_do_not_cost_the_patch(repository: Path) -> None:
    (repository / ".gitignore").write_text("/runs/\n")
    (repository / "runs").mkdir()
    (repository / "runs" / "result.json").write_text("no source")
    (repository / "staged.py").write_text("y = 1\n")
    git(repository, "add", "staged.py")
    git(repository, "config", "diff.noprefix", "true")
    found, patch = of(repository)
    assert (found.git_dirty, found.left_out) == (True, ())
    assert [line for line in patch.splitlines() if line.startswith(b"+++")] == [b"+++ b/.gitignore", b"+++ b/staged.py"]


def test_a_patch_that_git_could_not_make_is_not_taken_for_a_clean_tree(repository: Path) -> None:
    (repository / "code.py").write_text("x = 3\n")
    (repository / ".gitattributes").write_text("*.py filter=broken\n")
    git(repository, "config", "filter.broken.clean", "false")
    git(repository, "config", "filter.broken.required", "true")
    found, patch = of(repository)
    assert (found.git_dirty, patch) == (True, b"")
    assert found.left_out[0].startswith("all changes: git add failed: ")


def test_a_large_untracked_file_is_named_and_left_out(repository: Path) -> None:
    with (repository / "big.bin").open("wb") as file:
        file.truncate(9 << 20)
    found, patch = of(repository)
    assert (found.left_out, found.git_dirty, patch) == (("big.bin",), True, b"")


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    found, patch = of(tmp_path)
    assert (found.git_commit, found.git_dirty, patch) == (None, None, b"")


def test_a_password_in_an_address_is_not_kept(repository: Path) -> None:
    found, _ = of(repository, "doit", "tracking.uri=https://me:secret@host/x")
    assert "secret" not in str(found)
    assert "https://***@host/x" in found.overrides[1]
