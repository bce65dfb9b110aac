"""What goes wrong, said in one place: what failed, where, the value seen, the valid ones, the next command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PacelineError(Exception):
    """An error that a person can act on. ``str(error)`` is the text that is shown, without a traceback.

    Args:
        what: what failed, with the field or host and the value seen.
        hint: the command or edit that fixes it, shown on a line of its own as ``  try: …``.

    Attributes:
        shown: its text stands on the screen already, so its first line will do at the end.
    """

    shown = False

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        self.what = what
        self.hint = hint
        super().__init__(what if hint is None else f"{what}\n  try: {hint}")


class UsageError(PacelineError):
    """A wrong command line or configuration (exit code 3)."""


class DataError(PacelineError):
    """A data set that is missing, partial, altered or unreachable."""


class HostError(PacelineError):
    """One or more hosts that can't take part; the text names each with the value seen, ``hosts`` are their labels
    where that is known of each."""

    def __init__(self, what: str, *, hint: str | None = None, hosts: Sequence[str] = ()) -> None:
        super().__init__(what, hint=hint)
        self.hosts = tuple(hosts)


DECIDED = ("code", "config")
"""The causes of a TrainingError that would end another attempt the same way."""


class TrainingError(PacelineError):
    """Training started and ended badly; the text names host, rank and the first error.

    ``cause`` is what a sweep decides by whether it tries again: ``host`` (a node was lost), ``memory`` (too
    little of it, or something killed a rank), ``disk`` (it is full), ``config`` (a value that can't work, code that
    can't be read: not even a restart changes that), ``cancelled`` (somebody has ended the scheduler's job: neither),
    ``outputs`` (it ended well, and what it left there can't be brought here, or not be written: another attempt would
    repeat it) or ``code`` (it would end the same way again).
    ``gone`` are hosts that neither the stream from them nor a fresh connection reached at the end.
    """

    def __init__(self, what: str, *, hint: str | None = None, cause: str = "code", gone: Sequence[str] = ()) -> None:
        super().__init__(what, hint=hint)
        self.cause, self.gone = cause, tuple(gone)


class Pruned(PacelineError):  # noqa: N818  (the word of the journal)
    """A search ended the run early: not a failure, and not a result either."""


class Killed(PacelineError):  # noqa: N818  (the word of the journal)
    """Stopped by Ctrl-C or a signal."""


def text_of(error: BaseException) -> str:
    """What the exception says, on one line; of one whose ``__str__`` raises, why it says nothing."""
    try:
        return " ".join(str(error).split())
    except Exception as reason:
        return f"(its text could not be made: {type(reason).__name__})"


def os_reason(error: OSError) -> str:
    """``No space left on device (/the/file)``: what the system said, and of which file where that is known."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def nearest(word: str, options: Iterable[str], likeness: float = 0.5) -> str | None:
    """The option most like ``word``, or None where nothing is alike."""

    known = list(options)
    same = [option for option in known if option.casefold() == word.casefold()]
    matches = same or difflib.get_close_matches(word, known, n=1, cutoff=likeness)
    return matches[0] if matches else None


def suggestion(word: str, options: Iterable[str]) -> str:
    """``did you mean X? valid: A, B, C`` as one phrase (no 'did you mean' where nothing is alike)."""
    known = sorted(options)
    close = nearest(word, known)
    start = f"did you mean {close}? " if close else ""
    return f"{start}valid: {', '.join(known) if known else '(none)'}"
