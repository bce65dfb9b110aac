"""The process that makes evaluation reports: ``python -m pipeline.evaluation RUN_DIR MADE_OF`` for one run.

MADE_OF is JSON with the digests of what the report is made of (``stored_report.made_of``). The caller computes it
before: if the code is edited meanwhile, the report counts as out of date. With ``--serve``, for a sweep, each line on
stdin is a request in JSON (``id``, ``run_dir``, ``made_of``), answered by a line with ``id`` and ``error``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import PacelineError
from pipeline.core.processes import unexpected
from pipeline.core.processes.process import BESIDE, set_priority


def _imported_evaluate() -> Callable[[Path, Mapping[str, Any]], object]:
    # late imports: this process's priority, error handling and output streams are set before
    import sklearn.metrics  # noqa: F401  (evaluate would import it when the first trial has ended)

    from pipeline.evaluation.report import evaluate

    return evaluate


def serve() -> int:
    """Make the reports of a sweep's trials one after another. Imports are done before the first request comes."""
    set_priority(os.getpid(), BESIDE)  # the next trial is training meanwhile
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with answers
    evaluate = _imported_evaluate()
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
    unexpected.keep_tracebacks_in(Path(sys.argv[1]).absolute().parent)
    try:
        _imported_evaluate()(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except (PacelineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
