"""A commit in a repository of its own that borrows the objects of another, into which nothing is written."""

from __future__ import annotations

from pathlib import Path

from pipeline.core import git
from pipeline.core.errors import PacelineError


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
