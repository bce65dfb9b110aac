"""`doit report` and `doit verify`: what runs have come to as one file, a run's certificate, and its check."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli import clone, sweeping
from pipeline.cli.choosing import chosen, of_sweep
from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.core.errors import PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import asked_for, expanded, write_atomic, write_hint
from pipeline.core.redact import hide
from pipeline.core.specs import State
from pipeline.core.tables import counted

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
    name, runs, found = _made(current)
    text = _written(found, form)
    if form != "html" and "file" not in options:
        say(text)
        return
    target = _target(current, name, form)
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


def _made(current: Session) -> tuple[str, Sequence[ComparedRun], Report]:
    """The name of its file, the runs, and the report."""
    from pipeline.comparing import curves, reading
    from pipeline.comparing import report as reports
    from pipeline.sweep.report import BY

    by, why, goals = BY, list[str](), dict[str, str]()
    absent: list[Absent] = []
    if _is_of_sweep(current):
        sweep, folders = of_sweep(current.config.runs_dir, current.asked.options.get("sweep"))
        about, runs = sweep.about(), [reading.read(folder) for folder in folders]
        if not runs:
            raise UsageError(f"none of the trials of sweep {sweep.name} was started", hint="doit report json=1")
        name, title = f"sweep-{sweep.name}", f"Sweep {sweep.name}"
        by, goals = about.get("by") or BY, about.get("goals", {})
        command = reading.command_line("sweep", [*map(str, about["words"])])
        absent = _absent(sweep, {run.key for run in runs})
        if (missing := about["total"] - len(runs) - len(absent)) > 0:
            why.append(f"{missing} of its {about['total']} trials were not started yet.")
    else:
        runs = chosen(current, current.asked.paths)
        first = runs[0]
        alone = len(runs) == 1
        name = first.key if alone else _selection(runs)
        title = f"Run {first.key}: {first.what}" if alone else f"{len(runs)} runs"
        command = (
            first.command if alone else reading.command_line("report", [*current.asked.paths, *current.asked.overrides])
        )
        why = _why(current, first) if alone else []
    made = reports.report(
        runs, curves.of_runs(runs), title=title, why=why, command=command, unix_time=time.time(),
        by=by, goals=goals, absent=absent,
    )  # fmt: skip
    return name, runs, made


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


# ------------------------------------------------------------------------------------------ certificates
def verify() -> None:
    """Each file is checked, whatever the others are.

    Raises UsageError: a file that is no certificate; PacelineError, which goes before: one was altered, or its run.
    """
    current = session()
    if not current.asked.paths:
        raise UsageError("which file? doit verify takes certificates", hint="doit report KEY writes one")
    wrong: list[PacelineError] = []
    for word in current.asked.paths:
        try:
            _verify(current, Path(os.path.abspath(clone.started_in() / expanded(word, word))))  # noqa: PTH100
        except PacelineError as error:
            wrong.append(error)
    if wrong:
        first, *others = sorted(wrong, key=lambda item: isinstance(item, UsageError))
        for other in others:
            say(f"ERROR: {other}")
        raise first


def _verify(current: Session, path: Path) -> None:
    from pipeline.comparing import certificate

    (found, others), runs_dir = certificate.read(path), current.config.runs_dir
    here = [run for run in found if (runs_dir / str(run["run"])).is_dir()]
    shown, alone = relative(path), len(found) == 1
    wrong = [line for run in here for line in _wrong(run, runs_dir, alone=alone)]
    if wrong:
        who = f"run {here[0]['run']} isn't" if alone else "not all of its runs are"
        lines = "\n".join(f"  {line}" for line in wrong)
        hint = f"doit status run={here[0]['run']}" if alone else "doit status KEY; doit train makes one again"
        raise PacelineError(f"{shown} is whole, but {who} what it says:\n{lines}", hint=hint)
    if here:
        who = f"run {here[0]['run']} is" if alone else f"{len(here)} of its {counted(len(found), 'run')} are"
        say(f"{shown}: whole, and {who} what it says: {_checked(here, runs_dir)}")
    else:
        who = f"its key follows from its parts. Run {found[0]['run']} isn't"
        who = who if alone else f"the keys of its {len(found)} runs follow from their parts. None of them is"
        say(f"{shown}: whole; {who} here, so nothing else was checked")
    if here and (missing := len(found) - len(here)):
        say(f"  not here     {counted(missing, 'run')}: only that their keys follow from their parts was checked")
    if others:
        states = ", ".join(f"{key} {state}" for key, state in others.items())
        say(f"  not checked  what it says of those that weren't finished: {states}")
    _say_standing(found)


def _wrong(found: Mapping[str, Any], runs_dir: Path, *, alone: bool) -> list[str]:
    from pipeline.comparing import certificate
    from pipeline.runs.folder import RunFolder

    lines = certificate.disagreements(found, RunFolder(runs_dir / str(found["run"])), ROOT)
    return [line if alone else f"{found['run']}: {line}" for line in lines]


def _checked(here: Sequence[Mapping[str, Any]], runs_dir: Path) -> str:
    """What was, and what couldn't be."""
    from pipeline.comparing import certificate
    from pipeline.runs.folder import RunFolder

    without = [item for run in here for item in certificate.unchecked(run, RunFolder(runs_dir / str(run["run"])))]
    left = f" (not {', '.join(dict.fromkeys(without))})" if without else ""
    data = "" if any("data" in item for item in without) else ", data"
    return f"key, code, {sum(len(run['files_sha256']) for run in here)} files{data}, figures{left}"


def _say_standing(found: Sequence[Mapping[str, Any]]) -> None:
    verdicts = [str(run.get("verdict") or "not made again when this was written") for run in found]
    counts = [
        verdict if len(found) == 1 else f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)
    ]
    say(f"  made again   {', '.join(counts)}\n  proves that nothing of this was changed since, not who wrote it")
