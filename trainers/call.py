"""``python -m trainers.call JSON``: call the function of a step. Standard library only. The object has ``function``
(``package.module:name``), ``args``, ``inputs`` (paths) and ``out``, a folder."""

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
