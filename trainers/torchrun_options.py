"""Read torchrun's options with torch's own parser. pipeline.config.overrides.torchrun_line runs the text of this file
in another process, because the controller doesn't import torch."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from torch.distributed.run import get_args_parser

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=")


def answer(words: list[str]) -> dict[str, Any]:
    """Sort the words behind ``torchrun``: ``error`` of torch's parser, or ``options`` that differ from its defaults,
    ``overrides`` for Hydra, Paceline's own ``cluster`` and ``sweep``, ``script`` and ``args``.
    """
    parser = get_args_parser()
    parser.prog = "torchrun"
    parser.add_argument("--cluster")
    parser.add_argument("--sweep", action="append", default=[])
    overrides: list[str] = []
    while True:
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                parsed = vars(parser.parse_args(words))
        except SystemExit:
            return {"error": stderr.getvalue().strip().rpartition("error: ")[2]}
        script, args = parsed.pop("training_script"), parsed.pop("training_script_args")
        if not _OVERRIDE.match(script):
            break
        overrides.append(script)
        del words[len(words) - len(args) - 1]
    own = {name: parsed.pop(name) for name in ("cluster", "sweep")}
    options = {name: value for name, value in parsed.items() if value != parser.get_default(name)}
    return {**own, "options": options, "overrides": overrides, "script": script, "args": args}
