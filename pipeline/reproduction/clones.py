"""A commit, and its submodules at the commits that it records, in repositories that borrow the objects of others.

Nothing is fetched, and nothing is written into the git folders that are here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import git
from pipeline.core.errors import PacelineError

_PATHS = ("--null", "--get-regexp", r"^submodule\..*\.path$")


def clone(repository: Path, place: Path, commit: str) -> None:
    """The commit of the git folder ``repository``, in the index of a new repository at ``place`` and nowhere else.

    A patch is made of what git keeps, which filters and line ends of a checkout may alter: it is applied to the index.

    Raises:
        PacelineError: git refuses.
    """
    cloning = ("clone", "--quiet", "--shared", "--no-checkout", str(repository), str(place))
    at_commit = (place, ("update-ref", "--no-deref", "HEAD", commit)), (place, ("read-tree", commit))
    for folder, words in ((repository, cloning), *at_commit):
        done = git.git(folder, *words)
        if done is None or done.code != 0:
            why = done.stderr.strip() if done else "git is missing"
            raise PacelineError(f"git {words[0]} of {commit[:10]} into {place} failed: {why}")


def check_out(place: Path) -> None:
    """The files of the index. Raises PacelineError."""
    done = git.git(place, "checkout-index", "--all", "--force", "--index", "--quiet")
    if done is None or done.code != 0:
        raise PacelineError(f"git checkout-index in {place} failed: {done.stderr.strip() if done else 'no git'}")


@dataclass(frozen=True, kw_only=True)
class Submodule:
    """``path`` is relative to the repository; ``repository`` is a git folder that has ``commit`` (None: none here)."""

    path: str
    commit: str
    repository: Path | None


def recorded(repository: Path, commit: str, checkout: Path) -> Iterator[Submodule]:
    """The submodules of a commit and theirs in turn, outer ones first.

    Args:
        repository: a git folder that has the commit.
        checkout: where a checkout of that repository may lie, with those of its submodules.
    """
    listed = _answer(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    links = [row.partition("\t") for row in listed.split("\0") if row.startswith("160000 ")]
    names = _names(repository, commit) if links else {}
    for about, _, path in links:
        wanted = about.split()[2]
        places = _repositories(repository, names.get(path, path), checkout / path)
        source = next((place for place in places if _answer(place, "cat-file", "-t", wanted) == "commit\n"), None)
        yield Submodule(path=path, commit=wanted, repository=source)
        if source is not None:
            for item in recorded(source, wanted, checkout / path):
                yield Submodule(path=f"{path}/{item.path}", commit=item.commit, repository=item.repository)


def fill(place: Path, root: Path | None, commit: str) -> Iterator[str]:
    """Check out the submodules of ``commit`` in its copy at ``place``; a line for each that can't be, with what helps.

    Args:
        root: a folder of the checkout from which the copy was made; None where an archive brought the files.

    Raises:
        PacelineError: git refuses.
    """
    repository = git.common_folder(root) if root is not None else None
    if root is None or repository is None:
        yield from (
            f"{path} isn't in the archive: it wasn't there when the run was exported"
            for path in _paths(place / ".gitmodules")
            if _is_empty(place / path)
        )
        return
    top = git.top_of(root)
    for item in recorded(repository, commit, top):
        if not _is_empty(place / item.path):
            continue  # the run's changes put something else there
        if item.repository is None:
            yield f"{item.path} at {item.commit[:10]} isn't here; if the run needs it: {_mend(top, item)}"
            continue
        clone(item.repository, place / item.path, item.commit)
        check_out(place / item.path)


def _mend(top: Path, item: Submodule) -> str:
    place = shlex.quote(item.path)
    if (top / item.path / ".git").exists():  # it is there, at commits of other times
        return f"git -C {shlex.quote(str(top / item.path))} fetch origin {item.commit}, then the same command"
    return f"git -C {shlex.quote(str(top))} submodule update --init --recursive {place}, then the same command"


def _repositories(outer: Path, name: str, checkout: Path) -> Iterator[Path]:
    """Where git may keep a submodule: in its checkout, or what it has kept of one that isn't checked out now."""
    own = git.common_folder(checkout) if (checkout / ".git").exists() else None
    if own is not None:
        yield own
    if (outer / "modules" / name).is_dir():
        yield outer / "modules" / name


def _names(repository: Path, commit: str) -> dict[str, str]:
    """Path → the name under which git keeps it, as .gitmodules of a commit says."""
    return _by_path(_answer(repository, "config", "--blob", f"{commit}:.gitmodules", *_PATHS))


def _paths(file: Path) -> list[str]:
    return [*_by_path(git.answer(file.parent, "config", "--file", str(file), *_PATHS) or "")]


def _by_path(listed: str) -> dict[str, str]:
    rows = [row.partition("\n") for row in listed.split("\0") if row]
    return {path: key.removeprefix("submodule.").removesuffix(".path") for key, _, path in rows}


def _is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _answer(repository: Path, *words: str) -> str:
    """git's answer, '' where it refuses."""
    done = git.git(repository, *words, env=git.without_checkout(repository), errors="surrogateescape")
    return done.stdout if done is not None and done.code == 0 else ""
