"""`doit status`, `logs` and `wait`: the progress of a run, and the output of its hosts."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from pipeline.cli import answers
from pipeline.cli.commands import steps, trials
from pipeline.cli.commands.finished import other_arithmetic
from pipeline.cli.commands.progress import of_sweep, screen
from pipeline.cli.invocation import is_on
from pipeline.cli.loader import leave_if_interrupted
from pipeline.cli.output import note, say, say_log
from pipeline.cli.session import relative, session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.specs import LogLine, State
from pipeline.core.tables import counted
from pipeline.execution.attempting import shown as as_line
from pipeline.live.pictures import RunPicture, first_state
from pipeline.live.watching import AttemptFiles, SweepFiles, follow_run, follow_sweep, is_under_way
from pipeline.runs import index
from pipeline.runs import status as run_status
from pipeline.runs.folder import RunFolder
from pipeline.sweep import folder as sweeps
from pipeline.sweep.folder import SweepFolder
from trainers.contract import run_folder

_LOOK_S = 0.5
_MOST_EVIDENCE = 1_200  # characters of a traceback or a log: a thousand tokens hold both, and the rest
_LOG_BYTES = 1 << 16


def status() -> None:
    """Print the state of a run; first of steps under way, unless a run is named; of a running sweep its trials."""
    invocation, runs_dir = session().invocation, session().config.runs_dir
    named = invocation.options.get("run")
    is_named = named is not None
    if named is not None and trials.names_sweep(runs_dir, named):
        _status_of_sweep(sweeps.find(runs_dir, named), watches=is_on(invocation.options, "watch"))
        return
    step_lines = [] if is_named else steps.under_way(runs_dir)
    for line in step_lines:
        say(line)
    if step_lines and not index.rows(runs_dir):
        return
    watches, any_run = is_on(invocation.options, "watch"), not is_named and _names_no_run()
    if watches and any_run and sys.stderr.isatty():
        _await_next(runs_dir)
    folder = _named_or_newest()
    sweep = trials.under_way(runs_dir, folder) if any_run else None
    if watches and sweep is not None:
        watch_sweep(sweep)
        trials.show(sweep)
        return
    if sweep is not None:
        say(f"{trials.standing(sweep)}: doit status --watch follows it; its newest trial:")
    if watches:
        watch(folder)
        if not index.is_run(folder):
            raise PacelineError(f"run {folder.key} was removed while it was watched", hint="doit runs")
    row = index.row(folder)
    if answers.wanted():
        answers.answer({**asdict(row), "folder": str(folder.path)})
        return
    say(run_status.status(folder))
    if other := other_arithmetic({"hosts": row.hosts, "hardware": row.hardware}):
        say(f"  bits     unverified here, finished on other arithmetic: {other}")


def _await_next(runs_dir: Path) -> None:
    """Return once a run or a sweep is under way."""
    with waiting(note, "waiting for the next run (Ctrl-C ends this)"):
        while not (any(map(is_under_way, _newest(runs_dir))) or any(map(is_under_way, sweeps.every(runs_dir)[-1:]))):
            time.sleep(_LOOK_S)


def _newest(runs_dir: Path) -> list[RunFolder]:
    return [RunFolder(runs_dir / row.key) for row in index.rows(runs_dir)[-1:]]


def _status_of_sweep(folder: SweepFolder, *, watches: bool) -> None:
    if watches and is_under_way(folder):
        watch_sweep(folder)
    trials.show(folder, as_json=answers.wanted())


def watch(folder: RunFolder) -> None:
    """Follow a run of another command to its end."""
    if not is_under_way(folder):
        return
    state = first_state(folder.key, folder.read_json(run_folder.CONFIG) or {})
    try:
        with screen(lambda: RunPicture(state, folder.path)) as shown:
            follow_run(folder, shown)
    except KeyboardInterrupt:
        note(f"no longer watched; the run goes on: doit status {folder.key} --watch")
        leave_if_interrupted()


def watch_sweep(folder: SweepFolder) -> None:
    """Follow a sweep of another command to its end."""
    files = SweepFiles(folder)
    state = files.so_far(time.time(), time.monotonic())
    try:
        with of_sweep(lambda: state, folder.path.parent.parent) as shown:
            follow_sweep(folder, files, shown)
    except KeyboardInterrupt:
        note("no longer watched; the sweep goes on: doit status --watch")
        leave_if_interrupted()


def wait() -> None:
    """Return once a run, or a sweep, has ended. Raises PacelineError: it didn't finish, or trials failed."""
    options, runs_dir = session().invocation.options, session().config.runs_dir
    named = options.get("run")
    name = named if named is not None and trials.names_sweep(runs_dir, named) else options.get("sweep")
    if name is not None:
        _wait_for_sweep(sweeps.find(runs_dir, name))
        return
    folder = _named_or_newest()
    with waiting(note, f"waiting for run {folder.key}"):
        _until_over(folder)
    row = index.row(folder)
    ended_well = row.state in (State.FINISHED, index.ACCEPTED)
    error = None if ended_well else PacelineError(f"run {folder.key} is {row.state}", hint=f"doit logs {folder.key}")
    if answers.wanted():
        answers.answer({**asdict(row), "folder": str(folder.path)}, error=error)
    if error is not None:
        raise error
    say(f"run {folder.key} is {row.state}")


def _wait_for_sweep(folder: SweepFolder) -> None:
    with waiting(note, f"waiting for sweep {folder.name}"):
        _until_over(folder)
    trials.show(folder, as_json=answers.wanted())
    bad = [trial.number for trial in trials.results_of(folder) if trial.state not in (State.FINISHED, State.PRUNED)]
    if bad:
        what = f"{counted(len(bad), 'trial')} of sweep {folder.name} didn't finish, the first is trial {bad[0]}"
        raise PacelineError(what, hint="the sweep's command again; it goes on where it was")


def _until_over(folder: RunFolder | SweepFolder) -> None:
    while is_under_way(folder):
        time.sleep(_LOOK_S)


def _follow_logs(folder: RunFolder, host: str | None) -> None:
    """Print the newest lines of the run's newest attempt, and all further ones."""
    files = AttemptFiles(folder)
    while True:
        over = not is_under_way(folder)
        for event in files.look():
            if isinstance(event, LogLine) and host in (None, event.host):
                say_log(as_line(event))
        if over:
            return
        time.sleep(_LOOK_S)


def logs() -> None:
    """Print the output of a run's hosts, or of a step."""
    if "step" in session().invocation.options:
        log = steps.log_of(session().invocation.options["step"])
        say_log(f"{relative(log)}:\n{log.read_text(encoding='utf-8', errors='replace').rstrip()}")
        return
    folder = _named_or_newest()
    if is_on(session().invocation.options, "follow"):
        _follow_logs(folder, session().invocation.options.get("host"))
        return
    for line in run_status.logs(folder, session().invocation.options.get("host")):
        say_log(line)
    if why := run_status.altered(folder):
        note(f"WARNING: run {folder.key} is {index.ALTERED} ({why}); its logs are shown as they are now")


def _names_no_run() -> bool:
    return all(word.startswith("paths.") for word in session().invocation.overrides)


def _named_or_newest() -> RunFolder:
    """Return the run that a key or the overrides name; without them the one with the latest event.

    Raises UsageError: there is none.
    """
    invocation, runs_dir = session().invocation, session().config.runs_dir
    if "run" in invocation.options or not _names_no_run():
        return session().folder()
    rows = index.rows(runs_dir)
    if not rows:
        raise UsageError(f"no runs under {relative(runs_dir)} yet; try doit train experiment=quickstart")
    folder = RunFolder(runs_dir / rows[-1].key)
    folder.refuse_newer()
    return folder
