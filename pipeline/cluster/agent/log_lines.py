"""Growing files read as whole lines, cut where a line is longer than a log can take."""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH123
from __future__ import annotations

from collections.abc import Callable

LONGEST_LINE_BYTES = 65536
CUT = " [cut: the line is longer, it goes on below]"


class Tail:
    """One growing file, read as whole lines from where the last look ended. ``hide`` alters each before it is cut."""

    def __init__(self, path: str, hide: Callable[[str], str] = str) -> None:
        self.path = path
        self.hide = hide
        self.offset = 0
        self._rest = b""

    def lines(self, last: bool = False) -> list[str]:
        """What came since the last look, line by line; what is longer than a log can take in one piece is cut."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            data = b""
        self.offset += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        texts = [text for line in map(self.shown, whole) for text in in_pieces(line)]
        rest = self.shown(rest) if last or len(rest) > LONGEST_LINE_BYTES else rest
        if last and len(data) < 1 << 20:
            texts += in_pieces(rest) if rest else []
            rest = b""
        elif len(rest) > LONGEST_LINE_BYTES:
            states, returned, unfinished = rest.rpartition(b"\r")
            if returned:  # a progress bar that never ends its line: its last state
                texts += in_pieces(states)
                rest = unfinished
            cut, rest = cut_long(rest)
            texts += cut
        self._rest = rest
        return texts

    def shown(self, line: bytes) -> bytes:
        """Bytes that are no text are left to ``as_text``."""
        return self.hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def in_pieces(line: bytes) -> list[str]:
    """A whole line as a terminal shows it (what stands after a progress bar's last carriage return), cut if it is
    longer than anything downstream should have to hold."""
    cut, rest = cut_long(line.rstrip(b"\r").rpartition(b"\r")[2])
    return [*cut, as_text(rest)]


def cut_long(line: bytes) -> tuple[list[str], bytes]:
    """Marked pieces of a long line, never in the middle of a character, and what is left."""
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
