"""Where a run comes from: commit, a patch that applies, no secret, and a repository left as it was."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.reproduction.recipe import Recipe, checkout
from pipeline.runs.folder import RunFolder
from pipeline.runs.provenance import collect
from tests.pipeline.git_folders import ALLOWED, AUTHOR, NO_DETAILS, brought_back, changed_in, git, of, recipe, tree

pytestmark = pytest.mark.slow


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


def test_a_file_that_git_cannot_take_is_left_out_alone(repository: Path) -> None:
    (repository / "code.py").write_text("x = 3\n")
    (repository / ".gitattributes").write_text("*.py filter=broken\n")
    git(repository, "config", "filter.broken.clean", "false")
    git(repository, "config", "filter.broken.required", "true")
    found, patch = of(repository)
    assert (found.git_dirty, changed_in(patch)) == (True, [".gitattributes"])
    (left_out,) = found.left_out
    assert left_out.startswith("code.py: git can't take it (git add failed: ")


def test_weights_of_which_the_run_keeps_a_copy_are_no_changes(repository: Path) -> None:
    weights = repository / "w.pt"
    weights.write_bytes(b"x" * (9 << 20))
    found, patch = collect(repository, ["doit"], NO_DETAILS, outputs=[weights])
    assert (found.left_out, found.git_dirty, patch) == ((), False, b"")


def test_runs_in_another_folder_of_runs_are_no_sources(repository: Path) -> None:
    run = repository / "other" / "0123456789ab"
    (run / "code").mkdir(parents=True)
    for name in ("journal.jsonl", "changes.patch", "code/train.py"):
        (run / name).write_text("x")
    (repository / "other" / ".paceline").mkdir()
    (repository / "other" / ".paceline" / "composed.json").write_text("{}")
    assert of(repository)[1] == b""
    (repository / "other" / "notes.py").write_text("x")
    assert changed_in(of(repository)[1]) == ["other/notes.py"]


def test_a_large_untracked_file_is_named_and_left_out(repository: Path) -> None:
    with (repository / "big.bin").open("wb") as file:
        file.truncate(9 << 20)
    found, patch = of(repository)
    said = ("big.bin: 9.4 MB, and untracked files of more than 8 MiB are no sources",)
    assert (found.left_out, found.git_dirty, patch) == (said, True, b"")


@pytest.mark.parametrize("is_repository", [False, True])
def test_without_a_repository_or_its_first_commit_there_is_no_commit(tmp_path: Path, is_repository: bool) -> None:
    if is_repository:
        git(tmp_path, "init", "-q")
    found, patch = of(tmp_path)
    assert (found.git_commit, found.git_dirty, found.left_out, patch) == (None, None, (), b"")


def test_a_password_in_an_address_is_not_kept(repository: Path) -> None:
    found, _ = of(repository, "doit", "tracking.uri=https://me:secret@host/x")
    assert "secret" not in str(found.as_json())
    assert "https://***@host/x" in found.as_json()["overrides"][1]


def test_a_name_that_is_no_text_costs_nothing(repository: Path, tmp_path: Path) -> None:
    name = os.fsencode(repository) + b"/caf\xe9.py"
    try:
        with open(name, "wb") as file:  # noqa: PTH123  (a name of bytes)
            file.write(b"x = 1\n")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    (repository / "new.py").write_text("y = 1\n")
    found, patch = of(repository)
    assert (found.left_out, changed_in(patch)) == ((), ["caf\\351.py", "new.py"])
    again = brought_back(repository, patch, tmp_path)
    names = sorted(os.fsencode(path.name) for path in again.iterdir())
    assert names == [b".git", b"caf\xe9.py", b"code.py", b"new.py"]


def test_what_no_patch_can_keep_is_named_and_the_rest_is_kept(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, *AUTHOR, "commit", "-q", "--allow-empty", "-m", "one")
    git(repository, *ALLOWED, "submodule", "--quiet", "add", str(other), "sub")
    git(repository, *AUTHOR, "commit", "-qm", "with a submodule")
    assert of(repository)[0].git_dirty is False

    (repository / "sub" / "new.py").write_text("x = 1\n")
    git(repository, "init", "-q", "nested")
    (repository / "nested" / "own.py").write_text("x = 1\n")
    (repository / "kept.py").write_text("x = 1\n")
    found, patch = of(repository)
    assert (found.git_dirty, changed_in(patch)) == (True, ["kept.py"])
    assert found.left_out == ("nested/: a repository of its own", "sub: a submodule with changes of its own")
    git(repository / "sub", "add", "-A")
    git(repository / "sub", *AUTHOR, "commit", "-qm", "moved on")
    assert of(repository)[0].left_out[-1].startswith("sub: a submodule at ")


@pytest.mark.parametrize(
    "settings",
    [
        {"diff.noprefix": "true", "diff.mnemonicPrefix": "true", "color.ui": "always", "diff.context": "0",
         "core.quotepath": "false", "diff.external": "false", "diff.orderFile": "/no/such/file",
         "diff.relative": "true"},
        {"core.autocrlf": "true", "core.safecrlf": "true", "core.eol": "crlf", "submodule.recurse": "true",
         "diff.algorithm": "patience", "diff.renames": "copies", "core.fsmonitor": "false"},
    ],
)  # fmt: skip
def test_modes_links_deletions_and_settings_come_back(
    repository: Path, tmp_path: Path, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".gitattributes").write_text("*.dat -diff\n*.md diff=words\n")
    for name in ("run.sh", "gone.py", "moved.py", "raw.dat", "text.md", "staged away.py", "marked.py"):
        (repository / name).write_text(f"one {name}\n")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    for name, value in {**settings, "diff.words.textconv": "false"}.items():
        git(repository, "config", name, value)
    (repository / "run.sh").chmod(0o755)
    (repository / "gone.py").unlink()
    (repository / "moved.py").rename(repository / "moved to.py")
    (repository / "raw.dat").write_text("two\n")
    (repository / "text.md").write_text("two\n")
    (repository / "link").symlink_to("text.md")
    (repository / "windows.py").write_bytes(b"x = 1\r\n")
    git(repository, "rm", "-q", "--cached", "staged away.py")
    git(repository, "update-index", "--assume-unchanged", "marked.py")
    (repository / "marked.py").write_text("edited in secret\n")
    (repository / "intended.py").write_text("x = 1\n")
    git(repository, "add", "--intent-to-add", "intended.py")
    with monkeypatch.context() as of_a_hook:
        for name in ("GIT_INDEX_FILE", "GIT_EXTERNAL_DIFF", "GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY"):
            of_a_hook.setenv(name, "/none")
        found, patch = of(repository)
    assert found.left_out == ()
    again = brought_back(repository, patch, tmp_path)
    seen, made = tree(repository), tree(again)
    if "core.autocrlf" in settings:  # git keeps such a file with its own line ends
        seen["windows.py"] = (seen["windows.py"][0], b"x = 1\n")
    assert made == seen


def test_a_sparse_checkout_deletes_nothing(repository: Path, tmp_path: Path) -> None:
    for folder in ("here", "away"):
        (repository / folder).mkdir()
        (repository / folder / "x.py").write_text("x = 1\n")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    git(repository, "sparse-checkout", "set", "here")
    assert not (repository / "away").exists()
    found, patch = of(repository)
    assert (found.git_dirty, patch, found.left_out) == (False, b"", ())
    (repository / "here" / "x.py").write_text("x = 2\n")
    again = brought_back(repository, of(repository)[1], tmp_path)
    assert (again / "here" / "x.py").read_text() == "x = 2\n"
    assert (again / "away" / "x.py").read_text() == "x = 1\n"


def test_a_shallow_clone_and_a_merge_in_progress_come_back(repository: Path, tmp_path: Path) -> None:
    git(repository, *AUTHOR, "commit", "-q", "--allow-empty", "-m", "two")
    copy = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(copy))
    git(copy, "checkout", "-q", "-b", "side")
    (copy / "code.py").write_text("x = 'side'\n")
    git(copy, *AUTHOR, "commit", "-qam", "side")
    git(copy, "checkout", "-q", "-b", "main2", "HEAD~1")
    (copy / "code.py").write_text("x = 'main'\n")
    git(copy, *AUTHOR, "commit", "-qam", "main")
    done = subprocess.run(["git", "-C", str(copy), *AUTHOR, "merge", "-q", "side"], capture_output=True, check=False)
    assert done.returncode == 1
    found, patch = of(copy)
    assert (found.git_dirty, found.left_out) == (True, ())
    again = brought_back(copy, patch, tmp_path)
    assert "<<<<<<<" in (again / "code.py").read_text()
    assert tree(again) == tree(copy)


def test_a_repository_that_git_refuses_says_why_and_what_mends_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def left_out() -> str:
        found, _ = of(repository)
        assert found.git_commit is None
        return " ".join(found.left_out)

    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as root in a container finds a mounted clone
        patch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))
        said = "everything: git refuses the repository: detected dubious ownership in repository at "
        assert left_out().startswith(said)
        assert f"; try: git config --global --add safe.directory '{repository}'" in left_out()
    (repository / ".git/HEAD").write_text("garbage\n")
    assert left_out().startswith("everything: git refuses the repository: not a git repository")


def test_a_repository_without_git_says_that_nothing_is_kept(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    found, _ = of(repository)
    assert (found.git_commit, found.left_out) == (None, ("everything: git is not installed",))


def test_a_reproduction_in_a_clone_that_git_refuses_says_what_mends_it(repository: Path, tmp_path: Path) -> None:
    made = recipe(tmp_path, b"", "f" * 40)
    (repository / ".git/HEAD").write_text("garbage\n")
    refused = pytest.raises(PacelineError, match=r"^commit f+ of run \S+ can't be read: git refuses the repository: ")
    with refused, checkout(made, root=repository, checkout_dir=tmp_path / "again", keep=False):
        pass


def test_a_file_with_a_secret_of_the_run_stays_out_of_the_patch(repository: Path) -> None:
    (repository / "mine.yaml").write_text("env: {API_TOKEN: abc-123-def}\n")
    (repository / "code.py").write_text("token = 'abc-123-def'\n")
    (repository / "fine.py").write_text("x = 1\n")
    found, patch = collect(repository, [], NO_DETAILS, outputs=[], secrets={"abc-123-def"})
    assert changed_in(patch) == ["fine.py"]
    assert found.left_out == tuple(f"{name}: a secret of this run stands in it" for name in ("code.py", "mine.yaml"))


def test_a_submodule_is_named_and_its_code_taken_from_the_runs_own_copy(nested: Path, tmp_path: Path) -> None:
    folder, name = RunFolder(tmp_path / "0123456789ab"), "lib/outer/outer.py"
    (folder.code / name).parent.mkdir(parents=True)
    (folder.code / name).write_bytes((nested / name).read_bytes())
    told, parts = {"git_commit": git(nested, "rev-parse", "HEAD").strip()}, {"code": {name: ""}}
    made = Recipe(folder=folder, result={}, parts=parts, config={}, provenance=told, patch=b"")
    said: list[str] = []
    with checkout(made, root=nested, checkout_dir=tmp_path / "again", keep=False, say=said.append) as project:
        assert (project / name).read_text() == "of = 'outer'\n"
    assert said[0] == "  submodule    lib/outer is not checked out: of its files the run's own copies are taken"
    assert said[1].startswith(f"  snapshot     {name} is the run's own copy: ")


def test_a_file_outside_of_the_project_that_the_run_imports_is_in_the_patch(repository: Path) -> None:
    for name in ("proj/own.py", "shared/lib.py", "shared/other.py"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("x = 1\n")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    imported = [repository / name for name in ("proj/own.py", "shared/lib.py", "shared/new.py", "../elsewhere.py")]
    clean, _ = collect(repository / "proj", [], NO_DETAILS, outputs=[], imported=imported)
    assert (clean.git_dirty, clean.left_out) == (False, ())
    for name in ("shared/lib.py", "shared/new.py", "shared/other.py"):
        (repository / name).write_text("x = 2\n")
    found, patch = collect(repository / "proj", [], NO_DETAILS, outputs=[], imported=imported)
    assert (found.git_dirty, changed_in(patch)) == (True, ["shared/lib.py", "shared/new.py"])
