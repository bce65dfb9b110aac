"""The command `paceline`: the same as `doit`, from any folder of a project; and `paceline init`."""

from __future__ import annotations

from pipeline.core.processes import signals

signals.leave_on_ctrl_c()  # before the other imports, as in pipeline.cli.loader, which comes behind doit's own

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from doit.doit_cmd import DoitMain  # noqa: E402

from pipeline.cli import clone, new_project  # noqa: E402
from pipeline.cli import help as pages  # noqa: E402
from pipeline.cli.invocation import HELP_WORDS  # noqa: E402
from pipeline.cli.loader import leave  # noqa: E402
from pipeline.cli.output import TYPED, answer, as_typed, wants_json  # noqa: E402
from pipeline.core import places  # noqa: E402
from pipeline.core.errors import PacelineError, UsageError  # noqa: E402


def main() -> int:
    """Run a command; the exit code is doit's."""
    words = sys.argv[1:]
    os.environ[TYPED] = "paceline"
    try:
        if words[:1] == ["init"]:
            message = new_project.init(words[1:])
            if wants_json():
                answer({"lines": message.splitlines()})
            else:
                print(message, flush=True)
            return 0
        project = places.enclosing(Path.cwd())
        if project is None:
            return _without_project(words)
        try:
            clone.refuse_other_code(project)
        except UsageError:
            if HELP_WORDS.isdisjoint(words[:1]) or pages.requested(words) is None:
                raise
            return _without_project(words)
        clone.remember_typed_in()
        os.chdir(places.ROOT)
    except (PacelineError, OSError) as error:
        leave(error)
    code: int = DoitMain().run(words)
    return code


def _without_project(words: list[str]) -> int:
    """Answer outside of a project, or in another clone's folder: help alone. Raises UsageError."""
    text = pages.requested(words or ["help"])
    if text is None:
        raise clone.no_project()
    text = as_typed(text)
    print(text if words else f"{text}\n\nThere is no project here: {clone.INIT}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
