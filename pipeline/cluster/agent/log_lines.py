"""Growing files read as complete lines, cut if a line is too long for a log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from trainers.contract.run_folder import UNFINISHED

LONGEST_LINE_BYTES = 65536
LONGEST_TOKEN_BYTES = 8192
BAR_S = 30.0  # between two lines that show how far a progress bar has got
CUT = " [cut: the line is longer, it goes on below]"
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")


class Rules:
    """The rules for masking secrets: patterns and their replacements.

    ``longest_bytes`` is the longest possible match: a pattern spells its secrets out, and tokens of a known form and
    logins in addresses are assumed to be no longer.
    """

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        self._rules = [(re.compile(pattern), shown) for pattern, shown in rules]
        lengths = [len(pattern.pattern.encode()) for pattern, _ in self._rules]
        self.longest_bytes = max([LONGEST_TOKEN_BYTES, *lengths]) if lengths else 0

    def hide(self, text: str) -> str:
        """Mask secrets; if colours stand inside of one, all colours of the text are removed."""
        hidden = self._hidden(text)
        plain = _COLOURS.sub("", hidden) if "\x1b" in hidden else hidden
        without_colours = self._hidden(plain)
        return hidden if without_colours == plain else without_colours

    def _hidden(self, text: str) -> str:
        for pattern, shown in self._rules:
            text = pattern.sub(shown, text)
        return text

    def cut_before(self, text: str, at: int) -> int:
        """Return the nearest position up to ``at`` that splits no secret."""
        moved = True
        while moved:
            moved = False
            for pattern, _ in self._rules:
                for match in pattern.finditer(text):
                    if match.start() < at < match.end():
                        at, moved = match.start(), True
        return at


class Tail:
    """One growing file, read as complete lines from the end of the last call.

    Secrets are masked before a line is cut. Of an unfinished line, the possible beginning of a secret is held back.
    """

    def __init__(self, path: str, rules: Rules | None = None, *, shows_bars: bool = False) -> None:
        """``shows_bars``: return a state of a progress bar each ``BAR_S``, as its line may take hours to end."""
        self.path = path
        self._shows_bars, self._last_at = shows_bars, time.monotonic()
        self.rules = Rules() if rules is None else rules
        self.offset = 0
        self._rest = b""

    def lines(self, last: bool = False) -> list[str]:
        """Return the new lines since the last call; lines that are too long are cut."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            data = b""
        self.offset += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        texts = [text for line in whole for text in in_pieces(self.shown(line))]
        if last and len(data) < 1 << 20:
            texts += in_pieces(self.shown(rest)) if rest else []
            rest = b""
        elif len(rest) > LONGEST_LINE_BYTES + self.rules.longest_bytes:
            states, returned, unfinished = rest.rpartition(b"\r")
            if returned:  # a progress bar that never ends its line: its last state
                texts += in_pieces(self.shown(states))
                rest = unfinished
            pieces, rest = self._cut_unfinished(rest)
            texts += pieces
        elif not texts and self._shows_bars and time.monotonic() - self._last_at > BAR_S:
            states, _, unfinished = rest.rpartition(b"\r")
            if states.strip():
                texts = [text + UNFINISHED for text in in_pieces(self.shown(states))]
                rest = unfinished
        self._last_at = time.monotonic() if texts else self._last_at
        self._rest = rest
        return texts

    def _cut_unfinished(self, line: bytes) -> tuple[list[str], bytes]:
        """Return pieces of an unfinished line, and the held back rest."""
        text = line.decode("utf-8", "surrogateescape")
        at = self.rules.cut_before(text, len(text) - self.rules.longest_bytes - 4)  # 4: a character may be cut there
        if len(line) <= LONGEST_LINE_BYTES or at <= 0:
            return [], line
        cut, left = cut_long(self.shown(text[:at].encode("utf-8", "surrogateescape")))
        return [*cut, as_text(left) + CUT], text[at:].encode("utf-8", "surrogateescape")

    def shown(self, line: bytes) -> bytes:
        """Decode later: bytes that are no text are left to ``as_text``."""
        return self.rules.hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def in_pieces(line: bytes) -> list[str]:
    """Split a complete line into pieces of bounded length.

    Of a progress bar only the text behind its last carriage return counts, as a terminal shows it.
    """
    cut, rest = cut_long(line.rstrip(b"\r").rpartition(b"\r")[2])
    return [*cut, as_text(rest)]


def cut_long(line: bytes) -> tuple[list[str], bytes]:
    """Return marked pieces of a long line, never splitting a character, and the rest."""
    texts = []
    while len(line) > LONGEST_LINE_BYTES:
        end = LONGEST_LINE_BYTES
        while end > LONGEST_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:
            end -= 1
        texts.append(as_text(line[:end]) + CUT)
        line = line[end:]
    return texts, line


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")
