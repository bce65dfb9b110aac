"""The folder of a sweep, ``sweeps/NAME`` in ``paths.runs``: sweep.json, a journal of the trials, and how it is found.

The results of the trials are not here but in their run folders.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.documents import DamagedError
from pipeline.core.errors import UsageError, os_reason, suggestion
from pipeline.core.files import write_json
from pipeline.core.specs import LAST, State
from pipeline.runs import journal
from pipeline.runs.folder import SWEEPS, RunFolder
from pipeline.sweep.expand import Space, configuration_digest
from pipeline.sweep.results import DEFAULT_METRIC
from pipeline.sweep.trial import Trial
from trainers.contract import run_folder


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial in sweep.json."""

    number: int
    key: str
    configuration: str  # a digest
    chosen: tuple[str, ...]  # of all ``overrides`` those that distinguish the trial
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The content of sweep.json. The field names are those in the file."""

    key: str
    configurations: str  # a digest of the search space
    words: tuple[str, ...]  # the command's arguments
    total: int
    trials: tuple[TrialRecord, ...] = ()
    at_once: int = 1  # the number of concurrent trials
    by: str = DEFAULT_METRIC  # the metric that decides which trial is best
    goals: Mapping[str, str] = field(default_factory=dict)  # objective of a search → maximize or minimize

    @property
    def has_begun(self) -> bool:
        return self.key != ""


NOT_BEGUN = SweepRecord(key="", configurations="", words=(), total=0)


def _parse(raw: Mapping[str, Any]) -> SweepRecord:
    """Parse sweep.json. Raises DamagedError: a field is missing or has the wrong type."""
    try:
        trials = (
            {**item, "chosen": tuple(item["chosen"]), "overrides": tuple(item["overrides"])} for item in raw["trials"]
        )
        fields = {**raw, "words": tuple(raw["words"]), "trials": tuple(TrialRecord(**item) for item in trials)}
        names = {item.name for item in dataclasses.fields(SweepRecord)}
        record = SweepRecord(**{name: value for name, value in fields.items() if name in names})
        return dataclasses.replace(record, total=int(record.total), goals=dict(record.goals))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"has other fields than a sweep ({error})") from error


FOLDER = "sweeps"
VERSION = 2
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrialEntry:
    """One line of a sweep's journal."""

    number: int
    key: str
    state: State
    time: float  # unix seconds
    cause: str = ""  # ``TrainingError.cause`` (host, config, …)
    detail: str = ""  # one line
    slot: int | None = None  # the part of the cluster (from 0) that it runs on; None: unknown


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep, named by ``sweep.name``, or by the sweep's key if it has no name."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def lock(self) -> Path:
        return self.path.parent / f".{self.name}.lock"

    @property
    def journal(self) -> Path:
        return self.path / run_folder.JOURNAL

    @property
    def code(self) -> Path:
        """The code that runs on the hosts (trainers/), as it was when the keys of the trials were computed."""
        return self.path / "code"

    def read(self) -> SweepRecord:
        """Read sweep.json, or return NOT_BEGUN. Raises UsageError: unreadable, or from a newer version."""
        path = self.path / "sweep.json"
        if not path.exists():
            return NOT_BEGUN
        try:
            version = documents.read(path).get("version")
            if type(version) is int and version > VERSION:
                raise UsageError(f"{path} was written by a newer version of Paceline", hint="git pull here")
            return _parse(documents.read_sealed(path))
        except (documents.DamagedError, OSError) as error:
            if isinstance(error, OSError) and not path.is_dir():
                raise UsageError(f"{path} can't be read: {os_reason(error)}") from error
            fault = error if isinstance(error, documents.DamagedError) else "is a folder"
            raise UsageError(
                f"{path} was altered: it {fault}",
                hint=f"rm {'-r ' if path.is_dir() else ''}{shlex.quote(str(path))}; the same doit sweep makes it anew, "
                "finished trials stay finished",
            ) from error

    def read_begun(self) -> SweepRecord:
        """Read sweep.json of a sweep that has begun. Raises UsageError like ``read``, or if the file was removed."""
        record = self.read()
        if not record.has_begun:
            raise UsageError(f"{self.path / 'sweep.json'} was removed", hint="the same doit sweep makes it anew")
        return record

    def write(self, record: SweepRecord) -> None:
        """Write sweep.json, unless it already has the same trials and concurrency (its words may differ)."""
        existing = self.read()
        if (existing.trials, existing.at_once) != (record.trials, record.at_once) or not existing.has_begun:
            documents.write_sealed(self.path / "sweep.json", {"version": VERSION, **asdict(record)})

    def note(self, entries: Sequence[TrialEntry]) -> None:
        """Append to the journal durably. Raises OSError."""
        if entries:
            journal.append_lines(self.journal, [asdict(entry) for entry in entries])

    def entries(self) -> list[TrialEntry]:
        """Return the valid entries of the journal. A lost entry does no harm: the run folder has the trial's result."""
        valid = []
        for line in journal.lines(self.journal):
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raw = json.loads(line)
                entry = TrialEntry(**{**raw, "state": State(raw["state"]), "number": int(raw["number"])})
                texts = (entry.key, entry.cause, entry.detail)
                if all(isinstance(text, str) for text in texts) and type(entry.slot) in (int, type(None)):
                    valid.append(entry)
        return valid


def describe(space: Space, words: Sequence[str]) -> SweepRecord:
    """Return sweep.json of a grid. It keeps the trials' order, because Hydra's `shuffle` gives another each time."""
    return SweepRecord(
        key=space.key,
        configurations=space.configurations_digest,
        words=tuple(words),
        total=len(space.trials),
        at_once=max(1, len(space.slots)),
        trials=tuple(map(recorded, space.trials)),
    )


def recorded(trial: Trial) -> TrialRecord:
    """Convert a trial to its record in sweep.json."""
    assert trial.key is not None, "a trial is written down once its data is in place"
    return TrialRecord(
        number=trial.number,
        key=trial.key,
        configuration=configuration_digest(trial.config),
        chosen=tuple(trial.chosen),
        overrides=tuple(trial.overrides),
    )


def locate(runs_dir: Path, space: Space, *, fork: bool) -> SweepFolder:
    """Return the folder of a grid. Raises UsageError: ``sweep.name`` belongs to another space without ``fork``."""
    folder = folder_for(runs_dir, space.settings.name, space.key, space.configurations_digest, fork=fork)
    record = folder.read()
    if space.settings.name and record.has_begun and record.configurations != space.configurations_digest:
        recorded_digests = {item.configuration for item in record.trials}
        shared = sum(configuration_digest(trial.config) in recorded_digests for trial in space.trials)
        raise UsageError(
            f"sweep.name={space.settings.name} stands for another search space: {record.total} trials of "
            f"{' '.join(record.words)}; of the {len(space.trials)} trials requested now it has {shared}",
            hint="--fork begins a new sweep beside it (finished trials count), or another sweep.name",
        )
    return folder


def folder_for(runs_dir: Path, name: str | None, key: str, configurations_digest: str, *, fork: bool) -> SweepFolder:
    """Return the folder of a sweep: named by ``sweep.name``, else by its key. Raises UsageError: an invalid name.

    With ``fork``, a name that belongs to another search space gets the next free number.
    """
    if name is None:
        return SweepFolder(runs_dir / FOLDER / key)
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 100 else f"{name[:40]}… ({len(name)} characters)"
        raise UsageError(f"sweep.name={shown!r} must be up to 100 letters, digits, '.', '_' and '-'")
    folder, number = SweepFolder(runs_dir / FOLDER / name), 1
    while fork and (record := folder.read()).has_begun and record.configurations != configurations_digest:
        number += 1
        folder = SweepFolder(runs_dir / FOLDER / f"{name}-{number}")
    return folder


def all_sweeps(runs_dir: Path) -> list[SweepFolder]:
    """Return all sweeps that have begun, the latest last."""
    paths = sorted((runs_dir / FOLDER).glob("*/sweep.json"), key=lambda path: path.stat().st_mtime)
    return [SweepFolder(path.parent) for path in paths]


def find(runs_dir: Path, name: str | None) -> SweepFolder:
    """Return the sweep whose name starts with ``name``; None or ``last``: the latest. Raises UsageError."""
    sweeps = all_sweeps(runs_dir)
    names = [folder.name for folder in sweeps]
    if name is None or (name == LAST and LAST not in names):
        if not names:
            raise UsageError(
                f"no sweep under {runs_dir / FOLDER} yet",
                hint="doit report KEY for one run; a sweep: doit sweep experiment=quickstart seed=0,1",
            )
        return sweeps[-1]
    matches = beginning_with(sweeps, name)
    if len(matches) == 1:
        return SweepFolder(runs_dir / FOLDER / matches[0])
    if matches:
        raise UsageError(f"{name} is the beginning of {len(matches)} sweeps: {', '.join(sorted(matches))}")
    raise UsageError(f"{name or repr(name)}: no such sweep under {runs_dir / FOLDER}; {suggestion(name, names)}")


def beginning_with(sweeps: Iterable[SweepFolder], text: str) -> list[str]:
    """Return the names of these sweeps that begin with ``text``; if a sweep has exactly this name, only this one."""
    names = [folder.name for folder in sweeps]
    return [text] if text in names else [name for name in names if text and name.startswith(text)]


def latest(entries: Iterable[TrialEntry]) -> dict[str, TrialEntry]:
    """Return run key → its last journal entry."""
    return {entry.key: entry for entry in entries}


def add_to_run(run: RunFolder, sweep: SweepFolder, key: str, number: int, chosen: Sequence[str]) -> bool:
    """Note in the run folder that the run belongs to this sweep, for its MLflow tags. False: it was noted before."""
    sweeps = run.sweeps()
    if any(item.get("key") == key for item in sweeps):
        return False
    this_sweep = {"key": key, "name": sweep.name, "trial": number, "overrides": list(chosen)}
    write_json(run.path / SWEEPS, {"sweeps": [*sweeps, this_sweep]})
    return True


def in_order(space: Space, record: SweepRecord) -> Space:
    """Sort the trials in the order recorded in sweep.json (``shuffle`` gives another order each time)."""
    numbers = {item.configuration: item.number for item in record.trials}
    if not numbers:
        return space
    ordered = sorted(space.trials, key=lambda trial: numbers.get(configuration_digest(trial.config), len(numbers)))
    renumbered = (dataclasses.replace(trial, number=number) for number, trial in enumerate(ordered))
    return dataclasses.replace(space, trials=tuple(renumbered))
