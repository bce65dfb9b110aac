"""`doit status`, `logs`, `wait` and `triage`: the progress of a run, the output of its hosts, and why it failed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.cli.commands import steps, trials
from pipeline.cli.commands.finished import other_hardware
from pipeline.cli.commands.train import screen, screen_of_sweep
from pipeline.cli.invocation import as_typed, is_on
from pipeline.cli.loader import leave_if_interrupted
from pipeline.cli.output import answer, note, say, say_folded, say_log, wants_json
from pipeline.cli.session import Session, relative
from pipeline.cluster.attempt.failures import is_consequence, shortened, without_message
from pipeline.cluster.events import LogLine, RankError
from pipeline.comparing import reading
from pipeline.comparing.reading import ComparedRun, command_line
from pipeline.core import documents, locks
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.places import ROOT
from pipeline.core.processes.wait_reports import waiting
from pipeline.core.redact import hide
from pipeline.core.specs import LAST, UNDER_WAY, State
from pipeline.core.tables import counted
from pipeline.execution.attempting import formatted as as_line
from pipeline.execution.failure_hints import OF_SCRIPTS, OUT_OF_MEMORY
from pipeline.execution.restarts import next_start_in
from pipeline.execution.run import lacking_files
from pipeline.live.watching import (
    AttemptFiles,
    RunPicture,
    SweepFiles,
    first_state,
    follow,
    is_under_way,
    may_go_on_until,
)
from pipeline.runs import checkpoints, index, journal
from pipeline.runs import status as run_status
from pipeline.runs.folder import RunFolder
from pipeline.sweep import folder as sweeps
from pipeline.sweep.folder import SweepFolder
from trainers.contract import run_folder

_POLL_S = 0.5


def status(current: Session) -> None:
    """Print the state of the named or newest run. Without a name, also print running steps and a running sweep."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    named, watches = options.get("run"), is_on(options, "watch")
    if named is not None and trials.names_sweep(runs_dir, named):
        sweep = sweeps.find(runs_dir, named)
        if watches and is_under_way(sweep):
            watch_sweep(sweep)
        trials.show(sweep)
        return
    step_lines = [] if named is not None else steps.under_way(runs_dir)
    for line in step_lines:
        say(line)
    if step_lines and not index.rows(runs_dir):
        return
    any_run = named is None and _names_no_run(current)
    awaited = _await_next(runs_dir) if watches and any_run and sys.stderr.isatty() else None
    folder = awaited or _named_or_newest(current)
    running = trials.under_way(runs_dir, folder) if any_run else None
    if watches and running is not None:
        watch_sweep(running)
        trials.show(running)
        return
    if running is not None:
        say(f"{trials.standing(running)}: doit status --watch follows it; its newest trial:")
    if watches:
        watch(folder)
        if not index.is_run(folder):
            raise PacelineError(f"run {folder.key} was removed while it was watched", hint="doit runs")
    row = index.row(folder)
    if wants_json():
        answer({**asdict(row), "folder": str(folder.path)})
        return
    say_folded(run_status.status(folder))
    if other := other_hardware({"hosts": row.hosts, "hardware": row.hardware}):
        say_folded(f"  bits     unverified here, finished on other hardware: {other}")


def _await_next(runs_dir: Path) -> RunFolder | None:
    """Wait until a run or a sweep is under way. Return the run that was written to last; None: a sweep is under way."""
    with waiting(note, "waiting for the next run (Ctrl-C ends this)"):
        while True:
            if any(locks.is_held(sweep.lock) for sweep in sweeps.all_sweeps(runs_dir)[-1:]):
                return None
            locked = (path for path in runs_dir.glob(".*.lock") if locks.is_held(path))  # rows take ten times as long
            begun = [RunFolder(runs_dir / path.name[1:].removesuffix(".lock")) for path in locked]
            if begun := [folder for folder in begun if index.is_run(folder)]:
                return max(begun, key=lambda folder: folder.path.stat().st_mtime)
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
        leave_if_interrupted()


def watch_sweep(folder: SweepFolder) -> None:
    """Follow a sweep of another command to its end."""
    files = SweepFiles(folder)
    state = files.so_far(time.time(), time.monotonic())
    try:
        with screen_of_sweep(state, folder.path.parent.parent) as shown:
            follow(folder, files, shown)
    except KeyboardInterrupt:
        note("no longer watched; the sweep goes on: doit status --watch")
        leave_if_interrupted()


def wait(current: Session) -> None:
    """Return once a run, or a sweep, has ended. Raises PacelineError: it didn't finish, or trials failed."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    named = options.get("run")
    name = named if named is not None and trials.names_sweep(runs_dir, named) else options.get("sweep")
    if name is not None:
        _wait_for_sweep(sweeps.find(runs_dir, name))
        return
    folder = _named_or_newest(current)
    _wait(folder, f"run {folder.key}")
    row = index.row(folder)
    ended_well = row.state in (State.FINISHED, index.ACCEPTED)
    error = None if ended_well else _not_finished(folder, row.state)
    if wants_json():
        answer({**asdict(row), "folder": str(folder.path)}, error=error)
    if error is not None:
        raise error
    say(f"run {folder.key} is {row.state}")


def _not_finished(folder: RunFolder, state: str) -> PacelineError:
    what = f"run {folder.key} is {state}"
    if state == State.RUNNING:
        return PacelineError(f"{what}, but no command attends it", hint=f"doit attach {folder.key}")
    return PacelineError(what, hint=f"doit logs {folder.key}")


def _wait_for_sweep(folder: SweepFolder) -> None:
    _wait(folder, f"sweep {folder.name}")
    trials.show(folder)
    bad = [trial.number for trial in trials.results_of(folder) if trial.state not in (State.FINISHED, State.PRUNED)]
    if bad:
        what = f"{counted(len(bad), 'trial')} of sweep {folder.name} didn't finish, the first is trial {bad[0]}"
        raise PacelineError(what, hint="the sweep's command again; it goes on where it was")


def _wait(folder: RunFolder | SweepFolder, name: str) -> None:
    with waiting(note, f"waiting for {name}"):
        for _ in _looks(folder):
            pass


def _looks(folder: RunFolder | SweepFolder) -> Iterator[None]:
    """Yield twice a second until no command works on it, and the hosts of a run hold no lease of a killed one.

    Says once if a run goes on without a command.
    """
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
    if is_on(options, "follow"):
        _follow_logs(folder, host)
        return
    for line in run_status.logs(folder, host):
        say_log(line)
    if why := run_status.altered(folder):
        note(f"WARNING: run {folder.key} is {index.ALTERED} ({why}); its logs are shown as they are now")


def _follow_logs(folder: RunFolder, host: str | None) -> None:
    """Print the newest lines of the run's newest attempt, and all further ones."""
    files = AttemptFiles(folder)
    for _ in chain(_looks(folder), [None]):  # and once after its end
        for event in files.look():
            if isinstance(event, LogLine) and host in (None, event.host):
                say_log(as_line(event))


def _names_no_run(current: Session) -> bool:
    return all(word.startswith("paths.") for word in current.invocation.overrides)


def _named_or_newest(current: Session) -> RunFolder:
    """Return the run that a key or the overrides name, else the one with the latest event. Raises UsageError."""
    invocation, runs_dir = current.invocation, current.config.runs_dir
    if "run" in invocation.options or not _names_no_run(current):
        return current.folder()
    rows = index.rows(runs_dir)
    if not rows:
        raise UsageError(f"no runs under {relative(runs_dir)} yet; try doit train experiment=quickstart")
    folder = RunFolder(runs_dir / rows[-1].key)
    folder.refuse_newer()
    return folder


# ------------------------------------------------------------------------------------ why a run failed
_MOST_FAILED, _MOST_TRACEBACK, _MOST_LOG = 700, 1_000, 800  # characters; the whole answer has at most a thousand tokens
_LOG_BYTES = 1 << 16
_LINE = re.compile(r"(?P<rank>\d+|-) \| (?P<text>.*)")  # a line of a host's log; torchrun's lines have - as rank
_PROJECT_FRAME = re.compile(r'^  File "(?P<path>[^/"<][^"]*)", line (?P<line>\d+)', re.MULTILINE)
_FIXES = (  # (pattern in the failure, fix); the first match counts
    (
        r"No module named '(?P<what>[^']+)'",
        "install what brings {what} on the hosts, or put it into the project",
    ),
    (f"{OUT_OF_MEMORY}|SIGKILL", "give it more memory, or a smaller batch"),
    *OF_SCRIPTS,
    (r"No space left on device|Disk quota exceeded", "free space on {host}; doit clean says which runs may go"),
    (
        r"No such file or directory: '(?P<what>[^']+)'",
        "see that {what} is there; a file that git doesn't track reaches the ranks by program.inputs=[FILE], and "
        "a folder to write into by os.makedirs in the script, or by .gitkeep in git",
    ),
    (r"CUDA|NVIDIA|cuda", "take a host with a GPU, or the processor"),
    (r"another collective|mismatch|op\.preamble", "let every rank join every collective, in one order"),
    (r"no rank has moved", "see what it waits for: doit logs {key}"),
    (
        r"^training failed: |the run's supervisor on this host|no longer answers|isolated: |not been heard of",
        "{preflight}",
    ),
)


def triage(current: Session) -> None:
    """Print why a run failed, the evidence, and the next command. Raises UsageError: no such run."""
    invocation, runs_dir = current.invocation, current.config.runs_dir
    known = examined(index.find(runs_dir, invocation.options.get("run") or _newest_unfinished(runs_dir)))
    if wants_json():
        answer(known)
        return
    for name in ("run", "what", "failed", "where"):
        if known[name]:
            say(f"{name:<9}{known[name]}")
    for name, text in known["evidence"].items():
        say(f"{name}:")
        say_log("\n".join(f"  {line}" for line in text.splitlines()))
    say(f"next     {known['next']}")


def _newest_unfinished(runs_dir: Path) -> str:
    """Return the key of the newest run that did not finish, else the word for the newest of all."""
    unfinished = (State.FAILED, State.KILLED, *UNDER_WAY)
    return next((row.key for row in reversed(index.rows(runs_dir)) if row.state in unfinished), LAST)


def examined(folder: RunFolder) -> dict[str, Any]:
    """Return what is known of a run's end, without secrets.

    ``run`` and ``state``, ``what`` was run, what ``failed``, ``where`` (hosts and ranks, the first error first),
    ``evidence`` (texts by name) and the ``next`` command.
    """
    run, entries = reading.read(folder), journal.read(folder.journal)
    attempt = entries[-1].attempt if entries else 0
    errors = _errors(folder, attempt)
    failed = run.failure or (run.reservation if run.state != State.FINISHED else "")
    failed = failed if len(failed) <= _MOST_FAILED else f"{failed[:_MOST_FAILED]}…"
    named = next((name for name in run.hosts if name in failed), next(iter(run.hosts), ""))
    host, first = errors[0] if errors else (named, None)
    frames = without_message(first.traceback, first.message) if first else ""  # those of the user's code, and the last
    traceback = shortened(frames, folder.key) if frames.strip() else ""
    evidence = {"traceback": _last_lines(traceback, _MOST_TRACEBACK)} if traceback else {}
    if run.failure and (log := _log(folder, attempt, host, first.rank if first else None)):
        evidence[f"log of {host}"] = log
    return {
        "run": f"{run.key} {run.state}{f', attempt {attempt}' if entries else ''}",
        "key": run.key,
        "state": run.state,
        "what": run.what,
        "failed": failed,
        "where": ", ".join(dict.fromkeys(f"{name} rank {error.rank}" for name, error in errors)),
        "evidence": evidence,
        "next": as_typed(_next(folder, run, host, traceback)),
    }


def _errors(folder: RunFolder, attempt: int) -> list[tuple[str, RankError]]:
    """Return host and error of an attempt's ranks, the earliest first, without errors that another error caused."""
    errors = []
    for path in sorted((folder.path / run_folder.ATTEMPTS / str(attempt)).glob("*.exit.json")):
        ended = documents.read_or_empty(path)
        for error in ended.get("errors") or ():
            known = RankError(
                rank=int(error.get("rank") or 0),
                unix_time=float(error.get("unix_time") or 0.0),
                message=str(error.get("message") or ""),
                traceback=str(error.get("traceback") or ""),
            )
            errors.append((str(ended.get("host", path.name)), known))
    errors.sort(key=lambda item: item[1].unix_time)
    return [item for item in errors if not is_consequence(item[1])] or errors


def _log(folder: RunFolder, attempt: int, host: str, rank: int | None) -> str:
    """Return the last log lines of a rank before its traceback; of all ranks if ``rank`` is None."""
    path = folder.path / run_folder.ATTEMPTS / str(attempt) / f"{host}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    parsed = [match for line in lines if (match := _LINE.fullmatch(line)) and match["rank"] != "-"]
    own = [match["text"] if rank is not None else match[0] for match in parsed if rank in (None, int(match["rank"]))]
    first = next((at for at, text in enumerate(own) if "Traceback (most recent call last):" in text), len(own))
    return _last_lines("\n".join(own[:first]), _MOST_LOG)


def _next(folder: RunFolder, run: ComparedRun, host: str, traceback: str) -> str:
    """Return what to do now: the fix, and the command that continues."""
    again = command_line("train", run.overrides)
    if locks.is_held(folder.lock):
        return f"doit status {run.key} --watch; it is under way"
    if run.state == State.FINISHED and (lacks := lacking_files(folder)) is not None:
        return f"{lacks}; until then {again} runs it again"
    if run.state in (State.FINISHED, index.ACCEPTED):
        return f"nothing: it is {run.state}"
    if folder.summary.exists() and not folder.result.exists():
        return f"{again}; it is trained, and this completes it"
    if run.state in UNDER_WAY or run.state == State.KILLED:
        return f"{again}; it starts {next_start_in(folder.path, checkpoints.settings_of(folder.path))}"
    return f"{_fix(run, host, traceback)}, then {again}"


def _fix(run: ComparedRun, host: str, traceback: str) -> str:
    preflight = command_line("preflight", [word for word in run.overrides if word.lstrip("+").startswith("cluster")])
    for pattern, mend in _FIXES:
        if match := re.search(pattern, run.failure):
            what = match.groupdict().get("what", "")
            if "No module" in pattern and (ROOT / f"{what}.py").is_file():
                return f"add program.inputs=[{what}.py], as the code doesn't show the import"
            return mend.format(what=what, host=host, key=run.key, preflight=preflight)
    frames = _PROJECT_FRAME.findall(traceback)
    return f"mend {frames[-1][0]}, line {frames[-1][1]}" if frames else "mend what it names"


def _last_lines(text: str, most: int) -> str:
    """Return the last complete lines of a text, at most ``most`` characters, without secrets."""
    text = hide(text.strip("\n"))
    return text if len(text) <= most else f"…\n{text[-most:].partition(chr(10))[2]}"
