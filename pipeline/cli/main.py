"""The command `paceline`: what `doit` does with the same words, from any folder of a project; and `paceline init`."""

from __future__ import annotations

from pipeline.cli.output import as_typed
from pipeline.core.processes import signals

signals.leave_on_ctrl_c()  # before the other imports, as in pipeline.cli.loader, which comes behind doit's own

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from pipeline.cli import clone, new_project  # noqa: E402
from pipeline.cli.loader import leave  # noqa: E402
from pipeline.cli.output import TYPED  # noqa: E402
from pipeline.core import places  # noqa: E402
from pipeline.core.errors import PacelineError  # noqa: E402


def main() -> int:
    """The exit code is doit's."""
    words = sys.argv[1:]
    os.environ[TYPED] = "paceline"
    try:
        if words[:1] == ["init"]:
            print(new_project.init(words[1:]), flush=True)
            return 0
        here = places.enclosing(Path.cwd())
        if here is None:
            return _without_project(words)
        clone.refuse_another(here)
        clone.start_here()
        os.chdir(places.ROOT)
    except (PacelineError, OSError) as error:
        leave(error)
    from doit.doit_cmd import DoitMain

    code: int = DoitMain().run(words)
    return code


def _without_project(words: list[str]) -> int:
    """Help alone. Raises UsageError."""
    from pipeline.cli import help as pages

    text = pages.asked(words or ["help"])
    if text is None:
        raise clone.no_project()
    text = as_typed(text)
    print(text if words else f"{text}\n\nThere is no project here: {clone.INIT}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
