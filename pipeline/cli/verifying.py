"""`doit verify`: certificates, checked by themselves and against the runs that are here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import clone
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import expanded
from pipeline.core.tables import counted


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
            note(f"ERROR: {other}")
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
