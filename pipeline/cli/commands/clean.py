"""`doit clean`: list the runs that may be removed and the space they take, ask the user, and remove them.

With --hosts it does the same for what ended attempts have left on hosts, with --steps for outputs of the user's steps.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.cli.commands.runs import day, filter_of, in_state
from pipeline.cli.invocation import Invocation
from pipeline.cli.output import note, say
from pipeline.cli.session import Session, relative
from pipeline.cluster import launchers, starts
from pipeline.core import locks
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.files import remove_leftovers
from pipeline.core.processes.threads import WaitReports, waiting
from pipeline.core.specs import UNDER_WAY, State
from pipeline.core.tables import aligned, counted, file_size, first_of
from pipeline.runs import acceptance, index, lock
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import RunRow
from pipeline.runs.lock import IN_USE, disk_usage
from pipeline.runs.result import AlteredError
from pipeline.steps import graph as steps
from pipeline.steps import step_folders
from pipeline.sweep.folder import FOLDER, SweepFolder
from pipeline.tracking.destinations import DONE, input_stamps, load, trackers_of
from trainers.contract import run_folder

_DAY_S = 86_400.0
_DECISIVE_PARTS = ("config", "data", "topology")  # of a key; the others are code and environment


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules on the command line; each one narrows the choice.

    Without a rule, failed and superseded runs are chosen; with ``checkpoints``, the checkpoints of all finished runs.
    """

    state: str | None = None
    superseded: bool = False
    older_than_days: float | None = None
    checkpoints: bool = False

    @property
    def is_default(self) -> bool:
        return self.state is None and not self.superseded and self.older_than_days is None


def rules_of(invocation: Invocation) -> Rules:
    """Return the rules of a command line. Raises UsageError: an impossible value."""
    options = invocation.options
    try:
        days = float(options["older_than"]) if "older_than" in options else None
    except ValueError:
        days = math.nan
    if days is not None and not 0 <= days < math.inf:
        raise UsageError(f"older_than={options['older_than']} must be a number of days, such as older_than=30")
    return Rules(
        state=options.get("state"),
        superseded=invocation.is_on("superseded"),
        older_than_days=days,
        checkpoints=invocation.is_on("checkpoints"),
    )


def superseded(rows: Sequence[RunRow], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return for each superseded run: key → key of the newest finished run of the same configuration, data and ranks.

    ``rows``: all runs, oldest first; ``parts``: key → content of key.json.
    """
    subjects = {
        key: repr([content.get(part) for part in _DECISIVE_PARTS])
        for key, content in parts.items()
        if content.get("config")
    }
    # of several finished runs of one subject the last one stays in this dict, which is the newest
    newest = {subjects[row.key]: row for row in rows if row.state == State.FINISHED and row.key in subjects}
    pairs = [(row, newest[subjects[row.key]]) for row in rows if subjects.get(row.key) in newest]
    return {row.key: last.key for row, last in pairs if row.unix_time < last.unix_time}


def why_chosen(row: RunRow, rules: Rules, *, newer: str | None, now: float) -> str:
    """Return why the rules choose the run, in a few words; '' if they don't. ``newer``: the run that supersedes it."""
    by_newer = f"superseded by {newer}" if newer else ""
    if rules.is_default:
        return "finished" if rules.checkpoints else "failed" if row.state == State.FAILED else by_newer
    reasons = [row.state.lower()] if rules.state is not None else []
    if rules.superseded:
        reasons.append(by_newer)
    if rules.older_than_days is not None:
        days = (now - row.unix_time) / _DAY_S
        reasons.append(f"{days:,.0f} days old" if days > rules.older_than_days else "")
    return ", ".join(reasons) if all(reasons) else ""  # '' among the reasons: that rule doesn't choose the run


def needed(runs_dir: Path) -> dict[str, str]:
    """Return key → what needs the run's result, in words. Raises UsageError: a sweep's folder can't be read."""
    needs: dict[str, str] = {}
    for path in sorted(runs_dir.glob(f"*/{run_folder.INITIAL_WEIGHTS_NOTES}")):
        folder = RunFolder(path.parent)
        run = (folder.read_json(run_folder.INITIAL_WEIGHTS_NOTES) or {}).get("run")
        if run and not folder.result.exists():
            needs[str(run)] = f"run {folder.key}, which isn't finished, starts from its weights"
    for path in sorted((runs_dir / FOLDER).glob("*/sweep.json")):
        sweep = SweepFolder(path.parent)
        keys = [trial.key for trial in sweep.read_begun().trials] + [entry.key for entry in sweep.entries()]
        needs |= dict.fromkeys(keys, f"the sweep {sweep.name} names its result")
    return needs


def objection(folder: RunFolder, row: RunRow, needs: Mapping[str, str], *, result_stays: bool) -> str:
    """Return why the run must stay, or ''. ``needs``: from ``needed``; ``result_stays``: only checkpoints go."""
    if folder.path.is_symlink():
        return "a symbolic link stands in its place"
    if row.state == index.NEWER:
        return "a newer Paceline wrote it"
    if row.state == index.ACCEPTED:
        return "a user has accepted it, which doit accept --undo takes back"
    if row.state in UNDER_WAY and time.time() - disk_usage(folder.path).newest < _DAY_S:
        return "it hasn't ended, and was written to within a day: another computer may be at work on it"
    if result_stays or not folder.result.exists():
        return ""
    if row.key in needs:
        return needs[row.key]
    if keys := acceptance.accepted_for(folder.path):
        return f"its result was accepted for {', '.join(keys)}"
    # a tracker that got a part of the run must have all of it before the only complete copy goes; None is MLflow
    was_sent = (folder.path / run_folder.TRACKING).exists()
    in_mlflow = was_sent or (folder.read_json(run_folder.RESULT) or {}).get("mlflow_run_id") is not None
    records = {name: load(folder.path, name) for name in [*([None] if in_mlflow else []), *trackers_of(folder.path)]}
    inputs = input_stamps(folder.path)
    missing = [
        name or "MLflow"
        for name, record in records.items()
        if record is None or (record.state, record.inputs) != (DONE, inputs)
    ]
    return f"{' and '.join(missing)} hasn't all of it yet: doit record KEY" if missing else ""


_MAX_KEYS = 3  # in a line that says why several runs stay


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run that the rules choose: ``why``, the ``bytes`` that its removal frees, and why it ``stays``, or ''."""

    folder: RunFolder
    row: RunRow
    why: str
    bytes: int
    stays: str


def clean(current: Session) -> None:
    """Remove what the options choose. Raises UsageError: a word chooses no runs; PacelineError: a removal failed."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    other_subjects = (("hosts", clean_hosts, "what lies on hosts"), ("steps", clean_steps, "the outputs of steps"))
    for name, remove, subject in other_subjects:
        if current.invocation.is_on(name):
            if wrong := [option for option in options if option not in (name, "yes")]:
                raise UsageError(f"{wrong[0]}={options[wrong[0]]} chooses runs, and {name}=1 is about {subject}")
            remove(current)
            return
    # sizes and reasons are looked up before the question; all is checked again before a removal
    rules = rules_of(current.invocation)
    with WaitReports(note) as reports:
        reports.doing("removing what killed commands have left")
        for path in remove_leftovers([runs_dir]):
            say(f"removed {path.name}, which a killed command has left")
        reports.doing("counting the files of the runs")
        items = _choose_runs(current, runs_dir, rules)
    removable = [item for item in items if not item.stays]
    if removable:
        table = [("run", "state", "when", "what", "frees", "why")]
        for item in removable:
            row = item.row
            table.append((row.key, row.state, day(row.unix_time), row.what, file_size(item.bytes), item.why))
        say(aligned(table))
    for why in dict.fromkeys(item.stays for item in items if item.stays):
        keys = [item.row.key for item in items if item.stays == why]
        say(f"{first_of(keys, _MAX_KEYS)} {'stays' if len(keys) == 1 else 'stay'}: {why}")
    if not removable:
        say(f"nothing to remove under {relative(runs_dir)}")
    elif is_confirmed(current, _amount(removable, rules)):
        _remove(removable, runs_dir, rules)


def is_confirmed(current: Session, amount: str) -> bool:
    """Ask the user to confirm the removal, unless --yes was typed; without a terminal, say that --yes is needed."""
    if current.invocation.is_on("yes"):
        return True
    if not (os.isatty(0) and os.isatty(1)):
        say(f"nothing was removed; to remove {amount}: {shlex.join(['doit', *sys.argv[1:], '--yes'])}")
        return False
    print(f"remove {amount}? [y/N] ", end="", flush=True)
    is_yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_yes:
        say("nothing was removed")
    return is_yes


# ------------------------------------------------------------------------------------------- the choice of runs
def _choose_runs(current: Session, runs_dir: Path, rules: Rules) -> list[Item]:
    """Return the runs that the rules and the overrides choose, those that must stay included."""
    rows = index.rows(runs_dir)
    parts = {row.key: RunFolder(runs_dir / row.key).read_json(run_folder.KEY) or {} for row in rows}
    newer = superseded(rows, parts)
    # a damaged run supersedes nothing
    intact = {key for key in set(newer.values()) if _is_intact(RunFolder(runs_dir / key))}
    run_filter = filter_of(current.invocation.overrides, current.config.resolved)
    rows = in_state(rows, rules.state)
    if any(run_filter):
        matching = run_filter.configs(runs_dir, rows, in_part=False)
        rows = [row for row in rows if row.key in matching]
    if rules.checkpoints:
        rows = [row for row in rows if row.state == State.FINISHED]
    needs, now = needed(runs_dir), time.time()
    items = []
    for row in rows:
        newer_key, folder = newer.get(row.key), RunFolder(runs_dir / row.key)
        why = why_chosen(row, rules, newer=newer_key if newer_key in intact else None, now=now)
        paths = lock.checkpoint_files(folder) if rules.checkpoints else [folder.path]
        size = sum(disk_usage(path).bytes for path in paths) if why else 0
        if not why or (rules.checkpoints and not size):
            continue
        is_in_use = locks.is_held(folder.lock)
        stays = IN_USE if is_in_use else objection(folder, row, needs, result_stays=rules.checkpoints)
        items.append(Item(folder=folder, row=row, why=why, bytes=size, stays=stays))
    return items


def _is_intact(folder: RunFolder) -> bool:
    try:
        key = folder.read_key()
    except AlteredError:
        return False
    return key is not None and folder.stale_because(key.digest) is None


# ------------------------------------------------------------------------------------------- the removal
def _remove(items: Sequence[Item], runs_dir: Path, rules: Rules) -> None:
    """Remove the runs or their checkpoints, each after a second check under its lock."""
    needs = needed(runs_dir)  # anew: while the user was asked, a run may have begun that needs one of these
    removed: list[Item] = []
    with WaitReports(note) as reports:
        for item in items:
            reports.doing(f"removing {item.row.key}; {len(removed)} of {len(items)} are gone")
            try:
                objection_now = partial(_objection, item, needs, rules)
                why = lock.remove(item.folder, objection_now, checkpoints_alone=rules.checkpoints)
            except OSError as error:
                raise PacelineError(
                    f"{item.row.key} can't be removed: {os_reason(error)}; removed before: {_amount(removed, rules)}",
                    hint="make that possible, then the same command",
                ) from error
            if why:
                say(f"{item.row.key} stays: {why}")
            else:
                removed.append(item)
    say(f"removed {_amount(removed, rules)}")


def _objection(item: Item, needs: Mapping[str, str], rules: Rules) -> str:
    """Return why the run must stay, now that its lock is held: another command may have worked on it since; or ''."""
    if not item.folder.path.is_dir():
        return "another command has removed it"
    if index.row(item.folder) != item.row:
        return "it has changed since it was shown"
    return objection(item.folder, item.row, needs, result_stays=rules.checkpoints)


def _amount(items: Sequence[Item], rules: Rules) -> str:
    what = "the checkpoints of " if rules.checkpoints else ""
    return f"{what}{counted(len(items), 'run')}, {file_size(sum(item.bytes for item in items))}"


def clean_steps(current: Session) -> None:
    """Remove outputs of steps. Raises PacelineError: one can't be removed."""
    graph = current.steps
    remove_leftovers([step_folders.steps_dir(graph.runs_dir)])
    removable, staying = steps.find_unneeded(graph, current.config.data_dir)  # both: path → why
    for folder, why in staying.items():
        say(f"{folder.name} stays: {why}")
    if not removable:
        say(f"nothing to remove under {relative(step_folders.steps_dir(graph.runs_dir))}")
        return
    sizes = [disk_usage(path).bytes for path in removable]
    rows = [(path.name, file_size(size), why) for (path, why), size in zip(removable.items(), sizes, strict=True)]
    say(aligned([("step", "frees", "why"), *rows]))
    outputs = sum(path.is_dir() for path in removable)  # folders are outputs, files are logs
    parts = [f"the outputs of {counted(outputs, 'step')}"] if outputs else []
    parts += [counted(len(removable) - outputs, "log")] if outputs < len(removable) else []
    amount = f"{' and '.join(parts)}, {file_size(sum(sizes))}"
    if not is_confirmed(current, amount):
        return
    for path in removable:
        try:
            is_removed = steps.remove(path)
        except OSError as error:
            raise PacelineError(f"{path.name} can't be removed: {os_reason(error)}") from error
        say(f"removed {path.name}" if is_removed else f"{path.name} stays: a command is making it")


def clean_hosts(current: Session) -> None:
    """Remove what ended attempts have left on hosts. Raises UsageError: the hosts share the run folder; HostError."""
    config = current.config
    if launchers.capabilities(config.cluster).shares_run_dir:
        raise UsageError(
            "hosts=1 needs a cluster whose hosts have folders of their own", hint="doit clean hosts=1 cluster=two_node"
        )
    with closing(launchers.create(config.cluster)) as launcher:
        with waiting(note, "asking the hosts"):
            facts = launcher.probe(None)
        removable = []
        for fact in facts:
            for leftover in fact.left_folders:
                if why := starts.why_kept(leftover, config.runs_dir):
                    say(f"{fact.host}: {leftover.name} stays: {why}")
                else:
                    removable.append((fact.host, leftover))
        if not removable:
            say(f"nothing to remove on {', '.join(fact.host for fact in facts)}")
            return
        rows = [("host", "attempt", "unused for", "frees")]
        rows += [(host, item.name, starts.idle_words(item.idle_s), file_size(item.bytes)) for host, item in removable]
        say(aligned(rows))
        size_bytes = sum(leftover.bytes for _, leftover in removable)
        amount = f"what was left of {counted(len(removable), 'attempt')}, {file_size(size_bytes)}"
        if is_confirmed(current, amount):
            # clear_leftovers checks again, because an attempt may have started since
            with waiting(note, "removing it"):
                lines = starts.clear_leftovers(launcher, facts, config.runs_dir)
            for line in lines or ["it is in use again, so nothing was removed"]:
                say(line)
