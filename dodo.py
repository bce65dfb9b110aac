"""The file that doit reads for its tasks: one task per verb of pipeline/cli/verbs.py (`doit train`, `doit runs`, …)."""

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
    """Yield a task for each verb, and one that lists the verbs, which a bare `doit` runs."""
    yield from project.task_verbs()
