"""The output of verbs: text, or with ``--json`` (``json=1``) JSON on stdout and text for users on stderr.

The answer is one object, ``{"schema": "paceline.VERB/1", "ok": true, "data": …, "error": null}``; after an error ``ok``
is false and ``error`` holds ``code``, ``message`` and ``hint``. Verbs that train also print a line for each event while
they work, ``{"schema": "paceline.event/1", "event": "metrics", …}``. docs/json.md describes the data.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any, TextIO

from pipeline.cli.invocation import QUIET, as_typed, is_wanted, verbosity
from pipeline.cli.verbs import VERBS
from pipeline.cluster.events import MetricsLine
from pipeline.core import masking
from pipeline.core.errors import DataError, HostError, Killed, PacelineError, Pruned, TrainingError, UsageError
from pipeline.core.printable import printable_lines, program_lines, takes_colours, without_host
from pipeline.core.processes import unexpected
from pipeline.core.tables import ENDLESS, folded

_UNREAD = "nobody reads this command's output any more"
_GOES_ON = "doit status shows how it stands"


STATE_INKS = {  # state → its colour in terminals (SGR parameter of ECMA-48)
    **dict.fromkeys(("FINISHED", "ACCEPTED", "REPRODUCED"), "32"),
    **dict.fromkeys(("FAILED", "ALTERED"), "31"),
    "KILLED": "33",
    "RUNNING": "36",
}
_INKS = {
    **{f"{state} ": ink for state, ink in STATE_INKS.items()},
    "ERROR: ": "1;31",
    "WARNING: ": "33",
    "warning: ": "33",
}


def inked(text: str, stream: TextIO) -> str:
    """Colour the first word if it is a state and the terminal shows colours."""
    if not takes_colours(stream, os.environ):
        return text
    word = next((word for word in _INKS if text.startswith(word)), None)
    if word is None:
        return text
    return f"\x1b[{_INKS[word]}m{word.rstrip()}\x1b[0m{text[len(word.rstrip()) :]}"


def say(text: str, *, painted: bool = False) -> None:
    """Print lines on stdout at once; foreign text can't move the cursor.

    If the answer is JSON they go to stderr, and into the answer if it has no other data. ``painted``: the text has
    Paceline's own colours.
    """
    text = as_typed(text)
    if wants_json():
        _lines.extend(text.splitlines())
        note(text)
        return
    print(text if painted or not sys.stdout.isatty() else inked(printable_lines(text), sys.stdout), flush=True)


def say_log(text: str) -> None:
    """Print lines of a rank or a step, or configuration values, on stdout; commands in them are left as they are."""
    if wants_json():
        _lines.extend(text.splitlines())
        return
    is_terminal, colours = sys.stdout.isatty(), takes_colours(sys.stdout, os.environ)
    print(program_lines(without_host(text), terminal=is_terminal, colours=colours), flush=True)


def note(text: str) -> None:
    """Print progress and warnings on stderr, so that stdout holds the result alone."""
    text = as_typed(text)
    print(inked(printable_lines(text), sys.stderr) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def say_usual(text: str) -> None:
    """Print a line of the result, except with -v 0."""
    if verbosity() != QUIET or is_wanted(text):
        say(text)


def note_usual(text: str) -> None:
    """Print progress, except with -v 0."""
    if verbosity() != QUIET or is_wanted(text):
        note(text)


def say_folded(text: str) -> None:
    """Print lines for users, folded between words at the terminal's width."""
    say(folded(as_typed(text), width()))  # a longer name may need a fold


def width() -> int:
    """Return the columns of stdout's terminal; without one, lines are not folded."""
    return shutil.get_terminal_size((ENDLESS, 24)).columns if sys.stdout.isatty() else ENDLESS


def outlive_reader(error: BaseException) -> bool:
    """For ``masking.outlive``: if stdout takes no more (``| head -1``, a full disk), say so once and continue."""
    if not unexpected.is_of_output(error):
        return False
    masking.silence(1)
    why = unexpected.error_message(error) if isinstance(error, masking.OutputError) else _UNREAD
    with suppress(OSError):
        print(as_typed(f"{why}; {_GOES_ON}"), file=sys.stderr, flush=True)
    return True


# ---------------------------------------------------------------------------------------------- JSON
_ON = re.compile(r"(?:[a-z]+\.)?json=(?:1|true|yes)|--json(?:=(?:1|true|yes))?", re.IGNORECASE)
_CODES: Sequence[tuple[type[Exception], str]] = (
    (UsageError, "usage"),
    (DataError, "data"),
    (HostError, "hosts"),
    (TrainingError, "training"),
    (Killed, "stopped"),
    (Pruned, "pruned"),
    (PacelineError, "failed"),
)
_answered: list[str] = []
_lines: list[str] = []  # what the command has said so far: the data of a verb that has no other


def begin_answer() -> None:
    """Forget an earlier command of this process."""
    _answered.clear()
    _lines.clear()


def wants_json() -> bool:
    """Whether the command line asks for JSON."""
    return any(_ON.fullmatch(word) for word in sys.argv[1:])


def answer(data: Any, *, error: PacelineError | None = None) -> None:
    """Print the answer of this command, with the ``error`` that ends it; later calls print nothing."""
    _print(data, None if error is None else _described(error))


def refuse(error: BaseException, message: str) -> None:
    """Print the answer of a command that an error ends, if JSON is wanted; ``message`` is the text for users."""
    if wants_json():
        of_defect = {"code": "unexpected", "message": message, "hint": None}
        _print(None, _described(error) if isinstance(error, PacelineError) else of_defect)


def _print(data: Any, error: Mapping[str, str | None] | None) -> None:
    if _answered:
        return
    verb = next((word for word in sys.argv[1:] if word in VERBS or word == "init"), "doit")
    _answered.append(verb)
    print(json.dumps(_finite(_envelope(verb, data, error)), indent=2, ensure_ascii=False), flush=True)


def answer_of_error(verb: str, error: PacelineError) -> dict[str, Any]:
    """Return the answer of a verb that ``error`` ends."""
    return _envelope(verb, None, _described(error))


def _envelope(verb: str, data: Any, error: Mapping[str, str | None] | None) -> dict[str, Any]:
    return {"schema": f"paceline.{verb}/1", "ok": error is None, "data": data, "error": error}


def finish_answer() -> None:
    """Print the answer of a verb that has ended without data of its own: its lines."""
    if wants_json():
        answer({"lines": _lines})


def answer_event(item: Any) -> None:
    """Print an event of a run or a trial on one line."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(item).__name__).lower()
    fields: Any = asdict(item) if is_dataclass(item) and not isinstance(item, type) else {"text": str(item)}
    if isinstance(item, MetricsLine):
        name, fields = "metrics", json.loads(item.text)
    line = {"schema": "paceline.event/1", "event": name, **fields}
    print(json.dumps(_finite(line), ensure_ascii=False, default=str), flush=True)


def _described(error: PacelineError) -> dict[str, str | None]:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
    if isinstance(error, TrainingError):
        code = f"training.{error.cause}"
    return {"code": code, "message": as_typed(error.what), "hint": error.hint and as_typed(error.hint)}


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by the texts "NaN", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
