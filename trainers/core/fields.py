"""What the settings of the built-in trainer and of a script share. A script's key holds this module, and not config."""

from __future__ import annotations

LATER = {"later": True}
"""Metadata of a field that was added later: at its default it is left out of the run key, so older keys stay valid."""


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
