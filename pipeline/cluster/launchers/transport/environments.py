"""The environment that each host has of a lock file (``cluster.environment_from``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.files import expanded, sha256_text
from pipeline.core.places import ROOT


@dataclass(frozen=True, kw_only=True)
class LockFile:
    """A lock file, and the folder of wheels here from which it is installed (None: hosts have a network)."""

    path: Path
    wheelhouse: Path | None

    @property
    def request(self) -> dict[str, Any]:
        """The part of the environment's name that doesn't come from the host. Raises UsageError."""
        return {"lock_sha256": sha256_text(self.text)}

    @property
    def text(self) -> str:
        """Raises UsageError."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cluster.environment_from: {self.path} can't be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One host's environment. ``python``: its interpreter, None where there is none; ``place``: its folder there."""

    host: str
    place: str
    python: str | None
    python_version: str


LOCKS = ("requirements-nodes.lock", "requirements.lock")
"""What ``cluster.environment_from=lock`` takes, of the project's: torch and what trainers import, else everything."""


def lock_file(environment_from: str | None, wheelhouse: str | None) -> LockFile | None:
    """The one of the settings; None where hosts have environments of their own. Raises UsageError: no such file or
    folder."""
    if environment_from is None:
        if wheelhouse is not None:
            raise UsageError("cluster.wheelhouse is for cluster.environment_from=lock, which isn't set")
        return None
    name = environment_from
    if environment_from == "lock":
        name = next((own for own in LOCKS if (ROOT / own).is_file()), LOCKS[-1])
    lock = ROOT / expanded(name, f"cluster.environment_from={name}")
    wheels = ROOT / expanded(wheelhouse, f"cluster.wheelhouse={wheelhouse}") if wheelhouse is not None else None
    if not lock.is_file():
        raise UsageError(
            f"cluster.environment_from={environment_from}: there is no file {lock}",
            hint=f"cluster.environment_from=lock takes the project's {' or '.join(LOCKS)}",
        )
    if wheels is not None and not wheels.is_dir():
        raise UsageError(
            f"cluster.wheelhouse={wheelhouse}: there is no folder {wheels}",
            hint=f"python -m pip download --no-deps --require-hashes -r {lock} -d {wheelhouse}",
        )
    return LockFile(path=lock, wheelhouse=wheels)
