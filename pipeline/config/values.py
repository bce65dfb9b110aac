"""Checks of the values in any section of a configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.core import redact
from pipeline.core.errors import UsageError
from trainers.core.config import ConfigError


def typed(settings: type[Any], raw: Mapping[str, Any]) -> Any:
    """Return an instance of ``settings`` from the values in ``raw`` that are fields of it.

    Other values are left from another launcher's section, if ``cluster.launcher=NAME`` changed only the launcher.

    Raises UsageError: a value that can't work.
    """
    known = {item.name for item in dataclasses.fields(settings)}
    try:
        return settings(**{name: value for name, value in raw.items() if name in known})
    except ConfigError as error:
        raise UsageError(str(error)) from error


def leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in plain containers that is no list or mapping, with its field: ``cluster.hosts[0].name``."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{field}[{at}]")
    else:
        yield field, value


def texts(value: Any) -> Iterator[str]:
    """Yield every text in plain containers, at any depth."""
    return (inner for _, inner in leaves(value) if isinstance(inner, str))


def refuse_unprintable(resolved: Mapping[str, Any]) -> None:
    """Refuse control characters, which no name, path or address can hold. Raises UsageError.

    Texts in ``program.args`` may hold them, and values of ``env`` are checked separately.
    """
    for field, value in _outside_env(resolved):
        if not isinstance(value, str):
            continue
        if not field.startswith("program.args") and any(mark < " " or mark == "\x7f" for mark in value):
            raise UsageError(f"{redact.in_field(field, value)} holds a control character; take it out")
        encodable(field, value)


def refuse_non_finite(resolved: Mapping[str, Any]) -> None:
    """Refuse inf and NaN: no key can be computed from them. Raises UsageError."""
    for field, value in _outside_env(resolved):
        if isinstance(value, float) and not math.isfinite(value):
            if field.startswith("program.args"):
                raise UsageError(
                    f"{field}={value}: what was typed there (12e4567, inf) is read as a number, and no finite one; in "
                    "quotes it reaches the script as it is typed",
                    hint=f"\"{field}='TEXT'\"",
                )
            raise UsageError(f"{field}={value} must be a finite number")


def _outside_env(resolved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((field, value) for field, value in leaves(resolved) if "env" not in field.split("."))


def encodable(field: str, value: str) -> None:
    """Refuse a text that can't be encoded as UTF-8. Raises UsageError."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{field} is not text: it holds bytes that are not UTF-8") from error
