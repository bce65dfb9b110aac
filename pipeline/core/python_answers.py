"""What only an import can say, from a process of its own: the controller never imports torch or a user's module."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core import process
from pipeline.core.errors import PacelineError

_BEGIN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an import prints is no part of the answer
request = json.loads(sys.argv[1])
"""


def python_answer(
    program: str, request: object, *, timeout_s: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Any:
    """Run the text of a Python program in this interpreter; what it wrote as JSON to ``answers``.

    Args:
        program: finds ``request`` under that name, and json, os and sys imported.
        env: its whole environment; None: that of this process.

    Raises:
        PacelineError: the last line of its traceback, or that it was still running after ``timeout_s``.
    """
    argv = [sys.executable, "-B", "-c", _BEGIN + program, json.dumps(request)]
    done = process.run(argv, timeout_s=timeout_s, env=env, cwd=cwd)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise PacelineError(done.why.splitlines()[-1]) from None
