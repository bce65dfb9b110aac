"""The commit that an archive brings: proven by git's own ids, and nothing else of it runs or is written elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic
from pipeline.reproduction import archive
from pipeline.reproduction import recipe as recipes
from pipeline.reproduction.recipe import checkout
from pipeline.runs.folder import RunFolder
from tests.pipeline.git_folders import AUTHOR, git, recipe, tree

pytestmark = pytest.mark.slow

LINK = b"""diff --git a/lnk b/lnk
new file mode 120000
--- /dev/null
+++ b/lnk
@@ -0,0 +1 @@
+%s
\\ No newline at end of file
"""
FILE = b"""diff --git a/%s b/%s
new file mode 100755
--- /dev/null
+++ b/%s
@@ -0,0 +1 @@
+echo here
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


def head(repository: Path) -> str:
    return git(repository, "rev-parse", "HEAD").strip()


def commit_of(repository: Path, root: str) -> str:
    """Of a tree that no checkout could give."""
    return git(repository, *AUTHOR, "commit-tree", "-m", "two", root).strip()


def written(repository: Path, kind: str, content: bytes) -> str:
    (path := repository.parent / "object").write_bytes(content)
    return git(repository, "hash-object", "-w", "--literally", "-t", kind, str(path)).strip()


def tree_of(repository: Path, entries: Mapping[str, tuple[str, str]]) -> str:
    """Name → mode and id, whatever the name."""
    rows = [f"{mode} {name}".encode() + b"\0" + bytes.fromhex(number) for name, (mode, number) in entries.items()]
    return written(repository, "tree", b"".join(rows))


class Brought:
    """A run folder that an archive gave, in a project whose repository knows nothing of the commit."""

    def __init__(self, place: Path, repository: Path, commit: str, *, patch: bytes = b"") -> None:
        self.made = recipe(place, patch, commit)
        self.project = place / "elsewhere"
        git(place, "init", "-q", str(self.project))
        for name, content in archive._packed_commit(repository, commit).items():
            write_atomic(self.folder.path / name, content)

    @property
    def folder(self) -> RunFolder:
        return self.made.folder

    def tree(self) -> dict[str, tuple[bool, bytes]]:
        place = self.folder.path.parent / "again"
        with checkout(self.made, root=self.project, checkout_dir=place, keep=False) as project:
            return tree(project)

    def refusal(self) -> str:
        with pytest.raises(PacelineError) as refused:
            self.tree()
        assert not (self.folder.path.parent / "again").exists()
        return str(refused.value)


def files_outside(outside: Path) -> Iterator[str]:
    return (path.name for path in outside.iterdir())


def test_a_commit_comes_out_of_an_archive_as_it_is_and_gives_equal_bytes(repository: Path, tmp_path: Path) -> None:
    (repository / "run.sh").write_text("echo 1\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "to").symlink_to("code.py")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    assert Brought(tmp_path, repository, head(repository)).tree() == tree(repository)
    assert archive._packed_commit(repository, head(repository)) == archive._packed_commit(repository, head(repository))


@pytest.mark.parametrize("name", ["dodo.py", "sitecustomize.py"])
def test_a_file_that_the_recorded_commit_lacks_is_not_taken_from_an_archive(
    name: str, repository: Path, tmp_path: Path
) -> None:
    brought = Brought(tmp_path, repository, recorded := head(repository))
    (repository / name).write_text("open('here', 'w')\n")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    (other,) = archive._packed_commit(repository, head(repository)).values()
    pack = brought.folder.path / "source" / f"{recorded}.pack"
    pack.write_bytes(other)
    assert brought.refusal() == f"source of the archive doesn't hold commit {recorded}, which the run names"
    pack.write_bytes(other[:-30] + bytes(30))
    assert "git index-pack in" in brought.refusal()


def test_a_commit_whose_files_an_archive_lacks_is_refused(repository: Path, tmp_path: Path) -> None:
    blob = "1" * 40
    commit = commit_of(repository, tree_of(repository, {"code.py": ("100644", blob)}))
    brought = Brought(tmp_path, repository, head(repository))
    brought.made = replace(brought.made, provenance={"git_commit": commit})
    ids = f"{commit}\n{git(repository, 'rev-parse', f'{commit}^{{tree}}')}".encode()
    made = recipes._run(repository, "pack-objects", "-q", str(brought.folder.path / "source" / "x"), input_=ids).strip()
    assert (brought.folder.path / "source" / f"x-{made}.pack").exists()
    assert f"unable to read sha1 file of code.py ({blob})" in brought.refusal()


@pytest.mark.parametrize("name", [".git", ".GIT", "..", "lnk/../../outside"])
def test_a_commit_with_a_git_folder_or_a_path_that_leads_out_is_refused(
    name: str, repository: Path, tmp_path: Path, outside: Path
) -> None:
    config = b"[core]\n\tfsmonitor = touch %s/monitor\n" % str(outside).encode()
    inner = tree_of(repository, {"config": ("100644", written(repository, "blob", config))})
    commit = commit_of(repository, tree_of(repository, {name: ("40000", inner)}))
    assert f"error: invalid path '{name}/config'" in Brought(tmp_path, repository, commit).refusal()
    assert [*files_outside(outside)] == []


def test_no_filter_runs_on_the_files_of_an_archive(
    repository: Path, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".gitattributes").write_text("* filter=x\n")
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    (tmp_path / "gitconfig").write_text(f'[filter "x"]\n\tsmudge = "touch {outside}/smudge; cat"\n\trequired\n')
    brought = Brought(tmp_path, repository, head(repository))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    assert brought.tree() == tree(repository)
    assert [*files_outside(outside)] == []


def test_no_copy_of_the_code_is_written_through_a_link_of_the_commit(
    repository: Path, tmp_path: Path, outside: Path
) -> None:
    (repository / "lnk").symlink_to(outside)
    git(repository, "add", "-A")
    git(repository, *AUTHOR, "commit", "-qm", "two")
    brought = Brought(tmp_path, repository, head(repository))
    write_atomic(brought.folder.code / "lnk" / "x.py", b"x = 1\n")
    brought.made = replace(brought.made, parts={"code": {"lnk/x.py": "0" * 64}})
    assert brought.refusal().endswith(f"lnk/x.py leads out of the checkout of the run's code, to {outside}/x.py")
    assert [*files_outside(outside)] == []


def test_the_project_of_a_run_lies_in_its_checkout(repository: Path, tmp_path: Path, outside: Path) -> None:
    brought = Brought(tmp_path, repository, head(repository))
    about = {**brought.made.provenance, "git_prefix": "../../outside"}
    brought.made = replace(brought.made, provenance=about)
    assert brought.refusal().endswith(f"leads out of the checkout of the run's code, to {outside}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".git/hooks/post-checkout", "invalid path '.git/hooks/post-checkout'"),
        ("../../../outside/x", "invalid path '../../../outside/x'"),
        ("lnk/x", "affected file 'lnk/x' is beyond a symbolic link"),
    ],
)
def test_a_patch_that_leads_out_of_the_commit_of_an_archive_is_refused(
    name: str, said: str, repository: Path, tmp_path: Path, outside: Path
) -> None:
    patch = LINK % str(outside).encode() + FILE % ((name.encode(),) * 3)
    assert said in Brought(tmp_path, repository, head(repository), patch=patch).refusal()
    assert [*files_outside(outside)] == []


def test_a_commit_that_unpacks_to_too_much_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "_LARGEST_BYTES", 100)
    said = Brought(tmp_path, repository, head(repository)).refusal()
    assert said.startswith("source of the archive unpacks to ")
    assert said.endswith(" bytes, of at most 100")
