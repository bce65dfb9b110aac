"""What came back from a host: what its command has written, and the agent's answer in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.cluster.launchers.answers import parse_answer

ENDLESS = "its login prints without end"
"""The beginning of the note of an output that was cut off."""
LATE = "it hadn't answered after"
"""The beginning of the note of a command that the time limit ended."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What the command on one host has written, and how it ended.

    ``code`` is its exit code, None where it has none: the time limit ended it, or it never began. ``note`` says so.
    """

    stdout: bytes = b""
    stderr: str = ""
    code: int | None = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The agent's JSON (None: there is none), and the output in which it stood."""

    value: dict[str, Any] | None
    output: Output = Output()

    @property
    def told(self) -> str | None:
        """Why the agent could not do what it was asked, in its own words; None when it did, or said nothing."""
        error = None if self.value is None else self.value.get("error")
        return None if error is None else str(error)

    @property
    def error(self) -> str | None:
        """Why the host did not do what it was asked, as it stands there; None when it did."""
        if self.value is not None:
            return self.told
        said = self.output.stderr.strip().splitlines()
        return self.output.note or (said[-1] if said else "no answer")


def answer_in(output: Output, token: str) -> Answer:
    """The newest answer to the request that carried ``token``."""
    return Answer(value=parse_answer(output.stdout, token), output=output)
