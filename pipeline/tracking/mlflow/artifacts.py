"""Select the files of a run folder that are uploaded to MLflow, small ones first."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.core import documents
from pipeline.core.files import temporary_prefix
from pipeline.core.tables import file_size, first_of
from pipeline.runs.contents import hosts_of
from pipeline.runs.folder import leads_out, not_read
from pipeline.tracking.address import redact
from trainers.contract import run_folder

_EARLY = (run_folder.CONFIG_YAML, run_folder.CONFIG, run_folder.KEY, run_folder.PROVENANCE, run_folder.PLAN)
_LATE = (
    run_folder.SUMMARY, run_folder.JOURNAL, "evaluation/*", run_folder.FINAL_WEIGHTS_NOTES, run_folder.FINAL_WEIGHTS,
    run_folder.OUTPUT_DIGESTS, "outputs/**/*",
)  # fmt: skip
_BESIDES = "outputs/workdir"
"""Files that a script wrote in its working directory and program.outputs doesn't name."""
_BESIDES_BYTES, _BESIDES_FILES = 100 << 20, 1000  # upload limits for these; the smallest come first
RECIPE = (
    run_folder.CONFIG, run_folder.KEY, run_folder.PROVENANCE, run_folder.SUMMARY, run_folder.JOURNAL,
    run_folder.CHANGES,
)  # fmt: skip
"""Files from which a run can be repeated on a host that has only the record."""
_TEXT = (".json", ".jsonl", ".yaml", ".log", "")
_LOGS = f"{run_folder.ATTEMPTS}/*/*.log"
_MAX_LOG_BYTES = 1 << 20


def early(run_dir: Path) -> list[Path]:
    """Return the files that exist before the training starts."""
    return [*_existing(run_dir, _EARLY), *_patch(run_dir)]


def late(run_dir: Path, attempt: int) -> list[Path]:
    """Return the files that exist after the end."""
    paths = [*_rank_zero_log(run_dir, attempt), *_existing(run_dir, _LATE)]
    too_much = {*_left_out(run_dir)}
    return [path for path in paths if path not in too_much]


def left_out(run_dir: Path) -> Iterator[str]:
    """Yield messages about files that stay in the run folder or don't belong to it."""
    present = [
        path for pattern in (*_EARLY, run_folder.CHANGES, *_LATE, _LOGS) for path in sorted(run_dir.glob(pattern))
    ]
    if away := [path for path in present if path.is_file() and leads_out(path, run_dir)]:
        yield not_read(away, run_dir)
    paths = _left_out(run_dir)
    if not paths:
        return
    names = first_of([path.relative_to(run_dir).as_posix() for path in paths], 3)
    size = file_size(sum(path.stat().st_size for path in paths))
    yield (
        f"{names} ({size}) not sent to MLflow, which gets {_BESIDES_FILES:,} files and {_BESIDES_BYTES >> 20} MiB of "
        f"{_BESIDES}: program.outputs=['GLOB'] sends what it names"
    )


def _left_out(run_dir: Path) -> list[Path]:
    total, large = 0, []
    sizes = {path: path.stat().st_size for path in _existing(run_dir, (f"{_BESIDES}/**/*",))}
    for number, path in enumerate(sorted(sizes, key=lambda path: sizes[path])):
        total += sizes[path]
        if total > _BESIDES_BYTES or number >= _BESIDES_FILES:
            large.append(path)
    return sorted(large)


def _patch(run_dir: Path) -> list[Path]:
    """Return the patch of uncommitted changes, unless empty.

    A patch with a login is skipped: masked, it would not apply.
    """
    path = run_dir / run_folder.CHANGES
    content = path.read_bytes() if path.is_file() and not leads_out(path, run_dir) else b""
    text = content.decode(errors="replace")
    return [path] if content and redact(text) == text else []


def _existing(run_dir: Path, patterns: tuple[str, ...]) -> list[Path]:
    paths = (path for pattern in patterns for path in sorted(run_dir.glob(pattern)) if path.is_file())
    return [path for path in paths if not leads_out(path, run_dir) and os.access(path, os.R_OK)]


@contextlib.contextmanager
def sendable(path: Path) -> Iterator[Path]:
    """Yield the file itself, or a copy of the same name: text without credentials, the last MiB of a log."""
    if path.suffix not in _TEXT:
        yield path
        return
    raw = path.read_bytes()
    kept = raw[-_MAX_LOG_BYTES:] if path.suffix == ".log" else raw
    text = kept.decode(errors="replace")
    safe = redact(text)
    if safe == text and len(kept) == len(raw):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-artifact")) as folder:
        copy = Path(folder) / path.name
        copy.write_text(safe, encoding="utf-8")
        yield copy


def _rank_zero_log(run_dir: Path, attempt: int) -> list[Path]:
    """Return the log of the host with node_rank 0, the first in the plan (a single log needs no plan)."""
    logs = _existing(run_dir, (f"{run_folder.ATTEMPTS}/{attempt}/*.log",))
    host = next(iter(hosts_of(documents.read_or_empty(run_dir / run_folder.PLAN))), "")
    named = [path for path in logs if host and path.stem in (host, re.sub(r"[^\w.-]+", "_", host))]
    return (named or logs)[:1]
