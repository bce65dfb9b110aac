"""`doit status`, `logs` and `wait`: the progress of a run or a sweep, the output of its hosts, and its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.cli import trials
from pipeline.cli.commands import steps
from pipeline.cli.finished import other_hardware
from pipeline.cli.loader import exit_if_interrupted
from pipeline.cli.output import answer, note, say, say_log, wants_json
from pipeline.cli.session import Session, relative
from pipeline.cli.terminal import screen
from pipeline.cluster.events import LogLine
from pipeline.core import locks
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import State
from pipeline.core.tables import counted
from pipeline.live.state import RunPicture, first_state
from pipeline.live.sweep_state import SweepPicture
from pipeline.live.watching import AttemptFiles, SweepFiles, follow, is_under_way, may_go_on_until
from pipeline.runs import index
from pipeline.runs import status as run_status
from pipeline.runs.folder import RunFolder
from pipeline.sweep import folder as sweeps
from pipeline.sweep.folder import SweepFolder
from trainers.contract import run_folder

_POLL_S = 0.5


def status(current: Session) -> None:
    """Print the state of the named or newest run. Without a name, also print running steps and a running sweep."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    name, watches = options.get("run"), current.invocation.is_on("watch")
    if name is not None and trials.names_sweep(runs_dir, name):
        sweep = sweeps.find(runs_dir, name)
        if watches and is_under_way(sweep):
            watch_sweep(sweep)
        trials.show(sweep)
        return
    step_lines = [] if name is not None else steps.under_way(runs_dir)
    for line in step_lines:
        say(line)
    if step_lines and not index.rows(runs_dir):
        return
    # without a name: what is in progress, a run or a sweep, else the newest run; --watch waits for the next one
    names_no_run = not current.invocation.names_run
    awaited = _await_next(runs_dir) if watches and names_no_run and sys.stderr.isatty() else None
    folder = awaited or _named_or_newest(current)
    running_sweep = trials.sweep_in_progress(runs_dir, folder) if names_no_run else None
    if watches and running_sweep is not None:
        watch_sweep(running_sweep)
        trials.show(running_sweep)
        return
    if running_sweep is not None:
        say(f"{trials.progress_line(running_sweep)}: doit status --watch follows it; its newest trial:")
    if watches:
        watch(folder)
        if not index.is_run(folder):
            raise PacelineError(f"run {folder.key} was removed while it was watched", hint="doit runs")
    row = index.row(folder)
    if wants_json():
        answer(_as_json(folder, row))
        return
    say(run_status.status(folder), folds=True)
    if other := other_hardware({"hosts": row.hosts, "hardware": row.hardware}):
        say(f"  bits     unverified here, finished on other hardware: {other}", folds=True)


def _as_json(folder: RunFolder, row: index.RunRow) -> dict[str, Any]:
    """Return the row of `doit runs` with step, epoch and folder; before there is a result, with the newest metrics."""
    last = run_status.latest(folder)
    metrics = row.metrics if row.figures or last is None else last.metrics
    step, epoch = (None, None) if last is None else (last.step, last.epoch)
    return {**asdict(row), "metrics": metrics, "step": step, "epoch": epoch, "folder": str(folder.path)}


def _await_next(runs_dir: Path) -> RunFolder | None:
    """Wait until a run or a sweep is in progress. Return the run whose folder changed last; None if it is a sweep."""
    with waiting(note, "waiting for the next run (Ctrl-C ends this)"):
        while True:
            if any(locks.is_held(sweep.lock) for sweep in sweeps.all_sweeps(runs_dir)[-1:]):
                return None
            held = (path for path in runs_dir.glob(".*.lock") if locks.is_held(path))  # index.rows is 10 times slower
            folders = [RunFolder(runs_dir / path.name[1:].removesuffix(".lock")) for path in held]
            if runs := [folder for folder in folders if index.is_run(folder)]:
                return max(runs, key=lambda folder: folder.path.stat().st_mtime)
            time.sleep(_POLL_S)


def watch(folder: RunFolder) -> None:
    """Follow a run of another command to its end."""
    if not is_under_way(folder):
        return
    state = first_state(folder.key, folder.read_json(run_folder.CONFIG) or {})
    try:
        with screen(lambda: RunPicture(state, folder.path)) as shown:
            follow(folder, AttemptFiles(folder), shown)
    except KeyboardInterrupt:
        note(f"no longer watched; the run goes on: doit status {folder.key} --watch")
        exit_if_interrupted()


def watch_sweep(folder: SweepFolder) -> None:
    """Follow a sweep of another command to its end."""
    files = SweepFiles(folder)
    state = files.so_far(time.time(), time.monotonic())
    try:
        with screen(lambda: SweepPicture(state, folder.path.parent.parent), of_trials=True) as shown:
            follow(folder, files, shown)
    except KeyboardInterrupt:
        note("no longer watched; the sweep goes on: doit status --watch")
        exit_if_interrupted()


def wait(current: Session) -> None:
    """Return once a run, or a sweep, has ended. Raises PacelineError: it didn't finish, or trials failed."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    name = options.get("run")
    sweep = name if name is not None and trials.names_sweep(runs_dir, name) else options.get("sweep")
    if sweep is not None:
        _wait_for_sweep(sweeps.find(runs_dir, sweep))
        return
    folder = _named_or_newest(current)
    _wait(folder, f"run {folder.key}")
    row = index.row(folder)
    # RUNNING without a command that holds the lock: it was killed, and its ranks may still train
    ended_well = row.state in (State.FINISHED, index.ACCEPTED)
    error = None if ended_well else PacelineError(f"run {folder.key} is {row.state}", hint=f"doit logs {folder.key}")
    if row.state == State.RUNNING:
        message = f"run {folder.key} is RUNNING, but no command attends it"
        error = PacelineError(message, hint=f"doit attach {folder.key}")
    if wants_json():
        answer(_as_json(folder, row), error=error)
    if error is not None:
        raise error
    say(f"run {folder.key} is {row.state}")


def _wait_for_sweep(folder: SweepFolder) -> None:
    _wait(folder, f"sweep {folder.name}")
    trials.show(folder)
    results = trials.results_of(folder)
    unfinished = [trial.number for trial in results if trial.state not in (State.FINISHED, State.PRUNED)]
    if unfinished:
        number = counted(len(unfinished), "trial")
        raise PacelineError(
            f"{number} of sweep {folder.name} didn't finish, the first is trial {unfinished[0]}",
            hint="the sweep's command again; it goes on where it was",
        )


def _wait(folder: RunFolder | SweepFolder, name: str) -> None:
    with waiting(note, f"waiting for {name}"):
        for _ in _polls(folder):
            pass


def _polls(folder: RunFolder | SweepFolder) -> Iterator[None]:
    """Yield twice a second until the run or sweep has ended."""
    # after the command of a run was killed, its ranks go on until their lease ends, which is printed once
    is_reported = False
    while is_under_way(folder) or (isinstance(folder, RunFolder) and time.time() < may_go_on_until(folder)):
        if isinstance(folder, RunFolder) and not is_reported and not is_under_way(folder):
            is_reported = True
            note(f"no command attends run {folder.key}; its ranks may go on: doit attach {folder.key}")
        yield
        time.sleep(_POLL_S)


def logs(current: Session) -> None:
    """Print the output of a run's hosts, or of a step."""
    options = current.invocation.options
    if "step" in options:
        log = steps.log_of(current, options["step"])
        say_log(f"{relative(log)}:\n{log.read_text(encoding='utf-8', errors='replace').rstrip()}")
        return
    folder, host = _named_or_newest(current), options.get("host")
    if current.invocation.is_on("follow"):
        _follow_logs(folder, host)
        return
    for line in run_status.logs(folder, host):
        say_log(line)
    if why := run_status.altered_part(folder):
        note(f"WARNING: run {folder.key} is {index.ALTERED} ({why}); its logs are shown as they are now")


def _follow_logs(folder: RunFolder, host: str | None) -> None:
    files = AttemptFiles(folder)
    for _ in chain(_polls(folder), [None]):  # None: look once more after its end
        for event in files.new_events():
            if isinstance(event, LogLine) and host in (None, event.host):
                say_log(event.shown)


def _named_or_newest(current: Session) -> RunFolder:
    """Return the run that a key or the overrides name, else the one with the latest event. Raises UsageError."""
    invocation, runs_dir = current.invocation, current.config.runs_dir
    if invocation.names_run:
        return current.folder()
    rows = index.rows(runs_dir)
    if not rows:
        raise UsageError(f"no runs under {relative(runs_dir)} yet; try doit train experiment=quickstart")
    folder = RunFolder(runs_dir / rows[-1].key)
    folder.refuse_newer()
    return folder
