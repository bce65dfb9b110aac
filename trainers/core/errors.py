"""Errors of the node half that a person can act on."""

from __future__ import annotations


class TrainerError(Exception):
    """Training cannot start or go on. The text says what failed, the value seen and what would work."""
