"""doit's command that runs tasks, with the databases and reporters of doit and pyproject.toml."""

from __future__ import annotations

from typing import Any

from doit import reporter
from doit.cmd_run import Run as RunOfDoit
from doit.dependency import DbmDB, JsonDB, SqliteDB
from doit.plugin import PluginEntry

_BACKENDS = {"dbm": DbmDB, "json": JsonDB, "sqlite3": SqliteDB}
_REPORTERS = {
    "console": reporter.ConsoleReporter,
    "executed-only": reporter.ExecutedOnlyReporter,
    "json": reporter.JsonReporter,
    "zero": reporter.ZeroReporter,
    "error-only": reporter.ErrorOnlyReporter,
}


class Run(RunOfDoit):  # type: ignore[misc]  # doit has no type hints
    """By doit's plug-in interface (in pyproject.toml) it replaces doit's own, which goes through all distributions that
    are installed for further databases, and again for reporters: a twentieth of the time of a finished run."""

    def get_backends(self) -> dict[str, Any]:
        return self._with_own("backend", _BACKENDS)

    def get_reporters(self) -> dict[str, Any]:
        return self._with_own("reporter", _REPORTERS)

    def _with_own(self, option: str, found: dict[str, Any]) -> dict[str, Any]:
        """Also the plug-ins that pyproject.toml names; the option takes all of them."""
        category = option.upper()
        own = self.config.get(category, {})
        found = {**found, **{name: PluginEntry(category, name, place).get() for name, place in own.items()}}
        self.cmdparser[option].choices = {name: getattr(one, "desc", "") for name, one in found.items()}
        return found
