"""doit's database plug-in: kept for one command, in memory. What is finished is read from run folders."""

from __future__ import annotations

from typing import Any


class MemoryDB:
    """What doit asks of a database (its documentation, "Plugins: backend"). Nothing is opened and nothing written."""

    def __init__(self, name: str, codec: Any, *, module_name: str | None = None) -> None:
        self.name = name
        self._tasks: dict[str, dict[str, Any]] = {}

    def get(self, task: str, field: str) -> Any:
        return self._tasks.get(task, {}).get(field)

    def set(self, task: str, field: str, value: Any) -> None:
        self._tasks.setdefault(task, {})[field] = value

    def in_(self, task: str) -> bool:
        return task in self._tasks

    def remove(self, task: str) -> None:
        self._tasks.pop(task, None)

    def remove_all(self) -> None:
        self._tasks.clear()

    def dump(self) -> None:
        """doit has ended."""
