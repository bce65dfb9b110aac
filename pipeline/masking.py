"""What this process prints, without secrets: whoever formats a message needn't think of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from pipeline.redact import hide, of_environment, told_in

_known: set[str] = set()


def begin() -> None:
    """From now on stdout and stderr hide what the command line, the environment and ``remember`` tell."""
    remember((*told_in(sys.argv[1:]), *of_environment(os.environ)))
    if not isinstance(sys.stdout, _Masked):
        sys.stdout, sys.stderr = cast(TextIO, _Masked(sys.stdout)), cast(TextIO, _Masked(sys.stderr))


def shown(text: str) -> str:
    """A text without what is known to be secret."""
    return hide(text, _known)


def remember(values: Iterable[str]) -> None:
    """Texts that were found to be secret."""
    _known.update(values)


class _Masked:
    """A stream that writes placeholders for secrets. Everything but writing text is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
