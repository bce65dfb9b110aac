"""The files of a run folder that are uploaded to MLflow, and notes about files that aren't."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.core import documents
from pipeline.core.files import temporary_prefix
from pipeline.core.tables import file_size, first_of
from pipeline.runs.contents import hosts_of
from pipeline.runs.folder import leads_out, link_warning
from pipeline.tracking.destinations import redact
from trainers.contract import run_folder

_AT_START = (run_folder.CONFIG_YAML, run_folder.CONFIG, run_folder.KEY, run_folder.PROVENANCE, run_folder.PLAN)
_AT_END = (
    run_folder.SUMMARY, run_folder.JOURNAL, "evaluation/*", run_folder.FINAL_WEIGHTS_NOTES, run_folder.FINAL_WEIGHTS,
    run_folder.OUTPUT_DIGESTS, "outputs/**/*",
)  # fmt: skip
_UNDECLARED = "outputs/workdir"
"""The folder of files that a script wrote in its working directory and program.outputs doesn't name."""
_UNDECLARED_BYTES, _UNDECLARED_FILES = 100 << 20, 1000  # upload limits for these; the smallest come first
RECIPE = (
    run_folder.CONFIG, run_folder.KEY, run_folder.PROVENANCE, run_folder.SUMMARY, run_folder.JOURNAL,
    run_folder.CHANGES,
)  # fmt: skip
"""The files of a record from which `doit reproduce` repeats the run without its folder."""
_TEXT = (".json", ".jsonl", ".yaml", ".log", "")
_MAX_LOG_BYTES = 1 << 20
_LOGS = f"{run_folder.ATTEMPTS}/*/*.log"


def files_at_start(run_dir: Path) -> list[Path]:
    """Return the files that exist before the training starts."""
    files = _existing(run_dir, _AT_START)
    # an empty patch says nothing, and one with a login in it couldn't be applied without the login
    for path in _existing(run_dir, (run_folder.CHANGES,)):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and redact(text) == text:
            files.append(path)
    return files


def files_at_end(run_dir: Path, attempt: int) -> list[Path]:
    """Return the files that exist after the end, with the log of rank 0's host."""
    logs = _existing(run_dir, (f"{run_folder.ATTEMPTS}/{attempt}/*.log",))
    # the first host of the plan has rank 0; in its log's name, characters that file systems refuse are replaced
    host = next(iter(hosts_of(documents.read_or_empty(run_dir / run_folder.PLAN))), "")
    of_rank_0 = [path for path in logs if host and path.stem in (host, re.sub(r"[^\w.-]+", "_", host))]
    over_limit = {*_over_limit(run_dir)}
    paths = [*(of_rank_0 or logs)[:1], *_existing(run_dir, _AT_END)]
    return [path for path in paths if path not in over_limit]


def notes_on_left_out(run_dir: Path) -> Iterator[str]:
    """Yield a note about links that lead out of the run folder, and one about files beyond the limits."""
    patterns = (*_AT_START, run_folder.CHANGES, *_AT_END, _LOGS)
    present = [path for pattern in patterns for path in sorted(run_dir.glob(pattern))]
    if links := [path for path in present if path.is_file() and leads_out(path, run_dir)]:
        yield link_warning(links, run_dir)
    paths = _over_limit(run_dir)
    if not paths:
        return
    names = first_of([path.relative_to(run_dir).as_posix() for path in paths], 3)
    size = file_size(sum(path.stat().st_size for path in paths))
    yield (
        f"{names} ({size}) not sent to MLflow, which gets {_UNDECLARED_FILES:,} files and "
        f"{_UNDECLARED_BYTES >> 20} MiB of {_UNDECLARED}: program.outputs=['GLOB'] sends what it names"
    )


def _over_limit(run_dir: Path) -> list[Path]:
    """Return the undeclared files that aren't uploaded: all but the smallest ones that are within the limits."""
    sizes = {path: path.stat().st_size for path in _existing(run_dir, (f"{_UNDECLARED}/**/*",))}
    smallest_first = sorted(sizes, key=lambda path: sizes[path])
    totals = itertools.accumulate(sizes[path] for path in smallest_first)
    n_sent = sum(total <= _UNDECLARED_BYTES for total in totals)
    return sorted(smallest_first[min(n_sent, _UNDECLARED_FILES) :])


def _existing(run_dir: Path, patterns: tuple[str, ...]) -> list[Path]:
    paths = (path for pattern in patterns for path in sorted(run_dir.glob(pattern)) if path.is_file())
    return [path for path in paths if not leads_out(path, run_dir) and os.access(path, os.R_OK)]


@contextlib.contextmanager
def redacted(path: Path) -> Iterator[Path]:
    """Yield the file, or a copy of the same name if it must be changed: without credentials, of a log the last MiB."""
    if path.suffix not in _TEXT:
        yield path
        return
    raw = path.read_bytes()
    shortened = raw[-_MAX_LOG_BYTES:] if path.suffix == ".log" else raw
    text = shortened.decode(errors="replace")
    safe = redact(text)
    if safe == text and len(shortened) == len(raw):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-artifact")) as folder:
        copy = Path(folder) / path.name
        copy.write_text(safe, encoding="utf-8")
        yield copy
