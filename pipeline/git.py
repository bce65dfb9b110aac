"""git, asked without leaving a trace: no hook of the user's runs, no variable of a calling git is inherited."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.shell import Completed, find, run

_TIMEOUT_S = 60.0
_OURS = ("GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")


def git(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, input_: bytes | None = None
) -> Completed | None:
    """One git command in ``folder``, any exit code; None where git isn't installed. Raises PacelineError: it hangs."""
    if find("git") is None:
        return None
    argv = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", *arguments]
    return run(argv, input=input_, timeout_s=_TIMEOUT_S, env={**environment(), **(env or {})})


def answer(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str | None:
    """git's output, or None where git or the repository is missing or it refuses."""
    done = git(folder, *arguments, env=env)
    return done.stdout if done is not None and done.code == 0 else None


def environment() -> dict[str, str]:
    """This process's environment without what a calling git (a hook, ``rebase --exec``) says about its repository."""
    return {name: value for name, value in os.environ.items() if name not in (*_OURS, "GIT_DIR", "GIT_WORK_TREE")}


def has_commit(folder: Path, commit: str) -> bool:
    return answer(folder, "cat-file", "-e", f"{commit}^{{commit}}") is not None
