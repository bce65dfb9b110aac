"""``python -m pipeline.evaluation RUN_DIR MADE_OF`` makes the report of a run in a process of its own.

MADE_OF is a JSON object that the report keeps, taken before: an edit meanwhile makes the report stale. ``--serve``
does it for each run folder that stdin names, a line each, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import PacelineError
from pipeline.core.processes import unexpected
from pipeline.core.processes.priority import give_way

Evaluate = Callable[[Path, Mapping[str, Any]], object]


def _evaluate() -> Evaluate:
    # not before: this process's priority, its error handling and where its output goes are settled first
    from pipeline.evaluation.report import evaluate

    return evaluate


def serve() -> int:
    """The trials of a sweep one after another: only the first waits for the imports."""
    give_way()  # the next trial is training meanwhile
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    evaluate = _evaluate()  # now, before the first trial has ended
    for line in sys.stdin:
        try:
            request = json.loads(line)
            evaluate(Path(request["run_dir"]), request["made_of"])
            error = None
        except (PacelineError, OSError) as failure:
            error = str(failure)
        print(json.dumps({"id": json.loads(line)["id"], "error": error}), file=answers, flush=True)
    return 0


def main() -> int:
    unexpected.install()
    if sys.argv[1:] == ["--serve"]:
        return serve()
    unexpected.keep_in(Path(sys.argv[1]).absolute().parent)
    try:
        _evaluate()(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except (PacelineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
