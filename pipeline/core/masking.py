"""What this process prints, without secrets: whoever formats a message needn't think of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from pipeline.core.redact import hide, of_environment
from pipeline.core.secret_words import told_in

_known: set[str] = set()
_lost: list[Callable[[BaseException], bool]] = []


def begin() -> None:
    """From now on stdout and stderr hide what the command line, the environment and ``remember`` tell.

    They also take any text: one that was closed (``doit train >&-``) takes it nowhere, and a character that the
    locale's encoding lacks is written as its escape.
    """
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    remember((*told_in(sys.argv[1:]), *of_environment(os.environ)))
    if not isinstance(sys.stdout, _Masked):
        sys.stdout, sys.stderr = cast(TextIO, _Masked(sys.stdout)), cast(TextIO, _Masked(sys.stderr))


def shown(text: str) -> str:
    """A text without what is known to be secret."""
    return hide(text, _known)


def remember(values: Iterable[str]) -> None:
    """Texts that were found to be secret."""
    _known.update(values)


def _open_closed() -> None:
    """Or the next file that is opened gets the number of a standard stream, and children write their output into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (as long as the process)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def outlive(lost: Callable[[BaseException], bool]) -> None:
    """From now on ``lost`` is asked about a stream that takes no more: True where it has seen to it."""
    _lost[:] = [lost]


class _Masked:
    """A stream that writes placeholders for secrets. Everything but writing text is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(shown(text))
        except BrokenPipeError as error:
            if not any(lost(error) for lost in _lost):
                raise
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError as error:
            if not any(lost(error) for lost in _lost):
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
