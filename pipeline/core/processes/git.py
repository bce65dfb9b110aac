"""Run git for provenance, reproductions and keys, without side effects.

No hooks and file system monitors run, and variables of a git that called this command (as a hook) are removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.processes.process import Completed, find, run

_TIMEOUT_S = 60.0
_COMMIT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REPOSITORY_VARIABLES = (  # those of `git rev-parse --local-env-vars`, and others that alter a diff
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
    """Run one git command in ``folder``; any exit code is returned. None if git isn't installed.

    ``settings`` override git's own. ``errors``: decoding of names that aren't UTF-8. Raises PacelineError: git hangs.
    """
    if find("git") is None:
        return None
    overrides = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", **(settings or {})}
    options = [word for name, value in overrides.items() for word in ("-c", f"{name}={value}")]
    argv = ["git", "-C", str(folder), *options, *arguments]
    return run(argv, input=input_, timeout_s=_TIMEOUT_S, env={**environment(), **(env or {})}, errors=errors)


def answer(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if git or the repository is missing, or git fails."""
    done = git(folder, *arguments)
    return done.stdout if done is not None and done.code == 0 else None


def environment() -> dict[str, str]:
    """Return this process's environment without the repository variables that a calling git sets (a hook)."""
    return {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}


def has_commit(folder: Path, commit: str) -> bool:
    """Return True if the repository has the commit, whose id may come from an untrusted file."""
    is_id = _COMMIT_ID.fullmatch(commit) is not None
    return is_id and answer(folder, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def common_folder(checkout: Path) -> Path | None:
    """Return the git folder of the repository of ``checkout``, shared by all of its worktrees."""
    output = answer(checkout, "rev-parse", "--path-format=absolute", "--git-common-dir")
    return Path(output.removesuffix("\n")) if output else None


def refusal(folder: Path) -> str | None:
    """Explain why git refuses the repository around ``folder``, with the fix; None: it accepts it, or none is there."""
    candidates = [parent / ".git" for parent in (folder, *folder.parents)]
    if not any(path.is_file() or (path / "HEAD").exists() for path in candidates):  # git too ignores an empty folder
        return None
    done = git(folder, "rev-parse", "--is-inside-work-tree")
    if done is None:
        return "git is not installed"
    if done.code == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
    fix = next((f"; try: {line}" for line in lines if line.startswith("git config ")), "")
    return f"git refuses the repository: {lines[0].removeprefix('fatal: ')}{fix}"


def without_checkout(repository: Path) -> dict[str, str]:
    """Return variables with which git uses the git folder ``repository`` alone, even if its work tree is gone."""
    return {"GIT_DIR": str(repository), "GIT_WORK_TREE": str(repository)}
