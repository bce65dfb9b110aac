"""`doit report`: what runs have come to as one file, and a certificate of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli import clone, sweeping
from pipeline.cli.choosing import chosen, of_sweep
from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.core.errors import PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import asked_for, expanded, write_atomic, write_hint
from pipeline.core.redact import hide
from pipeline.core.specs import State

if TYPE_CHECKING:  # imported in the functions: `doit list` needs none of it
    from pipeline.comparing.reading import ComparedRun
    from pipeline.comparing.report import Absent, Report
    from pipeline.sweep.folder import SweepFolder

_FOLDER = "reports"
_SUFFIXES = {"html": ".html", "markdown": ".md", "json": ".json"}


def report() -> None:
    """Of a sweep (the newest, if nothing is named) the table too. Raises UsageError, PacelineError."""
    current = session()
    options = current.asked.options
    form = options.get("format", "html")
    if form not in _SUFFIXES:
        raise UsageError(f"format={form} is not known; {suggestion(form, _SUFFIXES)}")
    if _is_of_sweep(current):
        if is_on(options, "json"):
            sweeping.report()
            return
        if "format" not in options:
            sweeping.report()
    elif is_on(options, "json"):
        form = "json"
    subject = _of_sweep(current) if _is_of_sweep(current) else _of_runs(current)
    runs, found = subject.runs, _made(subject)
    text = _written(found, form)
    if form != "html" and "file" not in options:
        say(text)
        return
    target = _target(current, subject.name, form)
    certifies = form == "html" and any(run.state == State.FINISHED for run in runs)
    certificate = _certificate(target, found, runs) if certifies else None
    _write(target, text)
    say(f"\n{found.summary}\n  report       {relative(target)}" if form == "html" else relative(target))
    if certificate is not None:
        _write(*certificate)
        say(f"  certificate  {relative(certificate[0])}")


def _is_of_sweep(current: Session) -> bool:
    """Whether it is about a sweep, and nothing else is named."""
    words = [word for word in current.asked.overrides if not word.lstrip("+").startswith(("paths.", "tracking"))]
    return not words and not current.asked.paths


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What a report is about. ``name`` is that of its file; the other fields are ``comparing.report``'s."""

    name: str
    title: str
    command: str
    runs: Sequence[ComparedRun]
    by: str
    why: Sequence[str] = ()
    goals: Mapping[str, str] = field(default_factory=dict)
    absent: Sequence[Absent] = ()


def _made(subject: _Subject) -> Report:
    from pipeline.comparing import curves
    from pipeline.comparing import report as reports

    return reports.report(
        subject.runs,
        curves.of_runs(subject.runs),
        title=subject.title,
        why=subject.why,
        command=subject.command,
        unix_time=time.time(),
        by=subject.by,
        goals=subject.goals,
        absent=subject.absent,
    )


def _of_sweep(current: Session) -> _Subject:
    """Raises UsageError: no such sweep, or none of its trials was started."""
    from pipeline.comparing import reading

    sweep, folders = of_sweep(current.config.runs_dir, current.asked.options.get("sweep"))
    about, runs = sweep.begun(), [reading.read(folder) for folder in folders]
    if not runs:
        raise UsageError(f"none of the trials of sweep {sweep.name} was started", hint="doit report json=1")
    absent = _absent(sweep, {run.key for run in runs})
    missing = about.total - len(runs) - len(absent)
    return _Subject(
        name=f"sweep-{sweep.name}",
        title=f"Sweep {sweep.name}",
        command=reading.command_line("sweep", about.words),
        runs=runs,
        by=about.by,
        why=[f"{missing} of its {about.total} trials were not started yet."] if missing > 0 else [],
        goals=about.goals,
        absent=absent,
    )


def _of_runs(current: Session) -> _Subject:
    """Those that the command line names. Raises UsageError."""
    from pipeline.comparing import reading
    from pipeline.sweep.report import BY

    runs = chosen(current, current.asked.paths)
    if len(runs) > 1:
        command = reading.command_line("report", [*current.asked.paths, *current.asked.overrides])
        return _Subject(name=_selection(runs), title=f"{len(runs)} runs", command=command, runs=runs, by=BY)
    (run,) = runs
    title = f"Run {run.key}: {run.what}"
    return _Subject(name=run.key, title=title, command=run.command, runs=runs, by=BY, why=_why(current, run))


def _absent(sweep: SweepFolder, present: Set[str]) -> list[Absent]:
    """The trials that were started and have no run folder."""
    from pipeline.comparing.report import Absent

    gone = "its run folder isn't here any more"
    return [
        Absent(
            key=trial.key,
            what=" ".join(trial.chosen),
            state=trial.state,
            why=gone if trial.state == State.FINISHED else hide(trial.detail) or "it has no run folder",
        )
        for trial in sweeping.results_of(sweep)
        if trial.key not in present and trial.state != State.PLANNED
    ]


def _selection(runs: Sequence[ComparedRun]) -> str:
    """The same runs have the same file."""
    from pipeline.core.files import sha256_text

    return f"selection-{sha256_text(' '.join(sorted(run.key for run in runs)))[:12]}"


def _why(current: Session, run: ComparedRun) -> list[str]:
    from pipeline.comparing.report import of_nearest
    from pipeline.runs import index

    others = index.finished_parts(current.config.runs_dir)
    others.pop(run.key, None)
    return of_nearest(index.nearest(current.config.runs_dir, others, run.parts))


def _written(found: Report, form: str) -> str:
    from pipeline.comparing import pages
    from pipeline.core import masking

    if form == "json":
        text = json.dumps(pages.as_json(found), indent=2, allow_nan=False)
    else:
        text = pages.html(found) if form == "html" else pages.markdown(found)
    return masking.shown(text)


def _target(current: Session, name: str, form: str) -> Path:
    """Raises UsageError: nothing is written to the place that was asked for."""
    told = current.asked.options.get("file")
    if told is not None:
        return asked_for(clone.started_in() / expanded(told, f"file={told}"), f"file={told}")
    return current.config.runs_dir / _FOLDER / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}{_SUFFIXES[form]}"


def _write(target: Path, text: str) -> None:
    """Raises PacelineError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text)
    except OSError as error:
        hint = f"file=<another path>; or {write_hint(error, target.parent)}"
        raise PacelineError(f"{target} can't be written: {os_reason(error)}", hint=hint) from error


def _certificate(beside: Path, found: Report, runs: Sequence[ComparedRun]) -> tuple[Path, str]:
    """The certificate's file and text: of one run, or of all that are finished. Raises AlteredError."""
    from pipeline.comparing import certificate
    from pipeline.runs.folder import RunFolder

    if len(runs) == 1 and not found.absent:
        text, name = certificate.of_run(RunFolder(runs[0].folder), runs[0].verdict, ROOT), runs[0].key
    else:
        finished = [RunFolder(run.folder) for run in runs if run.state == State.FINISHED]
        states = {run.key: run.state for run in runs} | {trial.key: trial.state for trial in found.absent}
        others = {key: str(state) for key, state in states.items() if state != State.FINISHED}
        text, name = certificate.of_runs(found.title, finished, others, ROOT), beside.stem
    target = beside.with_name(f"{name}.certificate.json")
    return asked_for(target, "the certificate") if beside.parent.is_dir() else target, text
