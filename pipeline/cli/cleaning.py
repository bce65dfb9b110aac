"""`doit clean`: the runs that may go and what each frees, shown, asked about and removed."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli import clean_guards as guards
from pipeline.cli.clean_rules import Rules, ranks, rules_of, superseded, why_chosen
from pipeline.cli.listing import day, of_state
from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import relative, session
from pipeline.cli.wanted import config_of, experiments_of, matches, started_with, wanted_values
from pipeline.core import leftovers
from pipeline.core.errors import PacelineError, UsageError, os_reason, suggestion
from pipeline.core.heartbeat import Heartbeat
from pipeline.core.specs import State
from pipeline.core.tables import aligned, counted, file_size, first_of
from pipeline.runs import index, removal
from pipeline.runs.disk_usage import measured
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import Row
from pipeline.runs.result import AlteredError
from pipeline.sweep.report import MINIMIZE, direction_of
from trainers.contract import run_folder

_MOST_KEYS = 3  # in a line that says of several runs why they stay


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run that the rules choose: ``why``, what its removal frees in ``bytes``, and why it ``stays`` or ''."""

    folder: RunFolder
    row: Row
    why: str
    bytes: int
    stays: str


def clean() -> None:
    """Raises UsageError: a word that no run can be chosen by. PacelineError: a run can't be removed."""
    options, runs_dir = session().asked.options, session().config.runs_dir
    if is_on(options, "hosts"):
        from pipeline.cli.cleaning_hosts import clean_hosts

        clean_hosts(options)
        return
    if is_on(options, "steps"):
        from pipeline.cli.cleaning_steps import clean_steps

        clean_steps(options)
        return
    rules, confirmed = rules_of(options), is_on(options, "yes")
    with Heartbeat(note) as heartbeat:
        heartbeat.doing("removing what killed commands have left")
        for path in leftovers.remove([runs_dir]):
            say(f"removed {path.name}, which a killed command has left")
        heartbeat.doing("counting the files of the runs")
        items = _chosen(runs_dir, rules)
    going = [item for item in items if not item.stays]
    if going:
        say(_table(going))
    for line in _staying([item for item in items if item.stays]):
        say(line)
    if not going:
        say(f"nothing to remove under {relative(runs_dir)}")
    elif confirmed or agreed(_amount(going, rules)):
        _remove(going, runs_dir, rules)


def agreed(amount: str) -> bool:
    """Whether the person wants it removed; without one at a terminal, how to say so is said."""
    if not (os.isatty(0) and os.isatty(1)):
        say(f"nothing was removed; to remove {amount}: {shlex.join(['doit', *sys.argv[1:], 'yes=1'])}")
        return False
    print(f"remove {amount}? [y/N] ", end="", flush=True)
    wanted = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not wanted:
        say("nothing was removed")
    return wanted


# ------------------------------------------------------------------------------------------- what is looked up
def _chosen(runs_dir: Path, rules: Rules) -> list[Item]:
    rows = index.rows(runs_dir)
    newer = _superseded(runs_dir, rows)
    words = session().asked.overrides
    wanted, experiments = wanted_values(words, session().config.resolved), experiments_of(words)
    rows = of_state(rows, rules.state, index.STATES)
    rows = [row for row in rows if started_with(RunFolder(runs_dir / row.key), experiments)]
    if wanted:
        rows = [row for row in rows if _has(runs_dir, row, wanted)]
    if rules.checkpoints:
        rows = [row for row in rows if row.state == State.FINISHED]
    rank = _ranks(runs_dir, rows, rules) if rules.keep_best is not None else {}
    needs, now = guards.needed(runs_dir), time.time()
    whys = [why_chosen(row, rules, newer=newer.get(row.key), rank=rank.get(row.key), now=now) for row in rows]
    items = [
        _item(RunFolder(runs_dir / row.key), row, why, rules, needs) for row, why in zip(rows, whys, strict=True) if why
    ]
    return [item for item in items if item.bytes or not rules.checkpoints]


def _has(runs_dir: Path, row: Row, wanted: Mapping[str, object]) -> bool:
    return matches(config_of(RunFolder(runs_dir / row.key), wanted, altered=row.state == index.ALTERED), wanted)


def _item(folder: RunFolder, row: Row, why: str, rules: Rules, needs: Mapping[str, str]) -> Item:
    places = removal.checkpoint_files(folder) if rules.checkpoints else [folder.path]
    stays = guards.in_use(folder) or guards.objection(folder, row, needs, result_stays=rules.checkpoints)
    return Item(folder=folder, row=row, why=why, bytes=sum(measured(path).bytes for path in places), stays=stays)


def _superseded(runs_dir: Path, rows: Sequence[Row]) -> dict[str, str]:
    """Key → that of the run that supersedes it and is intact: another one can't take its place."""
    parts = {row.key: RunFolder(runs_dir / row.key).read_json(run_folder.KEY) or {} for row in rows}
    found = superseded(rows, parts)
    intact = {key for key in set(found.values()) if _is_intact(RunFolder(runs_dir / key))}
    return {key: by for key, by in found.items() if by in intact}


def _is_intact(folder: RunFolder) -> bool:
    try:
        key = folder.read_key()
    except AlteredError:
        return False
    return key is not None and folder.stale_because(key.digest) is None


def _ranks(runs_dir: Path, rows: Sequence[Row], rules: Rules) -> dict[str, int]:
    """The places of the finished runs that have the metric. Raises UsageError: none has it."""
    results = {row.key: RunFolder(runs_dir / row.key).read_result() for row in rows if row.state == State.FINISHED}
    metrics = {key: result.metrics for key, result in results.items() if result is not None}
    values = {key: known[rules.by] for key, known in metrics.items() if rules.by in known}
    if metrics and not values:
        names = {name for known in metrics.values() for name in known}
        raise UsageError(f"by={rules.by}: no finished run has it; {suggestion(rules.by, names)}")
    if (direction := direction_of(rules.by)) is None:  # a wrong guess would remove the best
        raise UsageError(
            f"by={rules.by}: its name doesn't tell whether more or less of it is better; one that ends in score, "
            "accuracy, loss, error or time does"
        )
    return ranks(values, least_first=direction == MINIMIZE)


# ------------------------------------------------------------------------------------------- what removes
def _remove(items: Sequence[Item], runs_dir: Path, rules: Rules) -> None:
    """Raises PacelineError: the system refuses it, at that run."""
    remove = removal.remove_checkpoints if rules.checkpoints else removal.remove_run
    needs = guards.needed(runs_dir)  # one may have begun since they were shown
    gone: list[Item] = []
    with Heartbeat(note) as heartbeat:
        for item in items:
            heartbeat.doing(f"removing {item.row.key}; {len(gone)} of {len(items)} are gone")
            try:
                why = remove(item.folder, _objection(item, needs, rules))
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


def _objection(item: Item, needs: Mapping[str, str], rules: Rules) -> Callable[[], str]:
    """Looked up again behind the run's lock: another command may have worked on it since it was shown."""

    def objection() -> str:
        if not item.folder.path.is_dir():
            return "another command has removed it"
        if index.row(item.folder) != item.row:
            return "it has changed since it was shown"
        return guards.objection(item.folder, item.row, needs, result_stays=rules.checkpoints)

    return objection


# ------------------------------------------------------------------------------------------- pure
def _amount(items: Sequence[Item], rules: Rules) -> str:
    what = "the checkpoints of " if rules.checkpoints else ""
    return f"{what}{counted(len(items), 'run')}, {file_size(sum(item.bytes for item in items))}"


def _table(items: Sequence[Item]) -> str:
    rows = [("run", "state", "when", "what", "frees", "why")]
    for item in items:
        row = item.row
        rows.append((row.key, row.state, day(row.unix_time), row.what, file_size(item.bytes), item.why))
    return aligned(rows)


def _staying(items: Sequence[Item]) -> list[str]:
    """Which runs stay although they were chosen, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for item in items:
        by_reason.setdefault(item.stays, []).append(item.row.key)
    return [
        f"{first_of(keys, _MOST_KEYS)} {'stays' if len(keys) == 1 else 'stay'}: {why}"
        for why, keys in by_reason.items()
    ]
