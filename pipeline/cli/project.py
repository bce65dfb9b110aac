"""What a project's dodo.py imports: doit's tasks are the verbs of ``pipeline.cli.verbs``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.cli import tasks
from pipeline.cli.verbs import VERBS

__all__ = ["DOIT_CONFIG", "task_verbs"]

DOIT_CONFIG = {"default_tasks": ["_overview"], "action_string_formatting": "new"}


def task_verbs() -> Iterator[dict[str, Any]]:
    """Return a task for each verb, and an overview, because a bare `doit` starts nothing."""
    yield tasks.overview()
    for name, verb in VERBS.items():
        yield tasks.of_verb(name, verb)
