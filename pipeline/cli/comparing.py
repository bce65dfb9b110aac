"""`doit compare`: what differs between runs, and which differences are larger than the spread over seeds."""

from __future__ import annotations

import json
import shutil

from pipeline.cli.choosing import chosen
from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import session
from pipeline.core.errors import UsageError, suggestion


def compare() -> None:
    """Raises UsageError: no run is meant, or none has a metric that was asked for."""
    from pipeline.comparing import tables
    from pipeline.comparing.differing import compare as compared
    from pipeline.comparing.groups import grouped, metrics_of

    current = session()
    options = current.asked.options
    groups = grouped(chosen(current, current.asked.paths))
    wanted = [name for name in options.get("metric", "").split(",") if name]
    known = metrics_of(groups)
    for name in wanted:
        if name not in known:
            raise UsageError(f"metric={name}: none of these runs has it; {suggestion(name, known)}")
    found = compared(groups, wanted)
    if is_on(options, "json"):
        say(json.dumps(tables.as_json(found), indent=2, allow_nan=False))
    elif is_on(options, "markdown"):
        say(tables.markdown(found))
    else:
        say(tables.text(found, shutil.get_terminal_size().columns))
