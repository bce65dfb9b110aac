"""`doit status` and `doit logs`: how far a run has come, and what its hosts said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cli.invocation import is_on
from pipeline.cli.listing import other_arithmetic
from pipeline.cli.output import note, say, say_log
from pipeline.cli.session import Session, relative, session
from pipeline.core.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder


def status() -> None:
    """A run, and before it the steps that are being made, unless a run is named; of a sweep under way its trials."""
    from pipeline.cli import showing, sweeping
    from pipeline.cli import steps as own
    from pipeline.runs import index as runs
    from pipeline.runs import status as progress

    current = session()
    named = "run" in current.asked.options or current.asked.paths
    making = [] if named else own.under_way(current.config.runs_dir)
    for line in making:
        say(line)
    if making and not runs.rows(current.config.runs_dir):
        return
    folder, watched = _named_or_newest(), is_on(current.asked.options, "watch")
    any_run = not named and all(word.startswith("paths.") for word in current.asked.overrides)
    sweep = sweeping.under_way(current.config.runs_dir, folder) if any_run else None
    if watched and sweep is not None:
        showing.watch_sweep(sweep)
        sweeping.show(sweep)
        return
    if sweep is not None:
        say(f"{sweeping.standing(sweep)}: doit status watch=1 follows it; its newest trial:")
    if watched:
        showing.watch(folder)
        if not runs.is_run(folder):
            raise PacelineError(f"run {folder.key} was removed while it was watched", hint="doit runs")
    say(progress.status(folder))
    row = runs.row(folder)
    if other := other_arithmetic({"hosts": row.hosts, "hardware": row.hardware}):
        say(f"  bits     unverified here, finished on other arithmetic: {other}")


def logs() -> None:
    from pipeline.runs import status as progress
    from pipeline.runs.index import ALTERED

    if "step" in session().asked.options:
        from pipeline.cli import steps as own

        log = own.log_of(session().asked.options["step"])
        say_log(f"{relative(log)}:\n{log.read_text(encoding='utf-8', errors='replace').rstrip()}")
        return
    folder = _named_or_newest()
    for line in progress.logs(folder, session().asked.options.get("host")):
        say_log(line)
    if why := progress.altered(folder):
        note(f"WARNING: run {folder.key} is {ALTERED} ({why}); its logs are shown as they are now")


def _named_or_newest() -> RunFolder:
    """The run that ``run=`` or the overrides name; with neither the one that something happened to last."""
    from pipeline.runs import index as runs
    from pipeline.runs.folder import RunFolder

    current = session()
    if current.asked.paths:
        return _of_key(current)
    if "run" in current.asked.options or any(not word.startswith("paths.") for word in current.asked.overrides):
        return current.folder()
    rows = runs.rows(current.config.runs_dir)
    if not rows:
        raise UsageError(f"no runs under {relative(current.config.runs_dir)} yet; try doit train experiment=quickstart")
    folder = RunFolder(current.config.runs_dir / rows[-1].key)
    folder.refuse_newer()
    return folder


def _of_key(current: Session) -> RunFolder:
    """The run that a bare word names. Raises UsageError."""
    from pipeline.runs import index as runs

    if len(current.asked.paths) > 1 or "run" in current.asked.options:
        raise UsageError(f"one run at a time, not {' and '.join(current.asked.paths)}", hint="doit runs")
    return runs.find(current.config.runs_dir, current.asked.paths[0])
