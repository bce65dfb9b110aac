"""`doit accept`: a person says that what differs from a finished run is harmless."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, Session, session
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.files import write_hint
from pipeline.core.tables import counted
from pipeline.core.unexpected import is_of_output

if TYPE_CHECKING:
    from pipeline.execution.run import Run
    from pipeline.keys.content_key import ContentKey
    from pipeline.keys.diff import Difference
    from pipeline.runs.acceptance import Acceptance
    from pipeline.runs.folder import RunFolder

_NEEDS_WORD = ("config", "data", "topology")  # what decides the weights as a rule: the run has to be named


def accept() -> None:
    """Raises UsageError, PacelineError: there is nothing to accept, or it has to be said which run."""
    current = session()
    current.refuse_data()
    run = current.run
    if run is None:
        raise PacelineError("the data set isn't fetched, so this run has no key yet", hint="doit fetch, then the same")
    try:
        _accept(current, run)
    except OSError as error:
        if is_of_output(error):
            raise
        raise PacelineError(
            f"what is accepted for run {run.key.short} can't be written: {os_reason(error)}",
            hint=write_hint(error, run.folder.path.parent),
        ) from error


def _accept(current: Session, run: Run) -> None:
    from pipeline.execution import complete
    from pipeline.runs import acceptance
    from pipeline.runs.lock import locked

    undo = is_on(current.asked.options, "undo")
    with locked(run.folder, note):
        if undo:
            _undo(current, run)
            return
        if (reason := run.reason) is None:
            found = acceptance.read(run.folder) if not run.folder.result.exists() else None
            raise PacelineError(f"{run.key.short} is {found or 'finished: there is nothing to accept'}")
        base, key, differing = _base(current, run, reason)
        origin, patch = complete.collect_provenance(run, sys.argv, time.time(), note)
        accepted = acceptance.by_this_person(run.key, key, differing)
        run.folder.describe(run.description(), origin.as_json(), patch)
        acceptance.write(run.folder, accepted)
    say(f"{run.key.short} is {accepted}; it differs in:")
    for item in differing:
        say(f"  {item}")
    say(f"  prove it      doit reproduce run={run.key.short}")
    say("  take it back  doit accept undo=1 with the same words")
    _record(current, base)


def _base(current: Session, run: Run, reason: str) -> tuple[RunFolder, ContentKey, list[Difference]]:
    """The finished run to be taken, its key, and what differs. Raises PacelineError, UsageError."""
    from pipeline.keys import diff as why
    from pipeline.runs import acceptance
    from pipeline.runs import index as runs
    from pipeline.runs.folder import RunFolder

    runs_dir, named = current.config.runs_dir, current.asked.options.get("run")
    if named is not None:
        base = runs.find(runs_dir, named)
        chain = acceptance.read(base)
        if chain is not None and not base.result.exists():
            raise UsageError(f"run={named} is itself {chain}", hint=f"doit accept run={chain.run} with the same words")
    else:
        parts = {key: known for key, known in runs.finished_parts(runs_dir).items() if key != run.key.short}
        same_version = {key: known for key, known in parts.items() if known.get("version") == run.key.parts["version"]}
        found = why.nearest(same_version, run.key.parts)
        if found is None:
            raise PacelineError(f"{run.key.short}: {reason}, and no finished run is there to accept")
        base = RunFolder(runs_dir / found[0])
        _refuse_choice(same_version, run, found)
    key, result = base.read_key(), base.read_result()
    if key is None or result is None:
        raise PacelineError(f"run {base.key} isn't finished, so it can hold for no other", hint="doit runs")
    if base.key == run.key.short or key.parts.get("version") != run.key.parts["version"]:
        raise UsageError(f"run={base.key} is this very run, or its key was taken by an older Paceline")
    if (broken := base.stale_because(key.digest)) is not None:
        raise PacelineError(f"run {base.key} can hold for no other: {broken}", hint="doit train with its words")
    return base, key, why.differences(key.parts, run.key.parts)


def _refuse_choice(parts: dict[str, dict[str, object]], run: Run, found: tuple[str, list[Difference]]) -> None:
    """What a person has to say in full. Raises UsageError: several runs are as near, or more than code differs."""
    from pipeline.keys import diff as why

    key, differing = found
    near = [name for name in parts if len(why.differences(parts[name], run.key.parts)) == len(differing)]
    lines = "\n".join(f"  {item}" for item in differing)
    if len(near) > 1:
        names = ", ".join(sorted(near))
        raise UsageError(
            f"{len(near)} finished runs are as near, each with {counted(len(differing), 'difference')}: {names}",
            hint=f"the same command with run=KEY, for example run={key}, which differs in:\n{lines}",
        )
    if any(item.part in _NEEDS_WORD for item in differing):
        raise UsageError(
            f"more than code and environment differs from the nearest finished run, {key}:\n{lines}",
            hint=f"the same command with run={key}, if that is meant",
        )


def _undo(current: Session, run: Run) -> None:
    from pipeline.runs import acceptance

    found = acceptance.read(run.folder)
    if found is None:
        raise PacelineError(f"{run.key.short}: nothing was accepted for it")
    acceptance.withdraw(run.folder, found)
    say(f"{run.key.short} was {found}; it is no longer")
    _record(current, acceptance.base_of(run.folder, found))


def settle(folder: RunFolder, *, equal: bool, again: str) -> str:
    """After a reproduction of what was accepted: proven, or withdrawn; what a person is told. Raises PacelineError."""
    from dataclasses import replace

    from pipeline.runs import acceptance

    found = acceptance.read(folder)
    if found is None:
        return ""
    if again != folder.key:
        raise PacelineError(f"{folder.key} can't be proven here: made again, its key is {again}; it stays {found}")
    here = _of_this_clone(folder, found)
    if equal:
        found = replace(found, proven=True)
    if here is not None:
        (acceptance.write if equal else acceptance.withdraw)(here, found)
        _record(session(), acceptance.base_of(here, found))
    elsewhere = "" if here is not None else "; no run folder here was accepted so, and the archive stays as it is"
    if equal:
        return f"{folder.key} is {found}{elsewhere}"
    if here is None:
        return f"{folder.key} was {found}; it came out otherwise{elsewhere}"
    return f"{folder.key} was {found}; it came out otherwise, so the acceptance is withdrawn: doit train makes the run"


def _of_this_clone(folder: RunFolder, found: Acceptance) -> RunFolder | None:
    """The run folder that the proof is of: what an archive brings may be accepted here, for equal weights."""
    from pipeline.runs import acceptance
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.result import AlteredError

    if not (folder.path / acceptance.CARRIED).exists():
        return folder
    here = RunFolder(session().config.runs_dir / folder.key)
    try:
        (mine, known), (theirs, _) = acceptance.standing(here), acceptance.standing(folder)
    except AlteredError:
        return None
    if mine is None or theirs is None or known is None or known.run_digest != found.run_digest:
        return None
    return here if mine.fields.get("weights_sha256") == theirs.fields.get("weights_sha256") else None


def _record(current: Session, base: RunFolder) -> None:
    """Trackers show with the run what it was accepted for; where no server answers, doit record does it later."""
    from pipeline.tracking.client import Recorder

    if base.path.is_dir():
        recorder = Recorder(base.path, current.config, ROOT)
        if not recorder.replay():
            note(f"WARNING: {recorder.titles()} doesn't know of it yet: {recorder.why()}\n  try: {recorder.hint()}")
