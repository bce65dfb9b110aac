"""tracking.json: the progress of a run's record, from which a later process continues it exactly once.

Each tracker other than MLflow has its own ``tracking.NAME.json``; its uri is the tracker's name, and the tracker itself
knows its progress.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.files import write_json_in
from pipeline.runs.folder import SWEEPS
from pipeline.tracking.address import shown
from trainers.contract import run_folder

TENSORBOARD = "tensorboard"
"""The tracker that ``tracking.tensorboard=true`` adds to any other choice; it has no settings."""
RECORDING, PENDING, DONE = "recording", "pending", "done"

_INPUTS = (
    run_folder.CONFIG, run_folder.CONFIG_YAML, run_folder.KEY, run_folder.PROVENANCE, SWEEPS, "accepted_as.json",
    run_folder.CHANGES, run_folder.PLAN, run_folder.JOURNAL, run_folder.METRICS, run_folder.SYSTEM_METRICS,
    run_folder.SUMMARY, run_folder.FINAL_WEIGHTS_NOTES, run_folder.FINAL_WEIGHTS, "evaluation/*",
)  # fmt: skip


@dataclass(kw_only=True)
class TrackingState:
    """The content of tracking.json; times are not stored.

    Attributes:
        token: marks the MLflow runs that this record created.
        state: done, pending (the store failed) or recording (in progress).
        unsure: the answer to a creation may have been lost, so an unknown run may exist.
        marks: lap and step of the last point logged per metric, so that an attempt that repeats steps after a resume
            logs only new points.
        nonfinite: each metric's first non-finite value, in words.
        artifacts, inputs: name → fingerprint of the file.
        refused: a retry will fail with the same ``message`` until the user fixes the cause.
    """

    uri: str
    experiment: str
    token: str
    state: str = RECORDING
    run_id: str | None = None
    experiment_id: str | None = None
    unsure: bool = False
    attempt: int = 0
    system_offset_bytes: int = 0
    marks: dict[str, list[int]] = field(default_factory=dict)
    nonfinite: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, list[int]] = field(default_factory=dict)
    inputs: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    message: str = ""
    refused: bool = False
    tracker: str | None = None

    def save(self, folder: int) -> None:
        """Write tracking.json atomically into the folder open at this descriptor, even if another has replaced it.

        Raises OSError.
        """
        write_json_in(folder, file_of(self.tracker), asdict(self))

    def finish(self, inputs: dict[str, list[int]], folder: int) -> None:
        """Note that everything of ``inputs`` is recorded. Raises OSError."""
        self.inputs, self.state, self.message = inputs, DONE, ""
        self.save(folder)

    @property
    def complete(self) -> bool:
        """True if everything was recorded at the last check."""
        return self.state == DONE


def file_of(tracker: str | None) -> str:
    """Return the file's name; None: MLflow's."""
    return run_folder.TRACKING if tracker is None else f"tracking.{tracker}.json"


def trackers_of(run_dir: Path) -> list[str]:
    """Return the other trackers in which the run was, or should have been, recorded."""
    names = (path.name.removeprefix("tracking.").removesuffix(".json") for path in run_dir.glob("tracking.*.json"))
    return sorted(names)


def load(run_dir: Path, tracker: str | None = None) -> TrackingState | None:
    """Return the state; None if missing or damaged (then everything is replayed, which is safe)."""
    raw = documents.read_or_empty(run_dir / file_of(tracker))
    kinds = {item.name: item.type for item in fields(TrackingState)}
    try:
        state = TrackingState(**{name: value for name, value in raw.items() if name in kinds})
    except TypeError:  # a field is missing
        return None
    return state if all(_is_of(value, str(kinds[name])) for name, value in asdict(state).items()) else None


def _is_of(value: Any, kind: str) -> bool:
    """Check the outermost type: ``dict`` for ``dict[str, int]``."""
    names = {"str": str, "int": int, "bool": bool, "dict": dict, "list": list, "None": type(None)}
    return any(type(value) is names[word.strip().partition("[")[0]] for word in kind.split("|"))


def is_recorded(run_dir: Path, uri: str, experiment: str, tracker: str | None = None) -> bool:
    """Return True if everything of ``run_dir`` is in that store already. Cheap: compares file times."""
    state = load(run_dir, tracker)
    return (
        state is not None
        and (state.state, state.uri, state.experiment) == (DONE, shown(uri), experiment)
        and state.inputs == fingerprints(run_dir)
    )


def fingerprints(run_dir: Path) -> dict[str, list[int]]:
    """Return name → [bytes, mtime in ns] of every file that a record is made from."""
    paths = (path for pattern in _INPUTS for path in sorted(run_dir.glob(pattern)) if path.is_file())
    return {str(path.relative_to(run_dir)): fingerprint(path) for path in paths}


def fingerprint(path: Path) -> list[int]:
    """Return [bytes, mtime in ns]. Raises OSError."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
