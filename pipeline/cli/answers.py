"""JSON answers: with ``--json`` (or ``json=1``) a verb prints JSON on stdout, and text for users on stderr.

The answer is one object, ``{"schema": "paceline.VERB/1", "ok": true, "data": …, "error": null}``; after an error ``ok``
is false and ``error`` holds ``code``, ``message`` and ``hint``. Verbs that train also print a line for each event while
they work, ``{"schema": "paceline.event/1", "event": "metrics", …}``. docs/json.md describes the data.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from pipeline.cli.invocation import as_typed
from pipeline.cli.verbs import VERBS
from pipeline.cluster.events import MetricsLine
from pipeline.core.errors import DataError, HostError, Killed, PacelineError, Pruned, TrainingError, UsageError

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
LINES: list[str] = []
"""What the command has said so far: the data of a verb that has no other, as ``{"lines": […]}``."""


def begin() -> None:
    """Forget an earlier command of this process."""
    _answered.clear()
    LINES.clear()


def wanted() -> bool:
    """Whether the command line asks for JSON."""
    return any(_ON.fullmatch(word) for word in sys.argv[1:])


def answer(data: Any, *, error: PacelineError | None = None) -> None:
    """Print the answer of this command, with the ``error`` that ends it; later calls print nothing."""
    _print(data, None if error is None else _described(error))


def refuse(error: BaseException, message: str) -> None:
    """Print the answer of a command that an error ends, if JSON is wanted; ``message`` is the text for users."""
    if wanted():
        unexpected = {"code": "unexpected", "message": message, "hint": None}
        _print(None, _described(error) if isinstance(error, PacelineError) else unexpected)


def _print(data: Any, error: Mapping[str, str | None] | None) -> None:
    if _answered:
        return
    verb = next((word for word in sys.argv[1:] if word in VERBS or word == "init"), "doit")
    _answered.append(verb)
    print(json.dumps(_finite(_envelope(verb, data, error)), indent=2, ensure_ascii=False), flush=True)


def of_error(verb: str, error: PacelineError) -> dict[str, Any]:
    """Return the answer of a verb that ``error`` ends."""
    return _envelope(verb, None, _described(error))


def _envelope(verb: str, data: Any, error: Mapping[str, str | None] | None) -> dict[str, Any]:
    return {"schema": f"paceline.{verb}/1", "ok": error is None, "data": data, "error": error}


def finish() -> None:
    """Print the answer of a verb that has ended without data of its own: its lines."""
    if wanted():
        answer({"lines": LINES})


def event(item: Any) -> None:
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
