"""stdout and stderr of a command, with all secrets masked, so that code which formats messages needn't do it.

``begin`` replaces both streams as the command starts. ``core/redact.py`` decides what counts as a secret; others become
known later (``remember``). Also here: what happens when a stream takes no more output (``| head``, a full disk).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from pipeline.core.redact import hide, secrets_in, secrets_of_environment

_secrets: set[str] = set()
_lost_output_handlers: list[Callable[[BaseException], bool]] = []  # at most one


def begin() -> None:
    """Mask the secrets of the command line, the environment and ``remember`` on stdout and stderr from now on.

    Both streams then also accept any text: a closed stream (``doit train >&-``) discards it, and a character that the
    locale's encoding lacks is written as an escape.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    remember((*secrets_in(sys.argv[1:]), *secrets_of_environment(os.environ)))
    if not isinstance(sys.stdout, _Masked):
        sys.stdout = cast(TextIO, _Masked(sys.stdout))
        sys.stderr = cast(TextIO, _Masked(sys.stderr, is_last=True))


def shown(text: str) -> str:
    """Return the text with known secrets masked."""
    return hide(text, _secrets)


def remember(values: Iterable[str]) -> None:
    """Add texts that are secret."""
    _secrets.update(values)


def without_secret_names(record: dict[str, Any]) -> dict[str, Any]:
    """Drop file names that contain a secret from the record of what a program read (observation/input_record.py)."""
    kept = {
        part: {name: value for name, value in record[part].items() if shown(name) == name}
        for part in ("files", "folders", "looked_for")
    }
    return {**record, **kept, "absent": [name for name in record["absent"] if shown(name) == name]}


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null: else the next opened file gets their number and children's output."""
    # open() returns the lowest free number: above 2 all three standard streams exist
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (as long as the process)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def silence(number: int) -> None:
    """Redirect a standard stream (1 or 2) to /dev/null, also the text in its buffer, which Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def on_lost_output(handler: Callable[[BaseException], bool]) -> None:
    """Set what is called when stdout accepts no more output; it returns True if it has handled the error."""
    _lost_output_handlers[:] = [handler]


class OutputError(OSError):
    """Writing to stdout failed, but not because its reader left: the disk is full, or the terminal is gone."""


class _Masked:
    """A stream that masks secrets in written text and delegates everything else.

    Write errors go to the handler of ``on_lost_output``, or are raised; but those of stderr (``is_last``) are dropped.
    """

    def __init__(self, stream: TextIO, *, is_last: bool = False) -> None:
        self._stream, self._is_last = stream, is_last

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(shown(text)))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """Do nothing: user code may close the stream, but this process still has output."""
        self.flush()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if self._is_last:  # nowhere is left to report it
                silence(2)
                return
            reason = error if isinstance(error, BrokenPipeError) else OutputError(error.errno, error.strerror)
            if not any(handler(reason) for handler in _lost_output_handlers):
                raise reason from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
