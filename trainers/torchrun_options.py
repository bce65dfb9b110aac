"""The reader of torchrun's options for `doit torchrun`, by torch's own parser. The controller doesn't import torch, so
``pipeline.config.overrides.torchrun_line`` runs the text of this file in another process."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from torch.distributed.run import get_args_parser

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=")  # of Hydra, such as cluster.hosts=[a,b]


def answer(words: list[str]) -> dict[str, Any]:
    """Sort the words behind ``torchrun``; ``words`` is changed. Returns ``{"error": message of torch's parser}``, or
    ``options`` (those that differ from torchrun's defaults), ``overrides`` (for Hydra), ``script`` with its ``args``,
    and the values of Paceline's own ``cluster`` and ``sweep``.
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
        # torch's parser takes the first word that is no option for the script: this one is an override, so take it
        # out and parse again
        overrides.append(script)
        del words[len(words) - len(args) - 1]
    of_paceline = {name: parsed.pop(name) for name in ("cluster", "sweep")}
    options = {name: value for name, value in parsed.items() if value != parser.get_default(name)}
    return {**of_paceline, "options": options, "overrides": overrides, "script": script, "args": args}
