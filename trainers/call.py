"""The program that runs the Python function of a step (`doit step`): ``python -m trainers.call JSON``.
Standard library only. The JSON object has ``function`` (``package.module:name``), ``args`` (keyword arguments),
``inputs`` (paths) and ``out`` (the output folder)."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(text: str) -> None:
    """Call ``function(inputs=[Path, …], out=Path, **args)``; an exception ends the process with a traceback."""
    request: dict[str, Any] = json.loads(text)
    module, _, name = str(request["function"]).partition(":")
    function = getattr(import_module(module), name)
    function(inputs=[Path(item) for item in request["inputs"]], out=Path(request["out"]), **request["args"])


if __name__ == "__main__":
    main(sys.argv[1])
