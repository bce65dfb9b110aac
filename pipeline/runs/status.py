"""How far a run has come and what its hosts said, as its folder tells it. Reads only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.core import locks
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.specs import UNDER_WAY, State
from pipeline.runs import acceptance, attempts, checkpoints, journal, meeting, metrics_file, rank_beats
from pipeline.runs.contents import nodes_of, what
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import ALTERED, WITHOUT_RESULT, altered_target, intact_parts
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder

_TAIL_BYTES = 64 << 10  # enough for the last lines of metrics.jsonl


def status(folder: RunFolder) -> str:
    """State, attempt, hosts, step, last metrics, a line each."""
    entries = journal.read(folder.journal)
    config, plan = folder.read_json(run_folder.CONFIG) or {}, folder.read_json(run_folder.PLAN) or {}
    last = entries[-1] if entries else None
    accepted, altered = _accepted(folder)
    doubted = bool(altered) and not locks.is_held(folder.lock)
    if doubted:
        config = intact_parts(folder).get("config", {})
    lines = [f"{folder.key}  {'?' if doubted and not config else what(config)}"]
    if accepted is not None:
        lines.append("  state    ACCEPTED")
    elif doubted:
        lines.append(f"  state    {ALTERED}; the same doit train makes it again")
    elif last is None:
        begun = locks.is_held(folder.lock)
        lines.append("  state    PLANNED, " + ("its command is preparing it" if begun else "not started"))
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.time))
        orphaned = last.state in UNDER_WAY and not locks.is_held(folder.lock)
        lost = "; no command is attached: the same doit train goes on with it" if orphaned else ""
        lines.append(f"  state    {last.state} since {when}, attempt {last.attempt}{lost}")
        if last.state is State.FINISHED and not folder.result.is_file() and not locks.is_held(folder.lock):
            lines[-1] += f"; {WITHOUT_RESULT}"
        if last.detail:
            lines.append(f"  detail   {last.detail.splitlines()[0]}")
    lines.append(f"  hosts    {_hosts(plan, config)}")
    training = last is not None and last.state is State.RUNNING and locks.is_held(folder.lock)
    lines += [] if _curves_altered(folder) else _metrics(folder, training=training)
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
    """Files among those of a script's run that came when it was finished: nobody's outputs."""
    recorded = folder.recorded_files()
    return [name for name in folder.program.files(folder.path) if name not in recorded] if recorded else []


def under_way(folder: RunFolder) -> str:
    """What the ranks of the newest attempt are at, as rank 0's last metrics tell: words that follow "still".

    Until they have written any, the metrics are those of an attempt before, perhaps of later steps than its checkpoint.
    """
    rows = _last_rows(folder)
    if rows and rows[-1].attempt in attempts.known(folder.path)[-1:]:
        return f"{rows[-1].doing}, last reported step {rows[-1].step}"
    if (absent := meeting.awaited(folder)) is not None:
        return absent
    if not folder.program.is_ours:
        return f"running the script; {_no_metric(folder)}"
    if not rows:
        return "waiting for the first step; the ranks import torch and read the data"
    step = checkpoints.newest_step(folder.path)
    start = f"checkpoint of step {step}" if step else "beginning"
    return f"starting again from the {start}; the ranks import torch and read the data"


def _no_metric(folder: RunFolder) -> str:
    """What shows that a script goes on before it has logged a metric, which it may never do: its newest line."""
    numbers = (int(path.name) for path in folder.path.glob("attempts/*") if path.name.isdigit())
    logs = folder.path.glob(f"attempts/{max(numbers, default=0)}/*.log")
    ages_s = [time.time() - seen.st_mtime for path in logs if (seen := path.stat()).st_size]
    line = f"its last line came {max(0.0, min(ages_s)):.0f} s ago" if ages_s else "no line either"
    return f"no metric so far, {line}"


def altered(folder: RunFolder) -> str:
    """What of a run that no command is at isn't what was written, or ''."""
    if locks.is_held(folder.lock):
        return ""
    return next((line.strip() for line in [*_accepted(folder)[1], *_unreadable(folder)]), "")


def logs(folder: RunFolder, host: str | None) -> Iterator[str]:
    """The lines of every attempt's logs, each log under a heading. Raises UsageError: no logs, or no such host."""
    attempts = folder.path / run_folder.ATTEMPTS
    found = sorted(attempts.glob("*/*.log"), key=lambda path: (int(path.parent.name), path.name))
    if not found:
        raise _without_logs(folder)
    hosts = {path.stem for path in found}
    if host is not None and host not in hosts:
        raise UsageError(f"host={host}: run {folder.key} has no log of it; {suggestion(host, hosts)}")
    for path in found:
        if host in (None, path.stem):
            empty = "" if path.stat().st_size else ": no lines"
            yield f"==> attempt {path.parent.name}, {path.stem}{empty} <=="
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from (line.rstrip("\n") for line in file)


def _without_logs(folder: RunFolder) -> UsageError:
    started = [entry.attempt for entry in journal.read(folder.journal) if entry.state is State.RUNNING]
    if not started:
        return UsageError(f"run {folder.key} has no logs: none of its attempts was started")
    return UsageError(
        f"run {folder.key} has no logs: attempt {max(started)} was started, but no log is left in "
        f"{folder.path / 'attempts'}",
        hint="another copy of the run folder has them",
    )


def _accepted(folder: RunFolder) -> tuple[acceptance.Acceptance | None, list[str]]:
    """By whose word another run holds for this one; and what is said where that word, the result or a file that it
    names was altered."""
    try:
        result, accepted = acceptance.standing(folder)
    except AlteredError as error:
        return None, [f"  {error.what}"]
    if result is None or accepted is not None or not result.sealed:
        return accepted, []
    why = folder.stale_because(result.digest)
    return None, [] if why is None else [f"  {folder.path}: {why}"]


def _curves_altered(folder: RunFolder) -> bool:
    """Of a finished run; one that is under way writes them."""
    try:
        return bool(altered_target(folder, folder.read_result(), (run_folder.METRICS,)))
    except AlteredError:  # nothing vouches for them, and the result's own line says so
        return False


def _hosts(plan: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """``node0 (2), node1 (2), pssh``; before there is a plan, what the configuration says of them."""
    hosts = [f"{node.get('host')} ({node.get('nproc_per_node')})" for node in nodes_of(plan)]
    if hosts:
        return f"{', '.join(hosts)}, {plan.get('launcher', '-')}"
    cluster = config.get("cluster")
    launcher = cluster.get("launcher") if isinstance(cluster, Mapping) else None
    return f"not asked yet, {launcher}" if launcher else "not asked yet"


def _unreadable(folder: RunFolder) -> list[str]:
    """The files of which this Paceline knows that they aren't what was written."""
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


def _metrics(folder: RunFolder, *, training: bool) -> list[str]:
    """Step and epoch of the last line, and the newest value of each metric among the last lines."""
    rows = _last_rows(folder)
    if not rows:
        first = "the ranks import torch and read the data" if folder.program.is_ours else _no_metric(folder)
        doing = meeting.awaited(folder) or first
        return [f"  step     none yet: {doing}"] if training else []
    last, metrics = rows[-1], {name: value for row in rows for name, value in row.metrics.items()}
    doing = f", {last.doing}" if training and last.attempt in attempts.known(folder.path)[-1:] else ""
    epoch = "" if last.epoch is None else f", epoch {last.epoch}"
    lines = [f"  step     {last.step}{epoch}{doing}"]
    return lines + [f"  {name:<20} {value:.6g}" for name, value in sorted(metrics.items())]


def _ranks(folder: RunFolder, attempt: int, *, training: bool) -> list[str]:
    """Where the ranks are while they train, and who held them up."""
    told, notes = rank_beats.read(folder.path / run_folder.ATTEMPTS / str(attempt))
    lines = [f"  ranks    {rank_beats.lagging(told)}"] if told and training else []
    return lines + [f"  {note}" for note in notes]


def _last_rows(folder: RunFolder) -> list[metrics_file.MetricsRow]:
    path = folder.path / run_folder.METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        rows = [metrics_file.parse(line) for line in file.read().splitlines()]
    return [row for row in rows if row is not None]  # the first may be cut, and the last still being written
