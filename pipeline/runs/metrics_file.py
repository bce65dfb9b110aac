"""The two files of metrics in a run folder, with one JSON object per line: metrics.jsonl, which rank 0 writes and this
module reads, and system_metrics.jsonl, which this module writes from the hosts' heartbeats: how busy the hosts are."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pipeline.runs import journal
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, Usage

PREFIX = "system/"
EVERY_S = 10.0  # as MLflow itself does
_MOST_ROWS = 360  # the interval is at least the attempt's age divided by it: the file of a long training stays small
_MB = 1e6  # MLflow's megabytes


class SystemMetrics:
    """Writes system_metrics.jsonl during an attempt: the mean of each host's heartbeats, every EVERY_S seconds. After
    an hour the interval grows: it is at least 1/360 of the attempt's age."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / run_folder.SYSTEM_METRICS
        self._rows: Counter[str] | None = None  # rows of each host in the file; None: not counted yet
        self._first: dict[str, Usage] = {}
        self._samples: dict[str, list[Usage]] = {}
        self._due: dict[str, float] = {}
        self._began: float | None = None  # unix time of the first heartbeat

    def add(self, beat: NodeBeat, unix_time: float) -> None:
        """Add a heartbeat, and write a row if one is due. A full disk or a removed folder is reported elsewhere."""
        if beat.usage is None:
            return
        self._first.setdefault(beat.host, beat.usage)
        samples = self._samples.setdefault(beat.host, [])
        samples.append(beat.usage)
        if unix_time < self._due.get(beat.host, 0.0):
            return
        self._began = unix_time if self._began is None else self._began
        self._due[beat.host] = unix_time + max(EVERY_S, (unix_time - self._began) / _MOST_ROWS)
        with suppress(OSError):
            self._write(beat.host, unix_time, mean_metrics(beat.host, self._first[beat.host], samples))
        samples.clear()

    def _write(self, host: str, unix_time: float, values: dict[str, float]) -> None:
        if self._rows is None:  # the first row of this attempt: earlier ones may have written some, or half of one
            cut_torn_line(self._path)
            self._rows = _rows_by_host(self._path)
        line = {"t": round(unix_time, 3), "host": host, "step": self._rows[host], "epoch": None, "metrics": values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._rows[host] += 1


def mean_metrics(host: str, first: Usage, samples: Sequence[Usage]) -> dict[str, float]:
    """Return metric → mean of a host's samples, under MLflow's names; for network counters, growth since ``first``."""
    last = samples[-1]
    by_name = {
        "cpu_utilization_percentage": 100 * fmean(one.cpu for one in samples),
        "system_memory_usage_megabytes": fmean(one.memory_bytes for one in samples) / _MB,
        "system_memory_usage_percentage": 100 * fmean(one.memory_bytes / one.memory_total_bytes for one in samples),
        "network_receive_megabytes": max(0, last.received_bytes - first.received_bytes) / _MB,
        "network_transmit_megabytes": max(0, last.sent_bytes - first.sent_bytes) / _MB,
    }
    if used_and_free := last.disk_bytes + last.disk_free_bytes:
        by_name["disk_usage_percentage"] = 100 * last.disk_bytes / used_and_free
        by_name["disk_usage_megabytes"] = last.disk_bytes / _MB
        by_name["disk_available_megabytes"] = last.disk_free_bytes / _MB
    for number in range(min(len(one.gpus) for one in samples)):
        gpus = [one.gpus[number] for one in samples]
        by_name[f"gpu_{number}_utilization_percentage"] = 100 * fmean(gpu.busy for gpu in gpus)
        by_name[f"gpu_{number}_memory_usage_megabytes"] = fmean(gpu.memory_bytes for gpu in gpus) / _MB
        share = fmean(gpu.memory_bytes / max(1, gpu.memory_total_bytes) for gpu in gpus)
        by_name[f"gpu_{number}_memory_usage_percentage"] = 100 * share
    return {f"{PREFIX}{host}/{name}": round(value, 1) for name, value in by_name.items()}


def _rows_by_host(path: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                counts[str(json.loads(line)["host"])] += 1
    return counts


# --------------------------------------------------------------------------------------- metrics.jsonl
_STEPS = range(-(1 << 63), 1 << 63)  # the 64-bit integers, all that MLflow's database can store
_LATEST_S = 1 << 53  # in milliseconds, MLflow's unit, a later time doesn't fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One line of metrics.jsonl."""

    time_s: float  # unix seconds
    step: int  # finished steps
    epoch: int | None  # None: unknown
    metrics: dict[str, float]
    attempt: str = ""
    doing: str = "training"  # what the rank did after this line, such as "evaluating"

    @property
    def attempt_number(self) -> int | None:
        """The number of the attempt that wrote the line; None if it names no attempt."""
        with suppress(ValueError, IndexError):
            return journal.attempt_number(self.attempt)
        return None


def parse(line: bytes) -> MetricsRow | None:
    """Parse a line; None if it is incomplete, altered or something else. Metrics that aren't numbers are left out."""
    try:
        raw = json.loads(line)
        metrics = {str(name): float(value) for name, value in raw["metrics"].items() if _is_number(value)}
        time_s, step, epoch = float(raw["t"]), raw["step"], raw["epoch"]
        if type(step) is int and step in _STEPS and type(epoch) in (int, type(None)) and abs(time_s) < _LATEST_S:
            attempt, doing = str(raw.get("attempt", "")), str(raw.get("doing", "training"))
            return MetricsRow(time_s=time_s, step=step, epoch=epoch, metrics=metrics, attempt=attempt, doing=doing)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return None


def rows(path: Path, *, tail_bytes: int = 0) -> list[MetricsRow]:
    """Return the valid rows of a file (``tail_bytes``: of its end); none of a missing file. Raises OSError."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes) if tail_bytes else 0)
        return [row for line in file.read().splitlines() if (row := parse(line)) is not None]


def bad_lines(path: Path) -> list[int]:
    """Return the numbers (from 1) of the complete lines that ``parse`` refuses. Raises OSError."""
    with path.open("rb") as file:
        numbered = enumerate(file, start=1)
        return [number for number, line in numbered if line.endswith(b"\n") and parse(line) is None]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, whose writer died. Raises OSError."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
