"""Merge the output of a node's ranks and of torchrun into one log, with secrets masked.

torchrun writes the output of each rank to files of its own. The supervisor calls ``NodeOutput.merge`` several times a
second, which appends what is new to the file ``log``. Agents that follow the run send that file to the controller.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable

from trainers.contract.run_folder import UNFINISHED

from ..node import RANK_OUTPUTS
from ..requests import NodeStart
from .rank_ends import EarlyExits, RankExit

LONGEST_LINE_BYTES = 65536
LONGEST_TOKEN_BYTES = 8192  # of a secret that is recognised by its form, such as a token of GitHub
BAR_S = 30.0  # between two lines that show the state of a progress bar
CUT = " [cut: the line is longer, it goes on below]"
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_KEPT_LINES = 40  # last lines of torchrun that are kept in memory
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")  # printed by torchrun
_SCRIPT_ENDED = re.compile(r"paceline: error: .* ended with exit code (\d+)")  # of trainers.script.start


class NodeOutput:
    """Merges the files of this node's ranks into ``log``: lines ``RANK | text``, and ``- | text`` of torchrun."""

    def __init__(self, node: NodeStart, rules: Rules, early_exits: EarlyExits) -> None:
        self._node, self._rules, self._early_exits = node, rules, early_exits
        self.torchrun_log = os.path.join(node.state_dir, "torchrun.log")
        self._torchrun_tail = Tail(self.torchrun_log, rules)
        self._rank_tails: dict[str, tuple[int, Tail]] = {}  # output file → rank and its new lines
        self.last_lines: list[str] = []  # of torchrun
        self.exits: dict[int, RankExit] = {}  # by local rank, as torchrun reports them
        self.script_code = 0  # exit code of a script without torchrun; 0: unknown

    def merge(self, own_lines: list[str], *, last: bool = False) -> bool:
        """Append new output and lines of the agent's own to the log; return whether there were any. Raises OSError."""
        # each rank has two files, stdout and stderr, which torchrun creates some time after its start
        if len(self._rank_tails) < 2 * self._node.nproc_per_node or last:
            self._find_rank_outputs()
        rows = [f"{rank} | {text}" for rank, tail in self._rank_tails.values() for text in tail.lines(last)]
        rows += [f"- | {text}" for text in own_lines]
        for text in self._torchrun_tail.lines(last):
            rows.append(f"- | {text}")
            self._read_torchrun_line(text)
        if rows:
            with open(os.path.join(self._node.state_dir, "log"), "a", encoding="utf-8") as log:
                log.write("\n".join(rows) + "\n")
        return bool(rows)

    def _read_torchrun_line(self, text: str) -> None:
        self.last_lines = [*self.last_lines, text][-_KEPT_LINES:]
        self._early_exits.read(text)
        if ended := _SCRIPT_ENDED.fullmatch(text):
            self.script_code = int(ended[1])
        if failed := _FAILED.search(text):
            self.exits.setdefault(int(failed[2]), RankExit(code=int(failed[1]), unix_time=time.time()))

    def _find_rank_outputs(self) -> None:
        # until torchrun creates the folder, this check is cheaper than a search with a pattern
        if not os.path.isdir(os.path.join(self._node.state_dir, "ranks")):
            return
        for path in glob.glob(os.path.join(glob.escape(self._node.state_dir), RANK_OUTPUTS)):
            if path not in self._rank_tails:
                local_rank = int(os.path.basename(os.path.dirname(path)))
                tail = Tail(path, self._rules, shows_bars=local_rank == 0)  # the other ranks' bars show the same
                self._rank_tails[path] = (self._node.first_rank + local_rank, tail)


class Rules:
    """The rules (pattern, text to show) for masking secrets, of which none is longer than ``longest_bytes``."""

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        self._rules = [(re.compile(pattern), shown) for pattern, shown in rules]
        lengths = [len(pattern.pattern.encode()) for pattern, _ in self._rules]
        self.longest_bytes = max([LONGEST_TOKEN_BYTES, *lengths]) if lengths else 0

    def hide(self, text: str) -> str:
        """Mask secrets. If a secret has escape codes of colours inside, remove all colours of the text."""
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
        while moved:  # the position before one secret may lie in the middle of another
            moved = False
            for pattern, _ in self._rules:
                for match in pattern.finditer(text):
                    if match.start() < at < match.end():
                        at, moved = match.start(), True
        return at


class Tail:
    """Reads a growing file as complete masked lines. ``shows_bars``: with a progress bar's state each ``BAR_S``."""

    def __init__(self, path: str, rules: Rules | None = None, *, shows_bars: bool = False) -> None:
        self.path = path
        self._shows_bars, self._last_at = shows_bars, time.monotonic()
        self.rules = Rules() if rules is None else rules
        self.offset = 0  # bytes that were read
        self._rest = b""  # the unfinished line at the end of them

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the previous call, cut if they are too long. ``last``: nothing is written any more."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            data = b""
        self.offset += len(data)
        *whole_lines, rest = (self._rest + data).split(b"\n")
        texts = [text for line in whole_lines for text in in_pieces(self.masked(line))]
        # an unfinished line is held back until it ends, as it may end in the middle of a secret; three exceptions
        if last and len(data) < 1 << 20:  # the file has been read to its end
            texts += in_pieces(self.masked(rest)) if rest else []
            rest = b""
        elif len(rest) > LONGEST_LINE_BYTES + self.rules.longest_bytes:  # too long to be kept in memory
            states, carriage_return, unfinished = rest.rpartition(b"\r")
            if carriage_return:  # a progress bar that never ends its line: return its last complete state
                texts += in_pieces(self.masked(states))
                rest = unfinished
            pieces, rest = self._cut_unfinished(rest)
            texts += pieces
        elif not texts and self._shows_bars and time.monotonic() - self._last_at > BAR_S:
            states, _, unfinished = rest.rpartition(b"\r")
            if states.strip():
                texts = [text + UNFINISHED for text in in_pieces(self.masked(states))]
                rest = unfinished
        self._last_at = time.monotonic() if texts else self._last_at
        self._rest = rest
        return texts

    def _cut_unfinished(self, line: bytes) -> tuple[list[str], bytes]:
        """Return (pieces of the line, rest): the rest is so long that it holds any secret which has begun."""
        text = line.decode("utf-8", "surrogateescape")
        at = self.rules.cut_before(text, len(text) - self.rules.longest_bytes - 4)  # 4: a character may be cut there
        if len(line) <= LONGEST_LINE_BYTES or at <= 0:
            return [], line
        pieces, last_piece = cut_long(self.masked(text[:at].encode("utf-8", "surrogateescape")))
        return [*pieces, as_text(last_piece) + CUT], text[at:].encode("utf-8", "surrogateescape")

    def masked(self, line: bytes) -> bytes:
        """Return the line with secrets masked; bytes that aren't UTF-8 stay as they are (``as_text`` replaces them)."""
        return self.rules.hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def in_pieces(line: bytes) -> list[str]:
    """Split a line into bounded pieces; of a progress bar only what follows the last carriage return counts."""
    pieces, last_piece = cut_long(line.rstrip(b"\r").rpartition(b"\r")[2])
    return [*pieces, as_text(last_piece)]


def cut_long(line: bytes) -> tuple[list[str], bytes]:
    """Return (pieces of a long line that end with ``CUT``, rest), never splitting a character."""
    texts = []
    while len(line) > LONGEST_LINE_BYTES:
        end = LONGEST_LINE_BYTES
        while end > LONGEST_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:  # a further byte of a UTF-8 character
            end -= 1
        texts.append(as_text(line[:end]) + CUT)
        line = line[end:]
    return texts, line


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")
