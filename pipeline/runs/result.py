"""result.json, the results of a finished run: it is read here alone, with its seal (a digest of itself) and all types
checked. Also: fingerprints, by which a changed file of a finished run is noticed, and a script's metrics in words."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipeline.core import documents
from pipeline.core.documents import DamagedError
from pipeline.core.errors import PacelineError
from pipeline.core.files import Stamp, settles_in, sha256_file, stamp
from pipeline.core.tables import counted, quantity

STAMPS = "stamps.json"
"""The file of a run folder that caches digests; it may be removed at any time."""
# the fields that the controller adds to the summary of the ranks
_CONTROLLER_FIELDS = (
    "key", "digest", "what", "nproc_per_node", "hosts", "attempts", "unix_time", "duration_s", "mlflow_run_id",
    "origin_sha256", "files", "program", "proven", "hardware",
)  # fmt: skip
_STAMP_FIELDS = ("bytes", "mtime_ns", "inode", "ctime_ns")
_T = TypeVar("_T")


class AlteredError(PacelineError):
    """A file of a run folder was altered; the text names it, the problem, and the fix."""


class Fingerprint(NamedTuple):
    """The state of a target (a file that a finished run must have) when result.json was written. ``stamp``: size,
    modification time, inode and change time."""

    sha256: str
    stamp: Stamp


class Stamps:
    """A cache of digests for the files of a run folder: a file with a cached stamp isn't hashed again. A copied run
    folder needs it: all files there have other times than in result.json."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._new_rows: dict[str, list[Any]] = {}  # name → [sha256, modification time, inode, change time]

    def first_altered(self, targets: Iterable[tuple[str, Fingerprint]]) -> tuple[str, str] | None:
        """Return (name, how it was altered) of the first altered target; None if all are intact. Raises OSError."""
        for name, expected in targets:
            if why := self._why_altered(name, expected):
                return name, why
        self._store()
        return None

    def _why_altered(self, name: str, expected: Fingerprint) -> str | None:
        path = self._run_dir / name
        try:
            seen = stamp(path)
        except OSError:
            return why_altered(path, expected)
        if seen == expected.stamp:
            return why_altered(path, expected)
        row = [expected.sha256, *seen[1:]]
        if self._stored_rows.get(name) == row:
            return None
        why = why_altered(path, expected)
        # a file changed within the resolution of file times may change once more and keep its stamp: it isn't cached
        if why is None and not settles_in(seen.ctime_ns):
            with suppress(OSError):  # removed meanwhile
                if stamp(path) == seen:  # not written to while it was hashed
                    self._new_rows[name] = row
        return why

    def _store(self) -> None:
        if self._new_rows and self._run_dir.is_dir():  # never recreate a run folder that was removed
            with suppress(OSError):  # a read-only folder: the files are hashed again next time
                documents.write_sealed(self._run_dir / STAMPS, {"targets": {**self._stored_rows, **self._new_rows}})

    @cached_property
    def _stored_rows(self) -> dict[str, Any]:
        try:
            targets = documents.read_sealed(self._run_dir / STAMPS).get("targets")
        except (OSError, documents.DamagedError):
            return {}
        return targets if isinstance(targets, dict) else {}


class Result(NamedTuple):
    """The content of result.json; ``fields`` holds all of it. ``metrics`` are flat, with ``test/accuracy`` in 0..1."""

    key: str
    digest: str
    state: str
    what: str  # what the run trained, for lists of runs: "digits small_cnn sgd", or "script train.py"
    metrics: Mapping[str, float]
    nproc_per_node: tuple[int, ...]
    hosts: tuple[str, ...]
    synthetic: bool
    images_per_s: float | None
    train_s: float | None
    unix_time: float
    mlflow_run_id: str | None
    origin_sha256: Mapping[str, str]  # file about the run's origin (``folder.ORIGIN``) → digest
    fields: Mapping[str, Any]

    @property
    def files(self) -> dict[str, Fingerprint]:
        """The targets by name. Raises DamagedError."""
        try:
            return {name: _fingerprint(value) for name, value in _checked(dict, self.fields["files"]).items()}
        except (KeyError, TypeError) as error:
            raise DamagedError(f"names no files: {error}") from error

    @property
    def summary(self) -> dict[str, Any]:
        """The fields that the node half reported in summary.json."""
        return {name: value for name, value in self.fields.items() if name not in _CONTROLLER_FIELDS}


def read(path: Path) -> Result | None:
    """Read result.json; None if it doesn't exist. Raises DamagedError: it was altered or truncated, or is no result."""
    try:
        raw = documents.read_sealed(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"can't be read ({error.strerror})") from error
    try:
        return Result(
            key=_checked(str, raw["key"]),
            digest=_checked(str, raw.get("digest", "")),
            state=_checked(str, raw["state"]),
            what=_checked(str, raw.get("what", "")),
            metrics={_checked(str, name): number(value) for name, value in _checked(dict, raw["metrics"]).items()},
            nproc_per_node=tuple(_checked(int, count) for count in _checked(list, raw.get("nproc_per_node", []))),
            hosts=tuple(_checked(str, host) for host in _checked(list, raw.get("hosts", []))),
            synthetic=bool(raw.get("synthetic")),
            images_per_s=_optional_number(raw.get("images_per_s")),
            train_s=_optional_number(raw.get("train_s")),
            unix_time=number(raw.get("unix_time", 0.0)),
            mlflow_run_id=None if raw.get("mlflow_run_id") is None else _checked(str, raw["mlflow_run_id"]),
            origin_sha256=_checked(dict, raw.get("origin_sha256", {})),
            fields=raw,
        )
    except KeyError as error:
        raise DamagedError(f"has no field {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"holds what no result does: {error}") from error


def _fingerprint(raw: Any) -> Fingerprint:
    fields = _checked(dict, raw)
    values = Stamp(*map(fields.__getitem__, _STAMP_FIELDS))
    if {*map(type, values)} != {int}:  # one check for all, as a list of ten thousand runs reads 90,000 of them
        raise TypeError(f"{str(raw)[:40]!r} is no stamp")
    return Fingerprint(_checked(str, fields["sha256"]), values)


def _checked(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value


def nonfinite(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return metric → ``NaN at step 4, 37 times`` for a script's metrics with values that were NaN or infinite. Curves
    leave such values out. ``summary`` is the content of summary.json."""
    shown_by_metric = {}
    recorded = summary.get("nonfinite")
    for name, value in recorded.items() if isinstance(recorded, Mapping) else ():
        match value:
            case {"first": str(first), "step": int(step), "count": int(count)}:
                times = f", {count:,} times" if count > 1 else ""
                shown_by_metric[str(name)] = f"{'NaN' if first == 'nan' else 'infinite'} at step {step}{times}"
    return shown_by_metric


def nonfinite_note(summary: Mapping[str, Any]) -> str:
    """Return the first metric with non-finite values and the number of further ones; '' if all were finite."""
    shown_by_metric = nonfinite(summary)
    more = f" (and {counted(len(shown_by_metric) - 1, 'more metric')})" if len(shown_by_metric) > 1 else ""
    return next((f"{name} was {what}{more}" for name, what in shown_by_metric.items()), "")


def by_split(name: str) -> tuple[int, str]:
    """Return the sort key of a script's metric: first test metrics, then validation, then the others, each by name."""
    parts = set(re.split(r"[/_.-]", name.lower()))
    return (0 if "test" in parts else 1 if parts & {"val", "valid", "validation", "eval"} else 2), name


def first_metrics(metrics: Mapping[str, float], most: int) -> list[str]:
    """Return ``val_loss 0.25`` for each of the ``most`` first metrics of a script, then ``3 more metrics``."""
    shown = [f"{name} {quantity(name, metrics[name])}" for name in sorted(metrics, key=by_split)]
    return [*shown[:most], *([counted(len(shown) - most, "more metric")] if len(shown) > most else [])]


def number(value: Any) -> float:
    """Convert a JSON number to a float (NaN included). Raises TypeError, OverflowError."""
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no number")
    return float(value)


def _optional_number(value: Any) -> float | None:
    return None if value is None else number(value)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the fingerprint of a file in the form that result.json stores. Raises OSError."""
    seen = stamp(path)
    return {"sha256": sha256_file(path), **dict(zip(_STAMP_FIELDS, seen, strict=True))}


def is_stamped(path: str, expected: Fingerprint, *, copied: bool = False) -> bool:
    """Return True if a file has the stamp of its fingerprint; ``copied``: compare only size and modification time."""
    try:
        seen = Stamp.of(os.stat(path))  # noqa: PTH116  (making a Path takes longer than os.stat)
    except OSError:
        return False
    return seen[:2] == expected.stamp[:2] if copied else seen == expected.stamp


def why_altered(path: Path, expected: Fingerprint) -> str | None:
    """Return how a target differs from its fingerprint, or None. Its bytes are hashed only if its stamp differs."""
    try:
        status = path.stat()
    except OSError:
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "is a directory, not a file" if stat.S_ISDIR(status.st_mode) else "is no file any more"
    if status.st_size != expected.stamp.size_bytes:
        return f"has {status.st_size} bytes, {expected.stamp.size_bytes} were written"
    if Stamp.of(status) != expected.stamp and sha256_file(path) != expected.sha256:
        return "was altered"
    return None
