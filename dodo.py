"""The task creator: doit's tasks are the verbs of pipeline/cli/verbs.py."""

import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    sys.stderr.write(
        "ERROR: doit reads this file, which does nothing by itself\n  try: doit train experiment=quickstart\n"
    )
    raise SystemExit(3)

from pipeline.cli import project

DOIT_CONFIG = project.DOIT_CONFIG


def task_verbs() -> Iterator[dict[str, Any]]:
    """A task for each verb, and one that says what there is (a bare `doit` starts nothing)."""
    yield from project.task_verbs()
