"""The exceptions whose text is shown to the user as it is, and helpers that make such texts.

The text says what failed, where, the value seen, the valid values and the next command.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_PLACE = re.compile(r"training failed on [^:]*: ")  # the start of pipeline.cluster's messages: host and rank


class PacelineError(Exception):
    """An error that a user can act on. ``str(error)`` is shown as it is, without a traceback.

    ``what`` failed, with the field or host and the value seen; ``hint`` is the command or edit that fixes it, shown on
    its own line as ``  try: …``.
    """

    shown = False  # the full text was already printed, so the final message shows only its first line

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        self.what = what
        self.hint = hint
        super().__init__(what if hint is None else f"{what}\n  try: {hint}")


class UsageError(PacelineError):
    """A wrong command line or configuration (exit code 3)."""


class DataError(PacelineError):
    """A data set is missing, incomplete, altered or unreachable."""


class HostError(PacelineError):
    """One or more hosts can't take part; the text names each. ``hosts`` are their labels, if all of them are known."""

    def __init__(self, what: str, *, hint: str | None = None, hosts: Sequence[str] = ()) -> None:
        super().__init__(what, hint=hint)
        self.hosts = tuple(hosts)


FATAL = ("code", "config")
"""Causes of a TrainingError with which a retry would fail the same way."""


class TrainingError(PacelineError):
    """Training started and failed; the text names the host, the rank and the first error.

    Attributes:
        cause: by it a sweep decides whether to retry a trial.
            ``host``: a node was lost. ``memory``: out of memory, or a rank was killed. ``disk``: it is full.
            ``config``: an invalid value, or code that can't be parsed. ``code``: any other error of the program.
            ``cancelled``: the scheduler's job was cancelled, which counts neither as a failure nor for a retry.
            ``outputs``: the run ended well, but its outputs can't be fetched or written.
        gone: labels of the hosts that could not be reached at the end, even through a new connection.
    """

    def __init__(self, what: str, *, hint: str | None = None, cause: str = "code", gone: Sequence[str] = ()) -> None:
        super().__init__(what, hint=hint)
        self.cause, self.gone = cause, tuple(gone)


class Pruned(PacelineError):  # noqa: N818  (named like the journal's state)
    """A search ended the run early: neither a failure nor a result."""


class Killed(PacelineError):  # noqa: N818  (named like the journal's state)
    """The run was stopped by Ctrl-C or a signal."""


def text_of(error: BaseException) -> str:
    """Return the exception's text on one line; if its ``__str__`` raises, the reason for that."""
    try:
        return " ".join(str(error).split())
    except Exception as reason:
        return f"(its text could not be made: {type(reason).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of the exception's text; its class if the text is empty."""
    text = error.what if isinstance(error, PacelineError) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def without_host_and_rank(text: str) -> str:
    """Remove the host and rank from a TrainingError's text, so that equal failures have equal texts."""
    return _PLACE.sub("", text)


def os_reason(error: OSError) -> str:
    """Return ``No space left on device (/the/file)``: the system's message and the file, if known."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def nearest(word: str, options: Iterable[str], likeness: float = 0.5) -> str | None:
    """Return the option most similar to ``word``; None if none is. ``likeness``: difflib's lower limit, from 0 to 1."""
    candidates = list(options)
    same = [option for option in candidates if option.casefold() == word.casefold()]
    matches = same or difflib.get_close_matches(word, candidates, n=1, cutoff=likeness)
    return matches[0] if matches else None


def suggestion(word: str, options: Iterable[str]) -> str:
    """Return ``did you mean X? valid: A, B, C``; the question only appears if an option is similar."""
    valid = sorted(options)
    close = nearest(word, valid)
    question = f"did you mean {close}? " if close else ""
    return f"{question}valid: {', '.join(valid) if valid else '(none)'}"
