"""What this process prints, without secrets: whoever formats a message needn't think of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from pipeline.core.redact import hide, of_environment, secrets_in

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
    remember((*secrets_in(sys.argv[1:]), *of_environment(os.environ)))
    if not isinstance(sys.stdout, _Masked):
        sys.stdout = cast(TextIO, _Masked(sys.stdout))
        sys.stderr = cast(TextIO, _Masked(sys.stderr, is_last=True))


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


def silence(number: int) -> None:
    """Let that standard stream lead nowhere: what still waits to be written, too, or the interpreter's end fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def outlive(lost: Callable[[BaseException], bool]) -> None:
    """From now on ``lost`` is asked about a stream that takes no more: True where it has seen to it."""
    _lost[:] = [lost]


class OutputError(OSError):
    """stdout takes no more, and no reader has left it: its disk is full, or its terminal is gone."""


class _Masked:
    """A stream that writes placeholders for secrets. Everything but writing text is the stream's own.

    What can't be written is for ``outlive`` to see to, or raised; of the last one, stderr, it is dropped, as there is
    nowhere to say so.
    """

    def __init__(self, stream: TextIO, *, is_last: bool = False) -> None:
        self._stream, self._is_last = stream, is_last

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(shown(text)))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """It stays open: a person's function may close it, and this process has more to say."""
        self.flush()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if self._is_last:
                silence(2)
                return
            reason = error if isinstance(error, BrokenPipeError) else OutputError(error.errno, error.strerror)
            if not any(lost(reason) for lost in _lost):
                raise reason from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
