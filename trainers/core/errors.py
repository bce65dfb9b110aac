"""Errors, and checks of single values, for the settings of the built-in trainer and of scripts. They stand apart from
``trainers.core.config``, so that the key of a script's run covers this module only."""

from __future__ import annotations

import re
import shlex
import sys
import sysconfig
from dataclasses import fields
from pathlib import Path
from typing import Any

KEYED_UNLESS_DEFAULT = {"later": True}
"""Metadata of a field that was added later: at its default it is left out of the run key, so older keys stay valid."""

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the field, the value and the valid values."""


def choice(name: str, value: str, options: tuple[str, ...]) -> None:
    """Raise ConfigError if the value of the field ``name`` is none of ``options``."""
    if value not in options:
        raise ConfigError(f"{name}={value!r} is not an option; choose one of: {', '.join(options)}")


def at_least(name: str, value: float, low: float) -> None:
    """Raise ConfigError if the value of the field ``name`` is below ``low``."""
    if value < low:
        raise ConfigError(f"{name}={value} must be at least {low}")


def below_one(name: str, value: float) -> None:
    """Raise ConfigError if the value of the field ``name`` lies outside of [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} must lie in [0, 1)")


def check_target(name: str, value: str) -> None:
    """Raise ConfigError if the value of the field ``name`` is not of the form ``package.module:name``."""
    if not value:
        raise ConfigError(f"{name} is missing: a class or function of your own, as in {name}=my_package.parts:MyName")
    if not _TARGET.fullmatch(value):
        raise ConfigError(f"{name}={value!r} must be MODULE:NAME, as in my_package.parts:MyName")


def image_sides(name: str, value: Any) -> tuple[int, int] | None:
    """Return (height, width) in pixels for ``224`` or ``[224, 320]``, and None for null. Raises ConfigError."""
    sides = value if isinstance(value, list | tuple) else [value, value]
    if value is None:
        return None
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise ConfigError(f"{name}={value!r} must be a number of pixels, as in {name}=224, or [height,width]")
    return sides[0], sides[1]


def later_fields(settings: type[Any]) -> dict[str, Any]:
    """Return name → default of the fields marked with ``KEYED_UNLESS_DEFAULT``."""
    later = [item for item in fields(settings) if item.metadata == KEYED_UNLESS_DEFAULT]
    return {item.name: item.default_factory() if callable(item.default_factory) else item.default for item in later}


class TrainerError(Exception):
    """Training cannot start or continue. The message says what failed, the value seen and what would work."""


def install(what: str) -> str:
    """Return the shell command that installs ``what`` into this interpreter's environment, by pip if it has pip."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {what}" if _has_pip() else f"uv pip install --python {python} {what}"


def _has_pip() -> bool:
    # look for the folder: a search by importlib would let setuptools replace distutils in this process
    return Path(sysconfig.get_path("purelib"), "pip").is_dir()
