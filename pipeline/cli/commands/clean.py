"""`doit clean`: list the runs that may be removed and the space they take, ask, and remove them."""

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
from pipeline.tracking.destinations import DONE, fingerprints, load, trackers_of
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
    """Return key → key of the newest finished run of the same configuration, data and ranks, for each older run.

    ``parts``: key → content of key.json.
    """
    subjects = {
        key: repr([content.get(part) for part in _DECISIVE_PARTS])
        for key, content in parts.items()
        if content.get("config")
    }
    newest = {subjects[row.key]: row for row in rows if row.state == State.FINISHED and row.key in subjects}
    pairs = [(row, newest[subjects[row.key]]) for row in rows if subjects.get(row.key) in newest]
    return {row.key: last.key for row, last in pairs if row.unix_time < last.unix_time}


def why_chosen(row: RunRow, rules: Rules, *, newer: str | None, now: float) -> str:
    """Return why the rules choose the run, in a few words; '' if they don't. ``newer`` supersedes it."""
    by_newer = f"superseded by {newer}" if newer else ""
    if rules.is_default:
        return "finished" if rules.checkpoints else "failed" if row.state == State.FAILED else by_newer
    reasons = [row.state.lower()] if rules.state is not None else []
    if rules.superseded:
        reasons.append(by_newer)
    if rules.older_than_days is not None:
        days = (now - row.unix_time) / _DAY_S
        reasons.append(f"{days:,.0f} days old" if days > rules.older_than_days else "")
    return ", ".join(reasons) if all(reasons) else ""


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
    """Return why the run must stay; '' if it may be removed. ``result_stays``: only checkpoints are removed."""
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
    if held := acceptance.accepted_for(folder.path):
        return f"its result was accepted for {', '.join(held)}"
    was_sent = (folder.path / run_folder.TRACKING).exists()
    in_mlflow = was_sent or (folder.read_json(run_folder.RESULT) or {}).get("mlflow_run_id") is not None
    records = {name: load(folder.path, name) for name in [*([None] if in_mlflow else []), *trackers_of(folder.path)]}
    inputs = fingerprints(folder.path)
    missing = [
        name or "MLflow"
        for name, known in records.items()
        if known is None or (known.state, known.inputs) != (DONE, inputs)
    ]
    return f"{' and '.join(missing)} hasn't all of it yet: doit record KEY" if missing else ""


_MOST_KEYS = 3  # in a line that says of several runs why they stay


@dataclass(frozen=True, kw_only=True)
class Item:
    """A chosen run: ``why``, the ``bytes`` that its removal frees, and why it ``stays``, or ''."""

    folder: RunFolder
    row: RunRow
    why: str
    bytes: int
    stays: str


def clean(current: Session) -> None:
    """Remove runs. Raises UsageError: a word that no run can be chosen by. PacelineError: a run can't be removed."""
    options, runs_dir = current.invocation.options, current.config.runs_dir
    other_subjects = (("hosts", clean_hosts, "what lies on hosts"), ("steps", clean_steps, "the outputs of steps"))
    for name, remove, subject in other_subjects:
        if current.invocation.is_on(name):
            if wrong := [option for option in options if option not in (name, "yes")]:
                raise UsageError(f"{wrong[0]}={options[wrong[0]]} chooses runs, and {name}=1 is about {subject}")
            remove(current)
            return
    rules = rules_of(current.invocation)
    with WaitReports(note) as reports:
        reports.doing("removing what killed commands have left")
        for path in remove_leftovers([runs_dir]):
            say(f"removed {path.name}, which a killed command has left")
        reports.doing("counting the files of the runs")
        items = _chosen(current, runs_dir, rules)
    going = [item for item in items if not item.stays]
    if going:
        head = ("run", "state", "when", "what", "frees", "why")
        rows = [(item.row, file_size(item.bytes), item.why) for item in going]
        say(aligned([head, *((row.key, row.state, day(row.unix_time), row.what, *rest) for row, *rest in rows)]))
    for why in dict.fromkeys(item.stays for item in items if item.stays):
        keys = [item.row.key for item in items if item.stays == why]
        say(f"{first_of(keys, _MOST_KEYS)} {'stays' if len(keys) == 1 else 'stay'}: {why}")
    if not going:
        say(f"nothing to remove under {relative(runs_dir)}")
    elif agreed(current, _amount(going, rules)):
        _remove(going, runs_dir, rules)


def agreed(current: Session, amount: str) -> bool:
    """Ask the user for the removal, unless ``--yes`` was typed; without a terminal, say how to agree in the command."""
    if current.invocation.is_on("yes"):
        return True
    if not (os.isatty(0) and os.isatty(1)):
        say(f"nothing was removed; to remove {amount}: {shlex.join(['doit', *sys.argv[1:], '--yes'])}")
        return False
    print(f"remove {amount}? [y/N] ", end="", flush=True)
    is_agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_agreed:
        say("nothing was removed")
    return is_agreed


# ------------------------------------------------------------------------------------------- what is looked up
def _chosen(current: Session, runs_dir: Path, rules: Rules) -> list[Item]:
    rows = index.rows(runs_dir)
    parts = {row.key: RunFolder(runs_dir / row.key).read_json(run_folder.KEY) or {} for row in rows}
    newer = superseded(rows, parts)
    intact = {key for key in set(newer.values()) if _is_intact(RunFolder(runs_dir / key))}
    chosen = filter_of(current.invocation.overrides, current.config.resolved)
    rows = in_state(rows, rules.state)
    if any(chosen):
        matching = chosen.configs(runs_dir, rows, in_part=False)
        rows = [row for row in rows if row.key in matching]
    if rules.checkpoints:
        rows = [row for row in rows if row.state == State.FINISHED]
    needs, now = needed(runs_dir), time.time()
    items = []
    for row in rows:
        by, folder = newer.get(row.key), RunFolder(runs_dir / row.key)
        why = why_chosen(row, rules, newer=by if by in intact else None, now=now)
        places = lock.checkpoint_files(folder) if rules.checkpoints else [folder.path]
        size = sum(disk_usage(path).bytes for path in places) if why else 0
        if not why or (rules.checkpoints and not size):
            continue
        held = locks.is_held(folder.lock)
        stays = IN_USE if held else objection(folder, row, needs, result_stays=rules.checkpoints)
        items.append(Item(folder=folder, row=row, why=why, bytes=size, stays=stays))
    return items


def _is_intact(folder: RunFolder) -> bool:
    try:
        key = folder.read_key()
    except AlteredError:
        return False
    return key is not None and folder.stale_because(key.digest) is None


# ------------------------------------------------------------------------------------------- what removes
def _remove(items: Sequence[Item], runs_dir: Path, rules: Rules) -> None:
    needs = needed(runs_dir)  # one may have begun since they were shown
    gone: list[Item] = []
    with WaitReports(note) as reports:
        for item in items:
            reports.doing(f"removing {item.row.key}; {len(gone)} of {len(items)} are gone")
            try:
                still_fits = partial(_objection, item, needs, rules)
                why = lock.remove(item.folder, still_fits, checkpoints_alone=rules.checkpoints)
            except OSError as error:
                raise PacelineError(
                    f"{item.row.key} can't be removed: {os_reason(error)}; removed before: {_amount(gone, rules)}",
                    hint="make that possible, then the same command",
                ) from error
            if why:
                say(f"{item.row.key} stays: {why}")
            else:
                gone.append(item)
    say(f"removed {_amount(gone, rules)}")


def _objection(item: Item, needs: Mapping[str, str], rules: Rules) -> str:
    """Check again behind the run's lock, because another command may have worked on it since."""
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
    going, staying = steps.unneeded(graph, current.config.data_dir)
    for folder, why in staying.items():
        say(f"{folder.name} stays: {why}")
    if not going:
        say(f"nothing to remove under {relative(step_folders.steps_dir(graph.runs_dir))}")
        return
    sizes = [disk_usage(path).bytes for path in going]
    rows = [(path.name, file_size(size), why) for (path, why), size in zip(going.items(), sizes, strict=True)]
    say(aligned([("step", "frees", "why"), *rows]))
    outputs = sum(path.is_dir() for path in going)
    parts = [f"the outputs of {counted(outputs, 'step')}"] if outputs else []
    parts += [counted(len(going) - outputs, "log")] if outputs < len(going) else []
    amount = f"{' and '.join(parts)}, {file_size(sum(sizes))}"
    if not agreed(current, amount):
        return
    for path in going:
        try:
            gone = steps.remove(path)
        except OSError as error:
            raise PacelineError(f"{path.name} can't be removed: {os_reason(error)}") from error
        say(f"removed {path.name}" if gone else f"{path.name} stays: a command is making it")


def clean_hosts(current: Session) -> None:
    """Remove what ended attempts have left on hosts. Raises UsageError: they share their folders; HostError."""
    config = current.config
    if launchers.capabilities(config.cluster).shares_run_dir:
        raise UsageError(
            "hosts=1 needs a cluster whose hosts have folders of their own", hint="doit clean hosts=1 cluster=two_node"
        )
    with closing(launchers.create(config.cluster)) as launcher:
        with waiting(note, "asking the hosts"):
            facts = launcher.probe(None)
        reasons = [
            (fact.host, left, starts.why_kept(left, config.runs_dir)) for fact in facts for left in fact.left_folders
        ]
        going = [(host, left) for host, left, why in reasons if not why]
        for host, left, why in reasons:
            if why:
                say(f"{host}: {left.name} stays: {why}")
        if not going:
            say(f"nothing to remove on {', '.join(fact.host for fact in facts)}")
            return
        rows = [("host", "attempt", "unused for", "frees")]
        rows += [(host, left.name, starts.idle_words(left.idle_s), file_size(left.bytes)) for host, left in going]
        say(aligned(rows))
        size_bytes = sum(left.bytes for _, left in going)
        amount = f"what was left of {counted(len(going), 'attempt')}, {file_size(size_bytes)}"
        if agreed(current, amount):
            with waiting(note, "removing it"):
                lines = starts.clear_leftovers(launcher, facts, config.runs_dir)
            for line in lines or ["it is in use again, so nothing was removed"]:
                say(line)
