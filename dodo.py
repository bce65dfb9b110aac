"""The task creator: doit's tasks are the verbs of pipeline/cli/verbs.py."""

from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    raise SystemExit(
        "ERROR: doit reads this file, which does nothing by itself\n  try: doit train experiment=quickstart"
    )

from pipeline.cli import project

DOIT_CONFIG = project.DOIT_CONFIG


def task_verbs() -> Iterator[dict[str, Any]]:
    """A task for each verb, and one that says what there is (a bare `doit` starts nothing)."""
    yield from project.task_verbs()
