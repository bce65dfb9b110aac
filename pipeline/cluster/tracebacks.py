"""Python's tracebacks in what ranks say: kept off the terminal while they come, shortened where one is told. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pipeline.core.specs import LogLine

_BEGIN = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")
_SAID = ("paceline: WARNING: ", "paceline: note: ")
_EXPLAINED = "paceline: error: "  # trainers.entry's, and the last that a rank says
_LINK = re.compile(r"During handling of the above|The above exception was the direct cause")
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line ')
_PLUMBING = (
    "trainers/training/", "trainers/classifier.py", "trainers/entry.py", "trainers/core/targets.py",
    "trainers/models/__init__.py", "trainers/models/own.py", "trainers/optimizers/__init__.py",
    "trainers/optimizers/own.py", "trainers/optimizers/torch_classes.py",
)  # fmt: skip


def is_for_a_person(line: LogLine) -> bool:
    """A rank's line, or what trainers.script.start says to the user; torchrun's own talk stays in the log file."""
    return line.rank is not None or line.text.startswith(_SAID)


class Tracebacks:
    """Passes the lines of ranks on, but for the tracebacks that end a rank.

    Each of eight ranks prints its own, and the first of them is the error that the attempt ends with. A rank that says
    something else after its traceback has caught the exception: then the traceback is shown after all.

    Args:
        show: takes each line that a person is to see.
    """

    def __init__(self, show: Callable[[LogLine], None]) -> None:
        self._show = show
        self._held: dict[tuple[str, int | None], list[LogLine]] = {}

    def add(self, line: LogLine) -> None:
        """The next line of a rank."""
        who = (line.host, line.rank)
        held = self._held.get(who, [])
        begins = _BEGIN.match(line.text) or line.text.startswith(_EXPLAINED)
        if begins or (held and _goes_on(held, line.text)):
            self._held[who] = [*held, line]
            return
        if held and not _is_uncaught(held):
            self._release(who)
        self._show(line)

    def release(self) -> None:
        """Show what is held back: the attempt has ended well."""
        for who in [*self._held]:
            self._release(who)

    def _release(self, who: tuple[str, int | None]) -> None:
        for line in self._held.pop(who):
            self._show(line)


def _is_uncaught(held: list[LogLine]) -> bool:
    """torch marks each line of an exception that nobody has caught with the rank."""
    return held[0].text.startswith(("[rank", _EXPLAINED))


def _goes_on(held: list[LogLine], text: str) -> bool:
    """Whether ``text`` belongs to the traceback or the error whose lines are ``held``."""
    if held[0].text.startswith(_EXPLAINED):
        return True
    if _is_uncaught(held):
        return text.startswith(f"{held[0].text.partition(':')[0]}:")
    return text.startswith(" ") or not text or bool(_LINK.match(text)) or held[-1].text.startswith(" ")


def without_message(traceback: str, message: str) -> str:
    """A traceback without its last lines, which repeat the message behind the module of the exception's class."""
    frames = traceback.rstrip().removesuffix(message.rstrip())
    return re.sub(r"(?:^|(?<=\n))[\w.<>]+\.\Z", "", frames)


def shortened(traceback: str, folder: str) -> str:
    """A traceback with the frames of a person's own code and the one in which it was raised.

    Args:
        folder: name of the run's folder on the node; the snapshot of the code in it, or a script's own copy of that,
            stands for the project's folder.
    """
    code = rf'(?<=  File ")[^"\n]*/{re.escape(folder)}/(?:work/node\d+/)?code/'
    text = re.sub(code, "", traceback.rstrip()) if folder else traceback
    blocks = list(_blocks(text))
    own = [path for path, _ in blocks if path and not path.startswith("/")]
    mine = [path for path in own if not path.startswith(_PLUMBING)] or own
    kept = [
        lines
        for (path, lines), (after, _) in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if not path or path in mine or (not after and not path.startswith(_PLUMBING))
    ]
    return "\n".join(kept)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each frame with its path, and what stands between frames without one."""
    path, lines = "", list[str]()
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found or not line.startswith("    "):
            if lines:
                yield path, "\n".join(lines)
            path, lines = found["path"] if found else "", []
        lines.append(line)
    if lines:
        yield path, "\n".join(lines)
