"""The metrics that a script has printed, as rows: for a script that reports none in another way.

Rows of earlier attempts stand before those of this attempt, up to the position at which it goes on.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainers.contract import run_folder
from trainers.script.files import write_text
from trainers.script.metrics.metrics_file import Row
from trainers.script.metrics.printed_line import PrintedLine, parse_line

_OF_RANK_0 = "0 | "
"""Prefix of rank 0's lines in the log of a host."""
_MOST_ROWS = 200_000
_MOST_BYTES = 64_000_000  # read from the end of a log


class TimedLine(NamedTuple):
    """A line with metrics, and when it was printed in unix seconds, as far as known."""

    time_s: float
    line: PrintedLine


class PrintedRows(NamedTuple):
    """The rows of earlier attempts that stay, and those of this attempt."""

    earlier: list[Row]
    own: list[Row]


def printed_rows(
    log_dir: Path, began_s: float, kept_lines: Path | None = None, saved: Sequence[Path] = ()
) -> PrintedRows:
    """Return the metrics that rank 0 printed. stdout comes before stderr.

    Lines have no times: they are spread from the start of the attempt to the end of each file.

    Args:
        log_dir: torchrun's, with files for each rank in ``*/attempt_*/<local rank>/``.
        began_s: the start of this attempt in unix seconds.
        kept_lines: the file that ``keep_lines`` wrote; None or a missing file: there was no earlier attempt.
        saved: folders in which the script's checkpoints may lie.
    """
    steps_per_epoch = _steps_per_epoch(saved)
    attempts = _kept_attempts(kept_lines) if kept_lines is not None else []
    streams = list[list[TimedLine]]()
    for path in sorted(log_dir.glob("*/attempt_*/0/std*.log"), reverse=True):
        with suppress(OSError):
            streams.append([*_timed_lines(_tail(path).split("\n"), began_s, path.stat().st_mtime)])
    earlier_rows, own_rows = list[Row](), list[Row]()
    # an attempt that had nothing left to train prints nothing: lines of earlier attempts count all the same
    for own_lines in [lines for lines in streams if lines] or [[]]:
        names = {name for item in own_lines for name in item.line.metrics}
        earlier_lines = list[TimedLine]()
        for attempt in attempts:
            alike = [item for item in attempt if not own_lines or names & item.line.metrics.keys()]
            earlier_lines = [*_lines_before(alike, earlier_lines), *alike]
        earlier_lines = _lines_before(own_lines, earlier_lines)
        numbered = [*_rows_with_steps([*earlier_lines, *own_lines], steps_per_epoch)]
        earlier_rows += numbered[: len(earlier_lines)]
        own_rows += numbered[len(earlier_lines) :]
    return PrintedRows(earlier_rows[:_MOST_ROWS], own_rows[:_MOST_ROWS])


def keep_lines(run_dir: Path, began_s: Mapping[int, float]) -> None:
    """Store the lines with metrics that earlier attempts printed, for the rows of the next attempt. Raises OSError.

    Args:
        began_s: number of an attempt → its start in unix seconds.
    """
    kept = list[str]()
    for attempt, start_s in sorted(began_s.items()):
        for log in sorted((run_dir / run_folder.ATTEMPTS / str(attempt)).glob("*.log")):
            texts = [text_of_rank_0(line) for line in _tail(log).split("\n")]
            for number, text in enumerate(texts, 1):
                if parse_line(_last_state(text)).metrics:
                    time_s = spread_time(start_s, log.stat().st_mtime, number, len(texts))
                    kept.append(json.dumps({"attempt": attempt, "t": time_s, "text": text}) + "\n")
    if kept:
        path = run_dir / run_folder.WORK / "node0" / run_folder.PRINTED
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(kept[-_MOST_ROWS:]))


def _kept_attempts(path: Path) -> list[list[TimedLine]]:
    """Return the lines of each earlier attempt that ``keep_lines`` stored; none if the file is missing or damaged."""
    attempts: dict[int, list[TimedLine]] = {}
    try:
        entries = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for entry, line in zip(entries, _parsed_lines(entry["text"] for entry in entries), strict=True):
            attempts.setdefault(int(entry["attempt"]), []).append(TimedLine(float(entry["t"]), line))
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [lines for _, lines in sorted(attempts.items())]


def text_of_rank_0(line: str) -> str:
    """Return the text of rank 0 in a line of a host's log; '' for another one, and for a progress bar under way."""
    is_whole = line.startswith(_OF_RANK_0) and not line.endswith(run_folder.UNFINISHED)
    return line.removeprefix(_OF_RANK_0) if is_whole else ""


def spread_time(began_s: float, end_s: float, number: int, count: int) -> float:
    """Return the time of line ``number`` (from 1) of ``count``, spread evenly over the time of its log."""
    return began_s + max(0.0, end_s - began_s) * number / count


def _timed_lines(texts: Sequence[str], began_s: float, end_s: float) -> Iterator[TimedLine]:
    for number, line in enumerate(_parsed_lines(texts), 1):
        if line.metrics:
            yield TimedLine(spread_time(began_s, end_s, number, len(texts)), line)


def _parsed_lines(texts: Iterable[str]) -> Iterator[PrintedLine]:
    """Parse lines one after another, as a line may sum up those before it."""
    split = ""
    for text in texts:
        line = parse_line(_last_state(text), split)
        split = line.split if line.metrics else split
        yield line


def _last_state(text: str) -> str:
    """Return the text behind the last carriage return, the last state of a progress bar."""
    return text.split("\r")[-1]


def _tail(path: Path) -> str:
    """Return the last part of a log, which may be larger than memory. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).decode(errors="replace")


def _lines_before(new: Sequence[TimedLine], old: Sequence[TimedLine]) -> list[TimedLine]:
    """Return the lines of ``old`` before the position at which ``new`` begins; none if lines have no positions."""
    if not new:
        return [*old]
    begin = next((item.line.position for item in new if item.line.position is not None), None)
    positions = list[tuple[float, int]]()
    for item in old:
        positions.append(item.line.position or (positions[-1] if positions else (0, 0)))
    if begin is None or positions != sorted(positions):
        return []
    return [item for item, position in zip(old, positions, strict=True) if position < begin]


def _steps_per_epoch(folders: Sequence[Path]) -> float | None:
    """Return the steps of an epoch from the newest trainer_state.json of transformers; None if there is none."""
    states = [path for folder in folders for path in folder.rglob("trainer_state.json")]
    try:
        state = json.loads(max(states, key=lambda path: path.stat().st_mtime_ns).read_text(encoding="utf-8"))
        return float(state["global_step"] / state["epoch"])
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):  # ValueError: also of no states
        return None


def _rows_with_steps(items: Sequence[TimedLine], steps_per_epoch: float | None) -> Iterator[Row]:
    """Yield a row for each line, with the first of these numbers that all lines have and that never falls.

    The step in the line; epochs passed × steps of an epoch; epoch and step; the epoch; else the lines are counted.
    """
    lines = _with_positions(item.line for item in items)
    # a step of its epoch, of which only one was printed, doesn't grow
    counts_anew_in_each_epoch = any(
        old.epoch != new.epoch and (old.step or 0) >= (new.step or 0) for old, new in itertools.pairwise(lines)
    )
    steps_of_epoch = max((line.steps for line in lines if line.steps), default=0)

    def by_step(line: PrintedLine) -> int | None:
        return None if counts_anew_in_each_epoch else line.step

    def by_epochs(line: PrintedLine) -> int | None:
        return None if line.epochs is None or steps_per_epoch is None else round(line.epochs * steps_per_epoch)

    def by_epoch_and_step(line: PrintedLine) -> int | None:
        return None if line.epoch is None or not steps_of_epoch else line.epoch * steps_of_epoch + (line.step or 0)

    def by_epoch(line: PrintedLine) -> int | None:
        return line.epoch if line.epochs is None or line.epochs.is_integer() else None

    numbers: Sequence[int] = range(1, len(lines) + 1)
    for number_of in (by_step, by_epochs, by_epoch_and_step, by_epoch):
        known = [number for line in lines if (number := number_of(line)) is not None]
        if len(known) == len(lines) and known == sorted(known):
            numbers = known
            break
    for item, line, number in zip(items, lines, numbers, strict=True):
        yield Row(time_s=item.time_s, step=number, epoch=line.epoch, metrics=dict(line.metrics))


def _with_positions(lines: Iterable[PrintedLine]) -> list[PrintedLine]:
    """Give each line without a position, such as an evaluation behind an epoch, the position of the line before."""
    placed: list[PrintedLine] = []
    for line in lines:
        before = placed[-1] if placed else PrintedLine({})
        if line.epoch is None:
            line = replace(line, epoch=before.epoch, epochs=before.epochs)
        if line.step is None and line.epoch == before.epoch:
            line = replace(line, step=before.step, steps=before.steps)
        placed.append(line)
    return placed
