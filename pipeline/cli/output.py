"""The output of verbs: text on stdout, or with ``--json`` (``json=1``) JSON there and the text on stderr.

The JSON is one object, the answer (``envelope``). Verbs that train print one line of JSON per event before it.
docs/json.md describes both.
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
from typing import Any, NamedTuple, TextIO

from pipeline.cli.invocation import QUIET, verbosity
from pipeline.cli.verbs import VERBS
from pipeline.cluster.events import MetricsLine
from pipeline.core import masking
from pipeline.core.errors import DataError, HostError, Killed, PacelineError, Pruned, TrainingError, UsageError
from pipeline.core.printable import printable_lines, program_lines, takes_colours, without_host
from pipeline.core.processes import unexpected
from pipeline.core.tables import ENDLESS, folded

COMMAND_VARIABLE = "PACELINE_TYPED"
"""The environment variable that says which command the user typed: ``paceline``; if it isn't set, ``doit``."""
_PROGRAM_LINE = re.compile(r"(?:trial +\d+ \| )?(?:[^\s|]+ |  )\| ")  # a line of a rank, a step or a log
_WARNING_OR_ERROR = re.compile(r"\b(?:warning|error): ", re.IGNORECASE)
STATE_COLOURS = {  # state → its colour in terminals (SGR parameter of ECMA-48)
    **dict.fromkeys(("FINISHED", "ACCEPTED", "REPRODUCED"), "32"),
    **dict.fromkeys(("FAILED", "ALTERED"), "31"),
    "KILLED": "33",
    "RUNNING": "36",
}
_COLOURS = {
    **{f"{state} ": ink for state, ink in STATE_COLOURS.items()},
    "ERROR: ": "1;31",
    "WARNING: ": "33",
    "warning: ": "33",
}


# ---------------------------------------------------------------------------------------------- text
def command() -> str:
    """Return the command that the user types before a verb: ``doit`` or ``paceline``."""
    return os.environ.get(COMMAND_VARIABLE, "doit")


def as_typed(text: str) -> str:
    """Replace `doit VERB` by `paceline VERB`, if the user typed that, except in lines printed by ranks and steps."""
    if command() == "doit":
        return text
    verbs = "|".join([*VERBS, "VERB", "help", "list", "run", "tabcompletion", r"-\w"])
    ours = re.compile(rf"\bdoit (?=(?:{verbs})\b)")
    lines = text.split("\n")
    typed = "\n".join(line if _PROGRAM_LINE.match(line) else ours.sub(f"{command()} ", line) for line in lines)
    return re.sub(rf"\bdoit(?=\n +(?:{verbs})\b)", command(), typed)  # of a wrapped help page


def is_warning(text: str) -> bool:
    """Whether a line holds a warning or an error, which is shown with -v 0 too."""
    return _WARNING_OR_ERROR.search(text) is not None


def coloured(text: str, stream: TextIO) -> str:
    """Colour the first word if it is a state and the terminal shows colours."""
    if not takes_colours(stream, os.environ):
        return text
    word = next((word for word in _COLOURS if text.startswith(word)), None)
    if word is None:
        return text
    return f"\x1b[{_COLOURS[word]}m{word.rstrip()}\x1b[0m{text[len(word.rstrip()) :]}"


def say(text: str, *, folds: bool = False, is_detail: bool = False, is_coloured: bool = False) -> None:
    """Print lines of the result on stdout; with --json on stderr, and they are the answer if it has no other data.

    Args:
        folds: fold the lines at the terminal's width.
        is_detail: don't print with -v 0.
        is_coloured: the text contains colours already; from other text, control characters are removed.
    """
    if is_detail and verbosity() == QUIET:
        return
    text = as_typed(text)
    if folds:
        text = folded(text, width())
    if wants_json():
        _lines.extend(text.splitlines())
        _print_on_stderr(text)
        return
    print(text if is_coloured or not sys.stdout.isatty() else coloured(printable_lines(text), sys.stdout), flush=True)


def say_log(text: str) -> None:
    """Print lines of a rank or a step, or configuration values, on stdout; commands in them are left as they are."""
    if wants_json():
        _lines.extend(text.splitlines())
        return
    is_terminal, colours = sys.stdout.isatty(), takes_colours(sys.stdout, os.environ)
    # in `doit logs` of a run on this computer every line begins with localhost:RANK: the host says nothing, so only a
    # rank other than 0 stays
    print(program_lines(without_host(text), terminal=is_terminal, colours=colours), flush=True)


def note(text: str) -> None:
    """Print progress or a warning on stderr, because stdout is for the result; with -v 0 only warnings."""
    if verbosity() != QUIET or is_warning(text):
        _print_on_stderr(as_typed(text))


def _print_on_stderr(text: str) -> None:
    print(coloured(printable_lines(text), sys.stderr) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def width() -> int:
    """Return the columns of stdout's terminal; without one, lines are not folded."""
    return shutil.get_terminal_size((ENDLESS, 24)).columns if sys.stdout.isatty() else ENDLESS


def outlive_closed_stdout(error: BaseException) -> bool:
    """Say on stderr that stdout takes no more (``| head``, a full disk), and continue; False: it is another error."""
    if not unexpected.is_of_output(error):
        return False
    masking.silence(1)
    nobody_reads = "nobody reads this command's output any more"
    why = unexpected.error_message(error) if isinstance(error, masking.OutputError) else nobody_reads
    with suppress(OSError):
        print(as_typed(f"{why}; doit status shows how it stands"), file=sys.stderr, flush=True)
    return True


# ---------------------------------------------------------------------------------------------- JSON
_ASKS_FOR_JSON = re.compile(r"(?:[a-z]+\.)?json=(?:1|true|yes)|--json(?:=(?:1|true|yes))?", re.IGNORECASE)
_CODES: Sequence[tuple[type[Exception], str]] = (
    (UsageError, "usage"),
    (DataError, "data"),
    (HostError, "hosts"),
    (TrainingError, "training"),
    (Killed, "stopped"),
    (Pruned, "pruned"),
    (PacelineError, "failed"),
)
_EVENT_SCHEMA = "paceline.event/1"
_answered: list[str] = []  # the verb, after its answer is printed
_lines: list[str] = []  # lines printed by ``say``: the data of the answer if the verb gives none


class Failure(NamedTuple):
    """The error in an answer: ``code`` is a word for programs, ``hint`` the command to type next."""

    code: str
    message: str
    hint: str | None

    @classmethod
    def of(cls, error: PacelineError) -> Failure:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        if isinstance(error, TrainingError):
            code = f"training.{error.cause}"
        return cls(code, as_typed(error.what), error.hint and as_typed(error.hint))


def begin_answer() -> None:
    """Forget the output of an earlier command of this process."""
    _answered.clear()
    _lines.clear()


def wants_json() -> bool:
    """Whether the command line asks for JSON."""
    return any(_ASKS_FOR_JSON.fullmatch(word) for word in sys.argv[1:])


def answer(data: Any, *, error: PacelineError | None = None) -> None:
    """Print this command's JSON answer, with ``error`` if the command fails; only the first call prints."""
    _print_answer(data, None if error is None else Failure.of(error))


def answer_with_error(error: BaseException, message: str) -> None:
    """Print the JSON answer of a failed command, if JSON is wanted; ``message``: the text of a foreign error."""
    if wants_json():
        defect = Failure("unexpected", message, None)
        _print_answer(None, Failure.of(error) if isinstance(error, PacelineError) else defect)


def _print_answer(data: Any, failure: Failure | None) -> None:
    if not _answered:
        verb = next((word for word in sys.argv[1:] if word in VERBS or word == "init"), "doit")
        _answered.append(verb)
        print(json.dumps(_finite(envelope(verb, data, failure)), indent=2, ensure_ascii=False), flush=True)


def envelope(verb: str, data: Any, failure: Failure | None) -> dict[str, Any]:
    """Return the JSON object of an answer; every answer has this form."""
    error = None if failure is None else failure._asdict()
    return {"schema": f"paceline.{verb}/1", "ok": error is None, "data": data, "error": error}


def is_event(line: bytes) -> bool:
    """Whether a line of a command's output with --json is an event (``answer_event``)."""
    return line.startswith(f'{{"schema": "{_EVENT_SCHEMA}"'.encode())


def read_envelope(stdout: bytes, exit_code: int | None) -> dict[str, Any]:
    """Return the answer in another command's stdout, behind its events, if any. Raises PacelineError: there is none."""
    lines = stdout.splitlines(keepends=True)
    try:
        answered: dict[str, Any] = json.loads(b"".join(line for line in lines if not is_event(line)))
    except ValueError as error:
        raise PacelineError(f"the command ended with {exit_code} and without an answer") from error
    return answered


def finish_answer() -> None:
    """Print the JSON answer of a verb that has ended; if it has given no data, these are its printed lines."""
    if wants_json():
        answer({"lines": _lines})


def answer_event(event: Any) -> None:
    """Print an event of a run or a trial as one line of JSON."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()  # HostReady → host_ready
    fields: Any = asdict(event) if is_dataclass(event) and not isinstance(event, type) else {"text": str(event)}
    if isinstance(event, MetricsLine):
        name, fields = "metrics", json.loads(event.text)
    line = {"schema": _EVENT_SCHEMA, "event": name, **fields}
    print(json.dumps(_finite(line), ensure_ascii=False, default=str), flush=True)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by the texts "NaN", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
