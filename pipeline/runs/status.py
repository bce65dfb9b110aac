"""The state of a run and the logs of its hosts as text, read from the run folder, for `doit status` and `doit logs`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipeline.core import locks
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.specs import UNDER_WAY, State
from pipeline.core.tables import quantity
from pipeline.runs import acceptance, journal, metrics_file, ranks
from pipeline.runs.contents import nodes_of, what_runs
from pipeline.runs.folder import RunFolder, leads_out, link_warning
from pipeline.runs.index import ALTERED, WITHOUT_RESULT, altered_target, intact_parts
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder


def status(folder: RunFolder) -> str:
    """Return the text of `doit status`: state, attempt, hosts, step, last metrics, ranks, and damage to files."""
    entries = journal.read(folder.journal)
    config, plan = folder.read_json(run_folder.CONFIG) or {}, folder.read_json(run_folder.PLAN) or {}
    last = entries[-1] if entries else None
    accepted, altered = _acceptance_or_damage(folder)
    # while a command holds the lock, it is making the altered run again
    doubted = bool(altered) and not locks.is_held(folder.lock)
    if doubted:
        config = intact_parts(folder).get("config", {})
    lines = [f"{folder.key}  {'?' if doubted and not config else what_runs(config)}"]
    if accepted is not None:
        lines.append("  state    ACCEPTED")
    elif doubted:
        lines.append(f"  state    {ALTERED}; the command that started it makes it again")
    elif last is None:
        begun = locks.is_held(folder.lock)
        lines.append("  state    PLANNED, " + ("its command is preparing it" if begun else "not started"))
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.time))
        # without a lock its controller died, and the ranks may still run
        orphaned = last.state in UNDER_WAY and not locks.is_held(folder.lock)
        # typed again, the command that started the run attaches to ranks that still run, or begins the next attempt
        lost = "; no command is attached: the command that started it goes on with it" if orphaned else ""
        lines.append(f"  state    {last.state} since {when}, attempt {last.attempt}{lost}")
        if last.state is State.FINISHED and not folder.result.is_file() and not locks.is_held(folder.lock):
            lines[-1] += f"; {WITHOUT_RESULT}"
        if last.detail:
            lines.append(f"  detail   {last.detail.splitlines()[0]}")
        if last.state is State.FINISHED and folder.unkeyed():
            lines.append(
                "  key      not complete, so the command that started it runs it again; doit why names what it lacks"
            )
    lines.append(f"  hosts    {_hosts(plan, config)}")
    training = last is not None and last.state is State.RUNNING and locks.is_held(folder.lock)
    lines += _metrics(folder, training=training)
    lines += _ranks(folder, last.attempt if last is not None else 0, training=training)
    lines += list(dict.fromkeys(_altered_files(folder) + altered))  # both may name the same file
    lines += [f"  {name} was added after the run; it is none of its outputs" for name in files_added_later(folder)]
    if accepted is not None:
        lines += [f"  {accepted}", *(f"    {item}" for item in accepted.differences)]
    for number, text in journal.unreadable_lines(folder.journal):
        lines.append(f"  {folder.journal.name} line {number} is not readable and was left out: {text}")
    metrics = folder.path / run_folder.METRICS
    for number in metrics_file.bad_lines(metrics) if metrics.is_file() else ():
        lines.append(f"  {metrics.name} line {number} is not readable and was left out")
    return "\n".join(lines)


def files_added_later(folder: RunFolder) -> list[str]:
    """Return the files in a script's output folders that were added after it finished."""
    if folder.program.is_ours:  # also where config.json is damaged, so that the program isn't known
        return []
    recorded = folder.recorded_files()
    return [name for name in folder.program.files(folder.path) if name not in recorded] if recorded else []


def altered_part(folder: RunFolder) -> str:
    """Return which part of a run was altered, or ''; '' too while a command works on it."""
    if locks.is_held(folder.lock):
        return ""
    return next((line.strip() for line in [*_acceptance_or_damage(folder)[1], *_altered_files(folder)]), "")


def logs(folder: RunFolder, host: str | None) -> Iterator[str]:
    """Yield the logs of every attempt, each under a heading; ``host``: only this host's. Raises UsageError: no logs."""
    attempts = folder.path / run_folder.ATTEMPTS
    log_files = sorted(attempts.glob("*/*.log"), key=lambda path: (int(path.parent.name), path.name))
    if not log_files:
        started = [entry.attempt for entry in journal.read(folder.journal) if entry.state is State.RUNNING]
        if not started:
            raise UsageError(f"run {folder.key} has no logs: none of its attempts was started")
        raise UsageError(
            f"run {folder.key} has no logs: attempt {max(started)} was started, but no log is left in {attempts}",
            hint="another copy of the run folder has them",
        )
    hosts = {path.stem for path in log_files}
    if host is not None and host not in hosts:
        raise UsageError(f"host={host}: run {folder.key} has no log of it; {suggestion(host, hosts)}")
    for path in log_files:
        if host in (None, path.stem) and leads_out(path, folder.path):
            yield link_warning([path], folder.path)
        elif host in (None, path.stem):
            empty = "" if path.stat().st_size else ": no lines"
            yield f"==> attempt {path.parent.name}, {path.stem}{empty} <=="
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file)


def _acceptance_or_damage(folder: RunFolder) -> tuple[acceptance.Acceptance | None, list[str]]:
    """Return the acceptance by which another run's result counts for this key, or None; and lines about damage."""
    try:
        result, accepted = acceptance.result_or_accepted(folder)
    except AlteredError as error:
        return None, [f"  {error.what}"]
    if result is None or accepted is not None:
        return accepted, []
    why = folder.stale_because(result.digest)
    return None, [] if why is None else [f"  {folder.path}: {why}"]


def _curves_altered(folder: RunFolder) -> bool:
    try:
        return bool(altered_target(folder, folder.read_result(), (run_folder.METRICS,)))
    except AlteredError:  # without an intact result nothing can be checked; ``_altered_files`` names result.json
        return False


def _hosts(plan: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    hosts = [f"{node.get('host')} ({node.get('nproc_per_node')})" for node in nodes_of(plan)]
    if hosts:
        return f"{', '.join(hosts)}, {plan.get('launcher', '-')}"
    cluster = config.get("cluster")
    launcher = cluster.get("launcher") if isinstance(cluster, Mapping) else None
    return f"not asked yet, {launcher}" if launcher else "not asked yet"


def _altered_files(folder: RunFolder) -> list[str]:
    """Return a line for each sealed file that was altered."""
    lines = []
    for read in (folder.read_key, folder.read_summary, folder.read_result):
        try:
            read()
        except AlteredError as error:
            lines.append(f"  {error.what}")
    return lines


def latest(folder: RunFolder) -> metrics_file.MetricsRow | None:
    """Return the last row of metrics.jsonl with the last value of each metric; None: no row, or an altered file."""
    rows = [] if _curves_altered(folder) else ranks.last_rows(folder)
    if not rows:
        return None
    # not all metrics stand in each row: test metrics only in the last one, val metrics once an epoch
    metrics = {name: value for row in rows for name, value in row.metrics.items()}
    return replace(rows[-1], metrics=metrics)


def _metrics(folder: RunFolder, *, training: bool) -> list[str]:
    last = latest(folder)
    if last is None and not training:
        return []
    if last is None:
        doing = ranks.hosts_awaited(folder)
        if not doing and folder.program.is_ours:
            doing = "the ranks import torch and read the data"
        return [f"  step     none yet: {doing or ranks.no_metric(folder, quoted=True)}"]
    # the last row may be of an earlier attempt
    doing = f", {last.doing}" if training and last.attempt in journal.known_attempts(folder.path)[-1:] else ""
    epoch = "" if last.epoch is None else f", epoch {last.epoch}"
    lines = [f"  step     {last.step}{epoch}{doing}"]
    return lines + [f"  {name:<20} {quantity(name, value)}" for name, value in sorted(last.metrics.items())]


def _ranks(folder: RunFolder, attempt: int, *, training: bool) -> list[str]:
    rows, notes = ranks.read(folder.path / run_folder.ATTEMPTS / str(attempt))
    lines = [f"  ranks    {ranks.lagging(rows)}"] if rows and training else []
    return lines + [f"  {note}" for note in notes]
