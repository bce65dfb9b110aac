"""The state of a run and the output of its hosts, read from its folder, for `doit status` and `logs`."""

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
from pipeline.runs.folder import RunFolder, leads_out, not_read
from pipeline.runs.index import ALTERED, WITHOUT_RESULT, altered_target, intact_parts
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder


def status(folder: RunFolder) -> str:
    """Return lines: state, attempt, hosts, step, last metrics."""
    entries = journal.read(folder.journal)
    config, plan = folder.read_json(run_folder.CONFIG) or {}, folder.read_json(run_folder.PLAN) or {}
    last = entries[-1] if entries else None
    accepted, altered = _accepted(folder)
    doubted = bool(altered) and not locks.is_held(folder.lock)  # the command that holds it is making the run again
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
        orphaned = last.state in UNDER_WAY and not locks.is_held(folder.lock)
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
    lines += list(dict.fromkeys(_unreadable(folder) + altered))
    lines += [f"  {name} was added after the run; it is none of its outputs" for name in added(folder)]
    if accepted is not None:
        lines += [f"  {accepted}", *(f"    {item}" for item in accepted.differences)]
    torn = [(number, f": {text}") for number, text in journal.torn(folder.journal)]
    for path, bad in ((folder.journal, torn), (folder.path / run_folder.METRICS, _bad_metrics(folder))):
        lines += [f"  {path.name} line {number} is not readable and was left out{text}" for number, text in bad]
    return "\n".join(lines)


def added(folder: RunFolder) -> list[str]:
    """Return files in a script's outputs that appeared after it finished."""
    if folder.program.is_ours:  # also where config.json is damaged, so that the program isn't known
        return []
    recorded = folder.recorded_files()
    return [name for name in folder.program.files(folder.path) if name not in recorded] if recorded else []


def altered(folder: RunFolder) -> str:
    """Return which part of an idle run was altered, or ''."""
    if locks.is_held(folder.lock):
        return ""
    return next((line.strip() for line in [*_accepted(folder)[1], *_unreadable(folder)]), "")


def logs(folder: RunFolder, host: str | None) -> Iterator[str]:
    """Yield the lines of every attempt's logs, each under a heading. Raises UsageError: no logs, or no such host."""
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
            yield not_read([path], folder.path)
        elif host in (None, path.stem):
            empty = "" if path.stat().st_size else ": no lines"
            yield f"==> attempt {path.parent.name}, {path.stem}{empty} <=="
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file)


def _accepted(folder: RunFolder) -> tuple[acceptance.Acceptance | None, list[str]]:
    """Return the acceptance that gives the run its result, if there is one, and lines about what was altered."""
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
    except AlteredError:  # without an intact result nothing can be checked; _unreadable names it
        return False


def _hosts(plan: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    hosts = [f"{node.get('host')} ({node.get('nproc_per_node')})" for node in nodes_of(plan)]
    if hosts:
        return f"{', '.join(hosts)}, {plan.get('launcher', '-')}"
    cluster = config.get("cluster")
    launcher = cluster.get("launcher") if isinstance(cluster, Mapping) else None
    return f"not asked yet, {launcher}" if launcher else "not asked yet"


def _unreadable(folder: RunFolder) -> list[str]:
    lines = []
    for read in (folder.read_key, folder.read_summary, folder.read_result):
        try:
            read()
        except AlteredError as error:
            lines.append(f"  {error.what}")
    return lines


def _bad_metrics(folder: RunFolder) -> list[tuple[int, str]]:
    path = folder.path / run_folder.METRICS
    return [(number, "") for number in metrics_file.bad_lines(path)] if path.is_file() else []


def latest(folder: RunFolder) -> metrics_file.MetricsRow | None:
    """Return the last row of metrics.jsonl with the last value of each metric; None: no row, or an altered file."""
    rows = [] if _curves_altered(folder) else ranks.last_rows(folder)
    return (
        replace(rows[-1], metrics={name: row.metrics[name] for row in rows for name in row.metrics}) if rows else None
    )


def _metrics(folder: RunFolder, *, training: bool) -> list[str]:
    last = latest(folder)
    if last is None:
        ours = "the ranks import torch and read the data"
        doing = ranks.hosts_awaited(folder)
        doing = doing or (ours if folder.program.is_ours else ranks.no_metric(folder, quoted=True))
        return [f"  step     none yet: {doing}"] if training else []
    doing = f", {last.doing}" if training and last.attempt in journal.known_attempts(folder.path)[-1:] else ""
    epoch = "" if last.epoch is None else f", epoch {last.epoch}"
    lines = [f"  step     {last.step}{epoch}{doing}"]
    return lines + [f"  {name:<20} {quantity(name, value)}" for name, value in sorted(last.metrics.items())]


def _ranks(folder: RunFolder, attempt: int, *, training: bool) -> list[str]:
    rows, notes = ranks.read(folder.path / run_folder.ATTEMPTS / str(attempt))
    lines = [f"  ranks    {ranks.lagging(rows)}"] if rows and training else []
    return lines + [f"  {note}" for note in notes]
