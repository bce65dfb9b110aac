"""Where a run comes from: commit, uncommitted changes, command line, controller."""

from __future__ import annotations

import os
import platform
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.shell import find, run

_GIT_TIMEOUT_S = 30.0
_LARGEST_UNTRACKED_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What provenance.json holds. Without git, ``git_commit`` is None and ``git_dirty`` too."""

    git_commit: str | None
    git_dirty: bool | None
    left_out: tuple[str, ...]
    command: str
    overrides: tuple[str, ...]
    hosts: tuple[str, ...]
    controller: str
    python: str
    unix_time: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(
    *,
    root: Path,
    argv: Sequence[str],
    overrides: Sequence[str],
    hosts: Sequence[str],
    outputs: Sequence[Path],
    unix_time: float,
) -> tuple[Provenance, bytes]:
    """The provenance and the binary patch (untracked files included) that turns the commit into this tree.

    ``outputs`` are folders of results: what lies there is no source. Untracked files over 8 MiB are named
    in ``left_out`` and not in the patch.
    """
    commit = _git(root, "rev-parse", "HEAD")
    left_out = _too_large(root) if commit is not None else []
    inside = [str(path.relative_to(root)) for path in outputs if path.is_relative_to(root) and path != root]
    patch = _patch(root, [*left_out, *inside]) if commit is not None else b""
    provenance = Provenance(
        git_commit=commit.strip() if commit is not None else None,
        git_dirty=bool(patch or left_out) if commit is not None else None,
        left_out=tuple(left_out),
        command=shlex.join(_without_secrets(argv)),
        overrides=tuple(_without_secrets(overrides)),
        hosts=tuple(hosts),
        controller=platform.node(),
        python=platform.python_version(),
        unix_time=unix_time,
    )
    return provenance, patch


def of_another(origin: Provenance, *, overrides: Sequence[str], hosts: Sequence[str], unix_time: float) -> Provenance:
    """The provenance of another run of the same command and code."""
    return replace(origin, overrides=tuple(_without_secrets(overrides)), hosts=tuple(hosts), unix_time=unix_time)


def _git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str | None:
    """git's output, or None where git or the repository is missing."""
    if find("git") is None:
        return None
    done = run(["git", "-C", str(root), *arguments], timeout_s=_GIT_TIMEOUT_S, env={**os.environ, **(env or {})})
    return done.stdout if done.code == 0 else None


def _too_large(root: Path) -> list[str]:
    """Untracked files that would make the patch a copy of a data set."""
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    return [
        name
        for name in listed.split("\0")
        if name and (root / name).is_file() and (root / name).stat().st_size > _LARGEST_UNTRACKED_BYTES
    ]


def _patch(root: Path, left_out: Sequence[str]) -> bytes:
    """``git diff HEAD`` with untracked files; index and objects go to a throw-away folder, so .git stays as it is.

    git writes the patch to a file: sources may hold any bytes.
    """
    objects = _git(root, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory(prefix="paceline-git-") as folder:
        patch = Path(folder) / "patch"
        (Path(folder) / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(Path(folder) / "index"),
            "GIT_OBJECT_DIRECTORY": str(Path(folder) / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": (objects or "").strip(),
        }
        steps = (
            ("read-tree", "HEAD"),
            ("add", "--all", "--", ".", *(f":(exclude,literal){name}" for name in left_out)),
            ("diff", "--cached", "--binary", f"--output={patch}", "HEAD"),
        )
        if any(_git(root, *step, env=env) is None for step in steps):
            return b""
        return patch.read_bytes() if patch.exists() else b""


def _without_secrets(words: Sequence[str]) -> list[str]:
    """``https://user:password@host`` loses its password."""
    return [re.sub(r"(://[^/\s:@]*):[^/\s@]*@", r"\1:***@", word) for word in words]
