"""The sweep folder: what was asked for, once and atomically, and what has become of each trial, line by line."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.documents import DamagedError
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.files import write_atomic, write_json
from pipeline.core.specs import State
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder
from pipeline.sweep.expand import Space, configuration_digest
from pipeline.sweep.report import BY
from pipeline.sweep.trial import Trial
from trainers.contract import run_folder

_FIELDS: Mapping[str, type] = {"key": str, "configurations": str, "words": list, "total": int, "trials": list}
_LATER: Mapping[str, type] = {"at_once": int, "by": str, "goals": dict}
"""What a file of an older version, or of a grid, lacks."""
_OF_TRIAL: Mapping[str, type] = {"number": int, "key": str, "configuration": str, "chosen": list, "overrides": list}


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """``configuration`` is a digest; ``chosen`` are the words that set the trial apart, ``overrides`` all of them."""

    number: int
    key: str
    configuration: str
    chosen: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """``total`` trials of the search space ``configurations`` (a digest), ``at_once`` at a time.

    ``words`` are those of the command. ``by`` is the metric that says which trial is best, and ``goals`` says of each
    that a search aims at whether it is to ``maximize`` or ``minimize``.
    """

    key: str
    configurations: str
    words: tuple[str, ...]
    total: int
    trials: tuple[TrialRecord, ...] = ()
    at_once: int = 1
    by: str = BY
    goals: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        return self.key != ""


NOT_BEGUN = SweepRecord(key="", configurations="", words=(), total=0)


def parse(raw: Mapping[str, Any]) -> SweepRecord:
    """Raises DamagedError: a field is missing or of another type."""
    later = {name: kind for name, kind in _LATER.items() if name in raw}
    _check(raw, {**_FIELDS, **later})
    for item in raw["trials"]:
        _check(item, _OF_TRIAL)
    trials = tuple(TrialRecord(**{name: _frozen(item[name]) for name in _OF_TRIAL}) for item in raw["trials"])
    fields = {name: _frozen(raw[name]) for name in (*_FIELDS, *later) if name != "trials"}
    return SweepRecord(**fields, trials=trials)


def _check(raw: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        if type(value) is not kind:
            raise DamagedError(f"holds {str(value)[:40]} where {name} should be ({kind.__name__})")


def _frozen(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else value


FOLDER = "sweeps"
VERSION = 2
"""From 2 on sweep.json is sealed."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TrialEntry:
    """One line of a sweep's journal. ``time`` is unix seconds; ``cause`` is TrainingError's; ``detail`` one line."""

    number: int
    key: str
    state: State
    time: float
    cause: str = ""
    detail: str = ""


@dataclass(frozen=True)
class SweepFolder:
    """Paths of one sweep. The folder's name is the sweep's name, or its key where it has none."""

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
        """The node half as it was when the sweep's keys were taken."""
        return self.path / "code"

    def about(self) -> SweepRecord:
        """sweep.json, or NOT_BEGUN. Raises UsageError: unreadable, or newer."""
        path = self.path / "sweep.json"
        if not path.exists():
            return NOT_BEGUN
        try:
            raw = documents.read(path)
            version = raw.get("version")
            if type(version) is int and version > VERSION:
                raise UsageError(f"{path} was written by a newer version of Paceline", hint="git pull here")
            if version != 1:
                raw = documents.read_sealed(path)
            return parse(raw)
        except (documents.DamagedError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(
                f"{path} was altered: it {why}",
                hint=f"rm {'-r ' if path.is_dir() else ''}{shlex.quote(str(path))}; the same doit sweep makes it anew, "
                "finished trials stay finished",
            ) from error

    def begun(self) -> SweepRecord:
        """Of one that has begun. Raises UsageError: what ``about`` does, or it was removed meanwhile."""
        about = self.about()
        if not about.has_begun:
            raise UsageError(f"{self.path / 'sweep.json'} was removed", hint="the same doit sweep makes it anew")
        return about

    def begin(self, about: SweepRecord) -> None:
        """Write sweep.json, unless it names the same trials already (however they were spelled), as many at a time."""
        known = self.about()
        if (known.trials, known.at_once) != (about.trials, about.at_once) or not known.has_begun:
            documents.write_sealed(self.path / "sweep.json", {"version": VERSION, **asdict(about)})

    def note(self, entries: Sequence[TrialEntry]) -> None:
        """Append to the journal, on disk when this returns. Raises OSError."""
        if entries:
            journal.append_lines(self.journal, [asdict(entry) for entry in entries])

    def entries(self) -> tuple[list[TrialEntry], list[str]]:
        """All lines of the journal that make sense, and those that don't."""
        good, bad = [], []
        for line in journal.lines(self.journal):
            try:
                raw = json.loads(line)
                entry = TrialEntry(**{**raw, "state": State(raw["state"]), "number": int(raw["number"])})
                if not all(isinstance(text, str) for text in (entry.key, entry.cause, entry.detail)):
                    raise TypeError(line)
                good.append(entry)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                bad.append(line)
        return good, [line for line in bad if line.strip()]

    def set_aside(self, bad: Sequence[str], good: Sequence[TrialEntry]) -> Path:
        """Move lines that make no sense into a file of their own; the journal keeps the rest. Returns that file."""
        aside = self.path / "journal.corrupt"
        before = aside.read_text(encoding="utf-8") if aside.exists() else ""
        write_atomic(aside, before + "".join(f"{line}\n" for line in bad))
        write_atomic(self.journal, "".join(json.dumps(asdict(entry)) + "\n" for entry in good))
        return aside


def describe(space: Space, words: Sequence[str]) -> SweepRecord:
    """sweep.json of a grid: words, fixed total and the order of the trials, which `shuffle` doesn't give twice."""
    return SweepRecord(
        key=space.key,
        configurations=space.configurations,
        words=tuple(words),
        total=len(space.trials),
        at_once=max(1, len(space.slots)),
        trials=tuple(map(recorded, space.trials)),
    )


def recorded(trial: Trial) -> TrialRecord:
    """As it stands in sweep.json."""
    assert trial.key is not None, "a trial is written down once its data is in place"
    return TrialRecord(
        number=trial.number,
        key=trial.key,
        configuration=configuration_digest(trial.config),
        chosen=tuple(trial.chosen),
        overrides=tuple(trial.overrides),
    )


def locate(runs_dir: Path, space: Space, *, fork: bool) -> SweepFolder:
    """Where this sweep lies: under its key, or under ``sweep.name``, which stands for one search space.

    Raises:
        UsageError: the name stands for another space, and no fork is wanted; a name that is none.
    """
    name = space.settings.name
    if name is None:
        return SweepFolder(runs_dir / FOLDER / space.key)
    folder, number = named(runs_dir, name), 1
    while (about := folder.about()).has_begun and about.configurations != space.configurations:
        if not fork:
            known = {item.configuration for item in about.trials}
            shared = sum(configuration_digest(trial.config) in known for trial in space.trials)
            raise UsageError(
                f"sweep.name={name} stands for another search space: {about.total} trials of "
                f"{' '.join(about.words)}; of the {len(space.trials)} trials now asked for it has {shared}",
                hint="--fork begins a new sweep beside it (finished trials count), or another sweep.name",
            )
        number += 1
        folder = SweepFolder(runs_dir / FOLDER / f"{name}-{number}")
    return folder


def named(runs_dir: Path, name: str) -> SweepFolder:
    """Where ``sweep.name`` lies. Raises UsageError: a name that is none."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 100 else f"{name[:40]}… ({len(name)} characters)"
        raise UsageError(f"sweep.name={shown!r} must be up to 100 letters, digits, '.', '_' and '-'")
    return SweepFolder(runs_dir / FOLDER / name)


def every(runs_dir: Path) -> list[SweepFolder]:
    """All that have begun, the latest last."""
    known = sorted((runs_dir / FOLDER).glob("*/sweep.json"), key=lambda path: path.stat().st_mtime)
    return [SweepFolder(path.parent) for path in known]


def find(runs_dir: Path, named: str | None) -> SweepFolder:
    """The sweep whose name begins with ``named``; None: the latest. Raises UsageError: none does, or several do."""
    known = every(runs_dir)
    names = [folder.name for folder in known]
    if named is None:
        if not names:
            raise UsageError(
                f"no sweep under {runs_dir / FOLDER} yet",
                hint="doit report KEY for one run; a sweep: doit sweep experiment=quickstart seed=0,1",
            )
        return known[-1]
    matches = [named] if named in names else [name for name in names if named and name.startswith(named)]
    if len(matches) == 1:
        return SweepFolder(runs_dir / FOLDER / matches[0])
    if matches:
        raise UsageError(f"sweep={named} is the beginning of {len(matches)} names: {', '.join(sorted(matches))}")
    raise UsageError(f"sweep={named}: no such sweep under {runs_dir / FOLDER}; {suggestion(named, names)}")


def latest(entries: Iterable[TrialEntry]) -> dict[str, TrialEntry]:
    """Run key → its last line."""
    return {entry.key: entry for entry in entries}


def mark(run: RunFolder, sweep: SweepFolder, key: str, number: int, chosen: Sequence[str]) -> bool:
    """Note in the run folder that the run belongs to this sweep, for its tags in MLflow. False: it says so already."""
    listed = (run.read_json("sweeps.json") or {}).get("sweeps")
    known = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    if any(item.get("key") == key for item in known):
        return False
    mine = {"key": key, "name": sweep.name, "trial": number, "overrides": list(chosen)}
    write_json(run.path / "sweeps.json", {"sweeps": [*known, mine]})
    return True


def in_order(space: Space, about: SweepRecord) -> Space:
    """The trials in the order that sweep.json has written down (``shuffle`` makes another one each time)."""
    places = {item.configuration: item.number for item in about.trials}
    if not places:
        return space
    ordered = sorted(space.trials, key=lambda trial: places.get(configuration_digest(trial.config), len(places)))
    renumbered = (dataclasses.replace(trial, number=number) for number, trial in enumerate(ordered))
    return dataclasses.replace(space, trials=tuple(renumbered))
