"""Metrics that ``program.metrics_pattern`` finds in the logs of a finished run, for a pattern that was set later.

``python -m trainers.script.metrics.stored_logs RUN_DIR PATTERN [EARLIER_PATTERN]``
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.core.files import sha256_file
from trainers.script.files import write_sealed, write_text
from trainers.script.metrics.metrics_file import Row
from trainers.script.metrics.printed import spread_time, text_of_rank_0
from trainers.script.metrics.sources import PatternLines
from trainers.script.settings import names as names_in


def add_matches(run_dir: Path, pattern: str, earlier_pattern: str = "") -> None:
    """Add the matches of a pattern in a finished run's logs to metrics.jsonl and summary.json.

    The metrics of ``earlier_pattern`` are removed.

    Raises:
        OSError, ValueError: the folder isn't that of a script that has ended well, or can't be written.
    """
    metrics, summary = run_dir / run_folder.METRICS, run_dir / run_folder.SUMMARY
    results = _json(summary)
    del results["sha256"]  # the seal, which is made anew
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
