"""`doit config`: the composed configuration, each value with where it comes from."""

from __future__ import annotations

from pipeline.cli.output import say_log
from pipeline.cli.session import session


def config() -> None:
    from pipeline.config import origins

    say_log(origins.text(origins.values(session().asked.overrides)))
