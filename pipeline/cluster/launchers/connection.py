"""The command that reaches the agent on one host, and the one that tries again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Connection:
    """``host`` is its label, ``argv`` the command of a live agent there. ``again`` makes the command of a further
    connection, after one broke or hung (None: the same). ``slow_s`` is how long the connection may
    take until it answers, ``silent_s`` how long the agent may say nothing at any time: more than the usual limits."""

    host: str
    argv: list[str]
    again: Callable[[], list[str]] | None = None
    slow_s: float = 0.0
    silent_s: float = 0.0

    def retry(self) -> list[str]:
        """The command of a further connection."""
        return self.argv if self.again is None else self.again()
