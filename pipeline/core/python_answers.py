"""What only an import can say, from a process of its own: the controller never imports torch or a user's module."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core import process
from pipeline.core.errors import PacelineError

_RUN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an import prints is no part of the answer
json.dump(answer(json.loads(sys.argv[1])), answers)
answers.close()
os._exit(0)  # whatever threads an import has started
"""


def python_answer(
    program: str, request: object, *, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Any:
    """Run the text of a Python program in this interpreter, and return what its ``answer(request)`` returns, as JSON.

    Args:
        env: its whole environment; None: that of this process.

    Raises:
        PacelineError: the last line of its traceback, or that it was still running after ``timeout_s``.
    """
    argv = [sys.executable, "-B", "-c", program + _RUN, json.dumps(request)]
    done = process.run(argv, timeout_s=timeout_s, env=env, cwd=cwd)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise PacelineError(done.why.splitlines()[-1]) from None
