"""The recorder of a script's metrics, in the script's parent on node 0 (``trainers.script.start``): it collects the
rows of all sources in metrics.jsonl, also those that a killed parent could not record. Standard library only.

``python -m trainers.script.metrics.recorder RUN_DIR PATTERN [EARLIER_PATTERN]`` adds metrics from a finished run's
logs."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainers.contract import run_folder
from trainers.core.files import sha256_file
from trainers.script.files import work_folder, write_json, write_sealed, write_text
from trainers.script.metrics.metrics_file import LeftOut, MetricsFile, Row
from trainers.script.metrics.printed import printed_rows, spread_time, text_of_rank_0
from trainers.script.metrics.sources import (
    CsvTables,
    EventFiles,
    JsonLines,
    Logged,
    MlflowFiles,
    PatternLines,
    WatchedFiles,
)
from trainers.script.settings import ScriptConfig
from trainers.script.settings import names as names_in

_SHOWN = 8

_Value = tuple[int, int | None, str, float]
"""Step, epoch, last part of the metric's name, number. The part before it depends on the order of the files."""


def earlier_log(logged: Path) -> Path:
    """Return the file of an earlier attempt's log, which may hold rows that were not recorded before its end."""
    return logged.parent.with_name(f"{logged.parent.name}-{logged.name}")


_NO_METRIC = (
    "the script logged no metric; what is recorded: paceline.log(step, loss=…); in its working directory, {run} and "
    "{checkpoints} TensorBoard files, *.jsonl with step, *.csv with a column step or epoch; printed lines with "
    "'loss: 0.31'; those that program.metrics_pattern matches (the same command with it reads the log of this run)"
)


def _mlflow_store(logged: Path) -> Path:
    """Return the folder for a script that logs to MLflow by itself: next to ``logged``, the file of paceline.log."""
    return logged.with_name("mlflow")


def mlflow_variables(logged: Path) -> dict[str, str]:
    """Return variables for libraries that log to MLflow by themselves: not into the working directory."""
    return {"MLFLOW_TRACKING_URI": _mlflow_store(logged).as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}


class Source(Protocol):
    """A source of rows."""

    def rows(self, *, last: bool) -> Iterator[Row]:
        """Yield the rows since the last call; the ``last`` call comes when all writers have ended."""


class Recorder:
    """Records the metrics of one attempt. Call ``look`` regularly, the last time with ``last``."""

    def __init__(
        self,
        settings: ScriptConfig,
        run_dir: Path,
        *,
        logged: Path,
        log_dir: Path | None,
        attempt: str,
        resumes: bool,
        aside: Path,
        say: Callable[[str], None],
    ) -> None:
        """``logged``: file of the module paceline; ``log_dir``: torchrun's; others: see MetricsFile."""
        self.metrics = MetricsFile(run_dir / run_folder.METRICS, aside=aside, say=say, attempt=attempt, resumes=resumes)
        self._logged = Logged(logged, lambda: self.metrics.step)
        # rows that the parent of the last attempt did not record before it was killed
        self.metrics.restore(Logged(earlier_log(logged), lambda: self.metrics.step).rows(last=True))
        earlier_log(logged).unlink(missing_ok=True)
        # without a checkpoint this attempt begins at the first step
        if not resumes and not any(path.is_file() for path in (run_dir / run_folder.CHECKPOINTS).rglob("*")):
            self.metrics.set_aside()
        self._files = metric_files_of(run_dir)
        # the sizes before the script begins, for ``keep_unrecorded``
        sizes = {path.relative_to(run_dir).as_posix(): size for path, size in self._files.earlier.items()}
        write_json(work_folder(run_dir, 0) / run_folder.EARLIER, sizes)
        self._json, self._events = JsonLines(self._files), EventFiles(self._files)
        tables, mlflow = CsvTables(self._files), MlflowFiles(_mlflow_store(logged))
        self._sources: list[Source] = [self._logged, self._json, self._events, tables, mlflow]
        self.recorded = False  # whether this attempt has logged anything
        self._printed = log_dir if settings.metrics == "auto" and settings.metrics_pattern is None else None
        self._earlier_printed = work_folder(run_dir, 0) / run_folder.PRINTED
        self._saved = [work_folder(run_dir, 0), run_dir / run_folder.CHECKPOINTS, run_dir / run_folder.OUTPUTS]
        self._began_s = time.time()
        if settings.metrics_pattern is not None and log_dir is not None:
            self._sources.append(PatternLines(settings.metrics_pattern, log_dir))

    @property
    def was_pruned(self) -> bool:
        return self._logged.was_pruned

    def look(self, *, last: bool = False) -> None:
        """Record the rows since the last call. ``last``: the script has ended. Raises OSError."""
        self._files.refresh(last=last)
        for source in self._sources:
            for row in source.rows(last=last):
                self.metrics.append(row)
                self.recorded = True

    def read_printed(self) -> tuple[list[str], int]:
        """Record printed metrics, if there are no others; return their names, and the number of earlier rows."""
        if self._printed is None or self.metrics.step is not None:
            return [], 0
        rows = printed_rows(self._printed, self._began_s, self._earlier_printed, self._saved)
        self.metrics.restore(rows.earlier)
        for row in rows.own:
            self.metrics.append(row)
        names = dict.fromkeys(name for row in [*rows.earlier, *rows.own] for name in row.metrics)
        return list(names), len(rows.earlier)

    def notes(self, *, ended_well: bool) -> list[str]:
        """Return notes for the user about the metrics, when the script has ended."""
        left_out = _left_out_text(self.metrics.left_out)
        if (step := self.metrics.unstorable_step) is not None:
            left_out.append(f"metrics of a step of more than 64 bits were not recorded: step {step:.6g}")
        nothing = ended_well and self.metrics.step is None and not left_out
        lines = [*self._logged.notes, *self._json.notes, *self._events.notes, *left_out]
        return [_NO_METRIC, *lines] if nothing else lines


def _left_out_text(left_out: Mapping[str, LeftOut]) -> list[str]:
    """Return one line for all metrics, because a script whose loss is NaN logs it at each step."""
    if not left_out:
        return []
    each = [
        f"{name} {'once (' if some.count == 1 else f'{some.count:,} times (first '}{some.first} at step {some.step})"
        for name, some in left_out.items()
    ]
    more = f" and {len(each) - _SHOWN} more metrics" if len(each) > _SHOWN else ""
    return [f"values that are no finite numbers were not recorded: {', '.join(each[:_SHOWN])}{more}"]


# Rows that the last attempt did not record. The next attempt finds them behind the sizes that the files had when the
# last one began.


def metric_files_of(run_dir: Path, earlier: Mapping[Path, int] | None = None) -> WatchedFiles:
    """Return the files in which the script on node 0 may write metrics; ``earlier``: see WatchedFiles."""
    work = work_folder(run_dir, 0) / run_folder.WORK_COPY
    return WatchedFiles(run_dir / run_folder.OUTPUTS, run_dir / run_folder.CHECKPOINTS, work, earlier=earlier)


def keep_unrecorded(run_dir: Path) -> None:
    """Append rows that the last attempt did not record to its file of paceline.log. Raises OSError."""
    sizes_file, logged = work_folder(run_dir, 0) / run_folder.EARLIER, work_folder(run_dir, 0) / run_folder.LOGGED
    try:
        sizes = json.loads(sizes_file.read_text(encoding="utf-8"))
        earlier = {run_dir / name: int(size) for name, size in sizes.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return
    files, recorded = metric_files_of(run_dir, earlier), Counter(_recorded_values(run_dir / run_folder.METRICS))
    lines = []
    for source in (JsonLines(files), EventFiles(files), CsvTables(files)):
        for row in source.rows(last=False):
            if metrics := _unrecorded(row, recorded):
                logged_row = {"t": row.time_s, "step": row.step, "epoch": row.epoch, "metrics": metrics}
                lines.append(json.dumps(logged_row) + "\n")
    if lines:
        text = logged.read_text(encoding="utf-8", errors="replace") if logged.exists() else ""
        write_text(logged, text[: text.rfind("\n") + 1] + "".join(lines))  # without an unfinished last line
    sizes_file.unlink()


def _unrecorded(row: Row, recorded: Counter[_Value]) -> dict[str, float]:
    """Return the finite metrics of a row that are not recorded; each recorded one is removed from ``recorded``."""
    metrics = {}
    for name, number in row.metrics.items():
        value = (row.step, row.epoch, name.rpartition("/")[2], number)
        if recorded[value] > 0:
            recorded[value] -= 1
        elif math.isfinite(number):
            metrics[name] = number
    return metrics


def _recorded_values(metrics: Path) -> Iterator[_Value]:
    text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.exists() else ""
    for line in text.splitlines():
        try:
            row = json.loads(line)
            epoch = None if row["epoch"] is None else int(row["epoch"])
            for name, number in row["metrics"].items():
                yield int(row["step"]), epoch, name.rpartition("/")[2], float(number)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue


def add_matches(run_dir: Path, pattern: str, earlier_pattern: str = "") -> None:
    """Add a pattern's matches in a finished run's logs; ``earlier_pattern``'s go. Raises OSError, ValueError."""
    metrics, summary = run_dir / run_folder.METRICS, run_dir / run_folder.SUMMARY
    results = _json(summary)
    del results["sha256"]  # the digest of the old summary
    names = {*re.compile(pattern).groupindex, *(re.compile(earlier_pattern).groupindex if earlier_pattern else ())}
    kept = [row for line in metrics.read_text(encoding="utf-8").splitlines() if (row := _without(line, names))]
    attempt = kept[-1]["attempt"] if kept else _json(run_dir / run_folder.PLAN).get("run_id", "")
    matched = [row.as_json(attempt) for row in _matched_rows(run_dir, pattern)]
    rows = [*kept, *(row for row in matched if row["metrics"])]
    write_text(metrics, "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows))
    results["steps"] = max((row["step"] for row in rows), default=None)
    results["metrics"] = {name: value for row in rows for name, value in row["metrics"].items()}  # the newest of each
    results["outputs_sha256"] = {**results["outputs_sha256"], metrics.name: sha256_file(metrics)}
    write_sealed(summary, results)


def _without(line: str, names: set[str]) -> dict[str, Any] | None:
    """Return a row of metrics.jsonl without the metrics of these names; None if nothing is left."""
    row = json.loads(line)
    metrics = {name: value for name, value in row["metrics"].items() if name not in names}
    return {**row, "metrics": metrics} if metrics else None


def _matched_rows(run_dir: Path, pattern: str) -> list[Row]:
    """Return the rows in the log of the last attempt; of all attempts for a script that resumes from checkpoints."""
    program = _json(run_dir / run_folder.CONFIG)["program"]
    attempts = sorted(int(path.name) for path in (run_dir / run_folder.ATTEMPTS).iterdir() if path.name.isdigit())
    if "resume" not in names_in(json.dumps([program.get("args"), program.get("env")])):
        attempts = attempts[-1:]
    rows, pattern_lines = list[Row](), PatternLines(pattern, run_dir)
    for attempt in attempts:
        later = list(_rows_of_attempt(pattern_lines, run_dir, attempt))
        rows = [row for row in rows if not later or row.step < later[0].step] + later
    return rows


def _rows_of_attempt(pattern_lines: PatternLines, run_dir: Path, attempt: int) -> Iterator[Row]:
    """Yield the rows of one attempt. Lines have no times: they are spread from the launch to the end of the log."""
    for log in sorted((run_dir / run_folder.ATTEMPTS / str(attempt)).glob("*.log")):
        lines, end_s = log.read_text(encoding="utf-8", errors="replace").splitlines(), log.stat().st_mtime
        began_s = min(end_s, (run_dir / run_folder.PLAN).stat().st_mtime)
        for number, line in enumerate(lines, 1):
            if text := text_of_rank_0(line):
                yield from pattern_lines.rows_in_line(text, spread_time(began_s, end_s, number, len(lines)))


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


if __name__ == "__main__":
    add_matches(Path(sys.argv[1]), *sys.argv[2:])
