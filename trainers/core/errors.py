"""The exception that the node half raises for errors that the user can fix."""

from __future__ import annotations


class TrainerError(Exception):
    """Training cannot start or continue. The message says what failed, the value seen and what would work."""
