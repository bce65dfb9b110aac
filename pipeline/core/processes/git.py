"""git, asked without leaving a trace: no hook or file system monitor of the user's runs, no variable of a calling git
is inherited."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.processes.process import Completed, find, run

_TIMEOUT_S = 60.0
_NUMBER = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OF_A_REPOSITORY = (  # `git rev-parse --local-env-vars`, and what alters a diff
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"),
    *("GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_SHALLOW_FILE"),
    *("GIT_CONFIG", "GIT_GRAFT_FILE", "GIT_REPLACE_REF_BASE"),
    *("GIT_NO_REPLACE_OBJECTS", "GIT_INTERNAL_SUPER_PREFIX", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS"),
    *("GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"),
)


def git(
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    input_: bytes | None = None,
    settings: Mapping[str, str] | None = None,
    errors: str = "replace",
) -> Completed | None:
    """One git command in ``folder``, any exit code; None where git isn't installed. Raises PacelineError: it hangs.

    ``settings`` come before those of git's own files; ``errors``: what becomes of names that aren't UTF-8.
    """
    if find("git") is None:
        return None
    given = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", **(settings or {})}
    said = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
    argv = ["git", "-C", str(folder), *said, *arguments]
    return run(argv, input=input_, timeout_s=_TIMEOUT_S, env={**environment(), **(env or {})}, errors=errors)


def answer(folder: Path, *arguments: str) -> str | None:
    """git's output, or None where git or the repository is missing or it refuses."""
    done = git(folder, *arguments)
    return done.stdout if done is not None and done.code == 0 else None


def environment() -> dict[str, str]:
    """This process's environment without what a calling git (a hook, ``rebase --exec``) says about its repository."""
    return {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}


def has_commit(folder: Path, commit: str) -> bool:
    """Whether a repository has the commit of that number, which may be what somebody's file says."""
    return (
        _NUMBER.fullmatch(commit) is not None and answer(folder, "cat-file", "-e", f"{commit}^{{commit}}") is not None
    )


def common_folder(checkout: Path) -> Path | None:
    """The git folder of the repository that ``checkout`` is of, the same for all of its worktrees."""
    output = answer(checkout, "rev-parse", "--path-format=absolute", "--git-common-dir")
    return Path(output.removesuffix("\n")) if output else None


def top_of(folder: Path) -> Path:
    """The checkout that ``folder`` lies in, or the folder itself where it lies in none."""
    output = answer(folder, "rev-parse", "--show-toplevel")
    return Path(output.removesuffix("\n")) if output else folder


def refusal(folder: Path) -> str | None:
    """Why git reads no repository here although a ``.git`` stands in ``folder`` or above it, and the fix.

    None: it does, or there is none. Another owner's clone is refused, and one whose HEAD is damaged.
    """
    if not any(_is_git_folder(place / ".git") for place in (folder, *folder.parents)):
        return None
    done = git(folder, "rev-parse", "--is-inside-work-tree")
    if done is None:
        return "git is not installed"
    if done.code == 0:
        return None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
    fix = next((f"; try: {line}" for line in said if line.startswith("git config ")), "")
    return f"git refuses the repository: {said[0].removeprefix('fatal: ')}{fix}"


def _is_git_folder(path: Path) -> bool:
    """Of a repository, a worktree or a submodule; an empty folder of that name is none to git either."""
    return path.is_file() or (path / "HEAD").exists()


def without_checkout(repository: Path) -> dict[str, str]:
    """The variables by which git works in the git folder alone: that of a submodule names a work tree, which may be
    gone."""
    return {"GIT_DIR": str(repository), "GIT_WORK_TREE": str(repository)}
