"""``python -m trainers.script.stored_logs RUN_DIR PATTERN [EARLIER]``: metrics of a finished run, from its logs.

Adds the matches of ``program.metrics_pattern`` in the stored lines of rank 0 to metrics.jsonl and summary.json, and
removes the metrics of the earlier pattern. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.script.files import sha256_file, write_sealed, write_text
from trainers.script.metrics_file import Row
from trainers.script.printed import of_rank_0
from trainers.script.settings import names as names_in
from trainers.script.sources import PatternLines


def main(run_dir: Path, pattern: str, earlier: str = "") -> None:
    """Rewrite both files. Raises OSError; ValueError: the folder isn't that of a script that has ended well."""
    metrics, summary = run_dir / run_folder.METRICS, run_dir / run_folder.SUMMARY
    known: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    del known["sha256"]
    names = {*re.compile(pattern).groupindex, *(re.compile(earlier).groupindex if earlier else ())}
    old = [row for line in metrics.read_text(encoding="utf-8").splitlines() if (row := _without(line, names))]
    attempt = old[-1]["attempt"] if old else _run_id(run_dir)
    parsed = [row.as_json(attempt) for row in _rows(run_dir, pattern)]
    new = [row for row in parsed if row["metrics"]]
    last = {name: value for row in (*old, *new) for name, value in row["metrics"].items()}
    steps = [row["step"] for row in (*old, *new)]
    write_text(metrics, "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in (*old, *new)))
    digests = {**known["outputs_sha256"], metrics.name: sha256_file(metrics)}
    write_sealed(summary, {**known, "steps": max(steps, default=None), "metrics": last, "outputs_sha256": digests})


def _without(line: str, names: set[str]) -> dict[str, Any] | None:
    """Return a row of metrics.jsonl without the metrics of these names; None if nothing is left."""
    row: dict[str, Any] = json.loads(line)
    row["metrics"] = {name: value for name, value in row["metrics"].items() if name not in names}
    return row if row["metrics"] else None


def _rows(run_dir: Path, pattern: str) -> list[Row]:
    """Return the rows in the log of the last attempt; of all attempts for a script that resumes from checkpoints."""
    program: dict[str, Any] = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))["program"]
    numbers = sorted(int(path.name) for path in (run_dir / run_folder.ATTEMPTS).iterdir() if path.name.isdigit())
    if "resume" not in names_in(json.dumps([program.get("args"), program.get("env")])):
        numbers = numbers[-1:]
    rows, pattern_lines = list[Row](), PatternLines(pattern, run_dir)
    for number in numbers:
        fresh = list(_of_attempt(pattern_lines, run_dir, number))
        rows = [row for row in rows if not fresh or row.step < fresh[0].step] + fresh
    return rows


def _of_attempt(pattern_lines: PatternLines, run_dir: Path, number: int) -> Iterator[Row]:
    """Yield the rows of one attempt. Lines have no times: they are spread from the launch to the end of the log."""
    for log in sorted((run_dir / run_folder.ATTEMPTS / str(number)).glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        end_s = log.stat().st_mtime
        began_s = min(end_s, (run_dir / run_folder.PLAN).stat().st_mtime)
        for at, line in enumerate(lines, 1):
            if text := of_rank_0(line):
                time_s = began_s + (end_s - began_s) * at / len(lines)
                yield from pattern_lines.in_line(text, time_s)


def _run_id(run_dir: Path) -> str:
    plan: Mapping[str, Any] = json.loads((run_dir / run_folder.PLAN).read_text(encoding="utf-8"))
    return str(plan.get("run_id", ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
