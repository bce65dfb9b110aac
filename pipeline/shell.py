"""The one place of the controller half that starts processes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import PacelineError


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command that has ended: its exit code (negative: the signal) and all of its output."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


def find(*names: str) -> str | None:
    """The path of the first program of ``names`` that PATH holds."""
    return next((path for name in names if (path := shutil.which(name))), None)


def run(
    argv: Sequence[str],
    *,
    input: bytes | None = None,  # noqa: A002  (the word of subprocess.run)
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """Run ``argv`` to its end; no shell, any exit code comes back as data.

    Without ``input`` its stdin is empty; ``env`` replaces the whole environment.

    Raises:
        PacelineError: the program isn't there, or it was still running after ``timeout_s``.
    """
    try:
        done = subprocess.run(
            list(argv), input=input or b"", capture_output=True, timeout=timeout_s, env=env, check=False
        )
    except FileNotFoundError as error:
        raise PacelineError(f"program not found: {argv[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise PacelineError(f"{argv[0]} was still running after {timeout_s:g} s") from error
    return Completed(
        argv=tuple(argv),
        code=done.returncode,
        stdout=done.stdout.decode(errors="replace"),
        stderr=done.stderr.decode(errors="replace"),
    )
