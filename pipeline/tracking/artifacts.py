"""Which files of a run folder go to MLflow, small ones first."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.core import leftovers
from pipeline.tracking.address import redact
from pipeline.tracking.description import read_object

_PATCH = "changes.patch"
_EARLY = ("config.yaml", "config.json", "key.json", "provenance.json", "plan.json")
_LATE = ("summary.json", "journal.jsonl", "evaluation/*", "checkpoints/final.json", "checkpoints/final.pt")
_OF_SCRIPT = ("outputs.json", "outputs/*")
RECIPE = ("config.json", "key.json", "provenance.json", "summary.json", "journal.jsonl", _PATCH)
"""What a run can be made again from, on a machine that has the record alone."""
_TEXT = (".json", ".jsonl", ".yaml", ".log", "")
_MAX_LOG_BYTES = 1 << 20


def early(run_dir: Path) -> list[Path]:
    """What stands before the training starts."""
    return [*_existing(run_dir, _EARLY), *_patch(run_dir)]


def late(run_dir: Path, attempt: int) -> list[Path]:
    """What stands at its end."""
    return [*_rank_zero_log(run_dir, attempt), *_existing(run_dir, (*_LATE, *_OF_SCRIPT))]


def _patch(run_dir: Path) -> list[Path]:
    """The uncommitted changes, unless there are none, or a login stands in them: cut out, it is another patch."""
    path = run_dir / _PATCH
    content = path.read_bytes() if path.is_file() else b""
    text = content.decode(errors="replace")
    return [path] if content and redact(text) == text else []


def _existing(run_dir: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(run_dir.glob(pattern)) if path.is_file()]


@contextlib.contextmanager
def sendable(path: Path) -> Iterator[Path]:
    """The file itself, or a copy under the same name: text without credentials, a log's last MiB."""
    if path.suffix not in _TEXT:
        yield path
        return
    raw = path.read_bytes()
    text = raw[-_MAX_LOG_BYTES:].decode(errors="replace") if _is_log(path) else raw.decode(errors="replace")
    safe = redact(text)
    if safe.encode() == raw:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=leftovers.of_system("artifact")) as folder:
        copy = Path(folder) / path.name
        copy.write_text(safe, encoding="utf-8")
        yield copy


def _is_log(path: Path) -> bool:
    return path.suffix == ".log"


def _rank_zero_log(run_dir: Path, attempt: int) -> list[Path]:
    """The log of the host with node_rank 0: the plan's first (a lone log needs no plan)."""
    logs = sorted((run_dir / "attempts" / str(attempt)).glob("*.log"))
    nodes = read_object(run_dir / "plan.json").get("nodes")
    first = nodes[0] if isinstance(nodes, list) and nodes else None
    host = str(first.get("host", "")) if isinstance(first, dict) else ""
    named = [path for path in logs if host and path.stem in (host, re.sub(r"[^\w.-]+", "_", host))]
    return (named or logs)[:1]
