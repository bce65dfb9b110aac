"""Where a run comes from: commit, uncommitted changes, command line, controller."""

from __future__ import annotations

import os
import platform
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.shell import find, run

_GIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What provenance.json holds. Without git, ``git_commit`` is None and ``git_dirty`` too."""

    git_commit: str | None
    git_dirty: bool | None
    command: str
    overrides: tuple[str, ...]
    hosts: tuple[str, ...]
    controller: str
    python: str
    unix_time: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(
    *, root: Path, argv: Sequence[str], overrides: Sequence[str], hosts: Sequence[str], unix_time: float
) -> tuple[Provenance, bytes]:
    """The provenance and the binary patch (untracked files included) that turns the commit into this tree."""
    commit = _git(root, "rev-parse", "HEAD")
    patch = _patch(root) if commit is not None else b""
    provenance = Provenance(
        git_commit=commit.strip() if commit is not None else None,
        git_dirty=bool(patch) if commit is not None else None,
        command=shlex.join(_without_secrets(argv)),
        overrides=tuple(_without_secrets(overrides)),
        hosts=tuple(hosts),
        controller=platform.node(),
        python=platform.python_version(),
        unix_time=unix_time,
    )
    return provenance, patch


def _git(root: Path, *arguments: str, index: Path | None = None) -> str | None:
    """git's output, or None where git or the repository is missing. ``index`` keeps the user's own index untouched."""
    if find("git") is None:
        return None
    env = {**os.environ, "GIT_INDEX_FILE": str(index)} if index else None
    done = run(["git", "-C", str(root), *arguments], timeout_s=_GIT_TIMEOUT_S, env=env)
    return done.stdout if done.code == 0 else None


def _patch(root: Path) -> bytes:
    """``git diff HEAD`` with untracked files, made in a throw-away index (to a file: sources may hold any bytes)."""
    with tempfile.TemporaryDirectory(prefix="paceline-index-") as folder:
        index, patch = Path(folder) / "index", Path(folder) / "patch"
        steps = (
            ("read-tree", "HEAD"),
            ("add", "--all"),
            ("diff", "--cached", "--binary", f"--output={patch}", "HEAD"),
        )
        if any(_git(root, *step, index=index) is None for step in steps):
            return b""
        return patch.read_bytes() if patch.exists() else b""


def _without_secrets(words: Sequence[str]) -> list[str]:
    """``https://user:password@host`` loses its password."""
    return [re.sub(r"(://[^/\s:@]*):[^/\s@]*@", r"\1:***@", word) for word in words]
