"""Patterns of file names as a person gives them: what pathlib would stumble over is told before anything runs."""

from __future__ import annotations

from pathlib import PurePosixPath

from pipeline.core.errors import UsageError


def refuse_odd(pattern: str, told: str) -> None:
    """Raises UsageError, which begins with ``told``: no name at all, or ``**`` beside other letters, for which some
    versions of pathlib raise ValueError and others take a single star."""
    parts = PurePosixPath(pattern).parts
    if not parts or "\0" in pattern:
        raise UsageError(f"{told} names no file")
    if any("**" in part and part != "**" for part in parts):
        raise UsageError(f"{told}: ** stands for folders at any depth, with nothing beside it", hint="raw/**/a*.csv")
