"""Tracebacks of ranks: held back from the screen while they come, and shortened to the user's own code. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pipeline.cluster.events import LogLine

STARTER_LINES = ("paceline: WARNING: ", "paceline: note: ")
"""Beginnings of the lines of trainers.script.start, which starts the ranks of a script."""
_ERROR_LINE = "paceline: error: "  # printed by trainers.entry as a rank's last line
_TRACEBACK_HEAD = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")
_CHAIN = re.compile(r"During handling of the above|The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line ')
_OUR_FILES = (
    "trainers/training/", "trainers/classifier.py", "trainers/entry.py", "trainers/core/options.py",
    "trainers/models/__init__.py", "trainers/models/own.py", "trainers/optimizers/__init__.py",
    "trainers/optimizers/own.py", "trainers/optimizers/torch_classes.py",
)  # fmt: skip


def is_worth_showing(line: LogLine) -> bool:
    """True for a rank's line, and for messages of trainers.script.start; torchrun's own lines stay in the log file."""
    return line.rank is not None or line.text.startswith(STARTER_LINES)


class HeldTracebacks:
    """Passes on the lines of ranks, but holds back a traceback at the end of a rank's output.

    Otherwise each of eight ranks would print its own, and the attempt's error shows the first one anyway. If a rank
    prints more lines, it has caught the exception, and the held lines are shown.

    Args:
        show: takes each line for the user.
    """

    def __init__(self, show: Callable[[LogLine], None]) -> None:
        self._show = show
        self._held: dict[tuple[str, int | None], list[LogLine]] = {}  # by host and rank

    def add(self, line: LogLine) -> None:
        """Take the next line of a rank."""
        source = (line.host, line.rank)
        held = self._held.get(source, [])
        begins = _TRACEBACK_HEAD.match(line.text) or line.text.startswith(_ERROR_LINE)
        if begins or (held and _belongs_to(held, line.text)):
            self._held[source] = [*held, line]
            return
        if held and not _ends_the_rank(held):
            self._show_held(source)
        self._show(line)

    def release(self) -> None:
        """Show the lines that are held back, after the attempt has succeeded."""
        for source in [*self._held]:
            self._show_held(source)

    def _show_held(self, source: tuple[str, int | None]) -> None:
        for line in self._held.pop(source):
            self._show(line)


def _ends_the_rank(held: list[LogLine]) -> bool:
    """Return whether nothing can have caught the exception.

    torch writes ``[rank0]:`` in front of such a traceback, trainers.entry prints such an error as the last line.
    """
    return held[0].text.startswith(("[rank", _ERROR_LINE))


def _belongs_to(held: list[LogLine], text: str) -> bool:
    """Return whether a line continues the traceback or the error whose lines are ``held``."""
    if held[0].text.startswith(_ERROR_LINE):
        return True
    if _ends_the_rank(held):
        return text.startswith(f"{held[0].text.partition(':')[0]}:")
    return text.startswith(" ") or not text or bool(_CHAIN.match(text)) or held[-1].text.startswith(" ")


def without_message(traceback: str, message: str) -> str:
    """Return a traceback without its last lines, which repeat the error's message."""
    frames = traceback.rstrip().removesuffix(message.rstrip())
    return re.sub(r"(?:^|(?<=\n))[\w.<>]+\.\Z", "", frames)


def shortened(traceback: str, folder: str) -> str:
    """Return a traceback with only the frames of the user's code and the frame that raised the error.

    ``folder``: name of the run's folder on the node; paths below its code snapshot become relative to the project.
    """
    snapshot = rf'(?<=  File ")[^"\n]*/{re.escape(folder)}/(?:work/node\d+/above/above/)?code/'
    blocks = list(_blocks(re.sub(snapshot, "", traceback.rstrip()) if folder else traceback))
    in_snapshot = [path for path, _ in blocks if path and not path.startswith("/")]
    of_user = [path for path in in_snapshot if not path.startswith(_OUR_FILES)] or in_snapshot
    kept = []
    for number, (path, lines) in enumerate(blocks):
        raised_the_error = number + 1 == len(blocks) or not blocks[number + 1][0]
        if not path or path in of_user or (raised_the_error and not path.startswith(_OUR_FILES)):
            kept.append(lines)
    return "\n".join(kept)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each frame with its path, and the text between frames with ''."""
    path, lines = "", list[str]()
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame or not line.startswith("    "):
            if lines:
                yield path, "\n".join(lines)
            path, lines = frame["path"] if frame else "", []
        lines.append(line)
    if lines:
        yield path, "\n".join(lines)
