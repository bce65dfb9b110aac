"""`doit accept`: let the result of a finished run (the base) count for another key, until a repetition tests that.

`doit reproduce` then calls ``settle_acceptance``, which marks the run as proven or withdraws the acceptance.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, Session
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.files import write_hint
from pipeline.core.processes.unexpected import is_of_output
from pipeline.core.tables import counted
from pipeline.execution import launch_folder
from pipeline.execution.launch_folder import collect_provenance
from pipeline.execution.run import Run
from pipeline.keys import content_key
from pipeline.keys.content_key import ContentKey, Difference
from pipeline.runs import acceptance, index
from pipeline.runs.acceptance import Acceptance
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import locked
from pipeline.runs.result import AlteredError
from pipeline.tracking.client import Recorder

# where these parts of the key differ, the weights usually do too: accept then wants the finished run to be named
_MUST_BE_NAMED = ("config", "data", "topology")


def accept(current: Session) -> None:
    """Accept a finished run for that of the overrides, or withdraw that (--undo). Raises UsageError, PacelineError."""
    current.refuse_unfetchable_data()
    run = current.run
    if run is None:
        if all(word.startswith("paths.") for word in current.invocation.overrides):
            raise UsageError(
                "accept needs the words of the run that another one shall hold for",
                hint="doit accept last, followed by the words that doit train would get",
            )
        raise PacelineError("the data set isn't fetched, so this run has no key yet", hint="doit fetch, then the same")
    # under the lock of the run, so that no command trains it meanwhile
    try:
        with locked(run.folder, note):
            base = _undo(run) if current.invocation.is_on("undo") else _accept(current, run)
        _record_acceptance(current, base)
    except OSError as error:
        if is_of_output(error):
            raise
        raise PacelineError(
            f"what is accepted for run {run.key.short} can't be written: {os_reason(error)}",
            hint=write_hint(error, run.folder.path.parent),
        ) from error


def _accept(current: Session, run: Run) -> RunFolder:
    """Accept a finished run for ``run``, and print how they differ; return the folder of the finished one."""
    if (reason := run.reason) is None:
        accepted_before = acceptance.read(run.folder) if not run.folder.result.exists() else None
        raise PacelineError(f"{run.key.short} is {accepted_before or 'finished: there is nothing to accept'}")
    base, key, differing = _find_base(current, run, reason)
    provenance, patch = collect_provenance(run, sys.argv, time.time(), note)
    accepted = acceptance.by_this_user(run.key, key, differing)
    # the run gets a folder as if it were about to train, so that doit reproduce can repeat it later
    launch_folder.prepare(run.folder, launch_folder.inputs_of(run))
    provenance.write(run.folder.path, patch)
    acceptance.write(run.folder, accepted)
    say(f"{run.key.short} is {accepted}; it differs in:")
    for item in differing:
        say(f"  {item}")
    say(f"  prove it      doit reproduce {run.key.short}")
    say("  take it back  doit accept --undo with the same words")
    return base


def _undo(run: Run) -> RunFolder:
    accepted = acceptance.read(run.folder)
    if accepted is None:
        raise PacelineError(f"{run.key.short}: nothing was accepted for it")
    acceptance.withdraw(run.folder, accepted)
    say(f"{run.key.short} was {accepted}; it is no longer")
    return acceptance.base_of(run.folder, accepted)


def _find_base(current: Session, run: Run, reason: str) -> tuple[RunFolder, ContentKey, list[Difference]]:
    """Return the finished run to accept, its key, and how ``run`` differs from it. Raises PacelineError, UsageError."""
    runs_dir, typed_key = current.config.runs_dir, current.invocation.options.get("run")
    if typed_key is not None:
        base = index.find(runs_dir, typed_key)
        other = acceptance.read(base)
        if other is not None and not base.result.exists():  # it has no result of its own
            raise UsageError(f"run={typed_key} is itself {other}", hint=f"doit accept {other.run} with the same words")
    else:
        others = {key: parts for key, parts in index.finished_parts(runs_dir).items() if key != run.key.short}
        # parts of keys that another version of Paceline took can't be compared
        same_version = {key: parts for key, parts in others.items() if parts.get("version") == run.key.parts["version"]}
        nearest = content_key.nearest(same_version, run.key.parts)
        if nearest is None:
            raise PacelineError(f"{run.key.short}: {reason}, and no finished run is there to accept")
        base = RunFolder(runs_dir / nearest[0])
        _refuse_doubtful(same_version, run, nearest)
    key, result = base.read_key(), base.read_result()
    if key is None or result is None:
        raise PacelineError(f"run {base.key} isn't finished, so it can hold for no other", hint="doit runs")
    if base.key == run.key.short or key.parts.get("version") != run.key.parts["version"]:
        raise UsageError(f"run={base.key} is this very run, or its key was taken by an older Paceline")
    if (stale := base.stale_because(key.digest)) is not None:
        raise PacelineError(f"run {base.key} can hold for no other: {stale}", hint="doit train with its words")
    return base, key, content_key.differences(key.parts, run.key.parts)


def _refuse_doubtful(parts: dict[str, dict[str, object]], run: Run, nearest: tuple[str, list[Difference]]) -> None:
    """Raise UsageError if several runs are equally near, or more than code and environment differs.

    ``parts``: key → parts of the key of each candidate; ``nearest``: the chosen one and its differences.
    """
    key, differing = nearest
    equally_near = [k for k in parts if len(content_key.differences(parts[k], run.key.parts)) == len(differing)]
    lines = "\n".join(f"  {item}" for item in differing)
    if len(equally_near) > 1:
        keys, count = ", ".join(sorted(equally_near)), len(equally_near)
        raise UsageError(
            f"{count} finished runs are as near, each with {counted(len(differing), 'difference')}: {keys}",
            hint=f"the same command with a key, for example doit accept {key} …, which differs in:\n{lines}",
        )
    if any(item.part in _MUST_BE_NAMED for item in differing):
        raise UsageError(
            f"more than code and environment differs from the nearest finished run, {key}:\n{lines}",
            hint=f"the same command with that key, doit accept {key} …, if that is meant",
        )


def settle_acceptance(current: Session, folder: RunFolder, *, equal: bool, repeated_key: str) -> str:
    """Mark an accepted run as proven if its repetition came out ``equal``, or else withdraw the acceptance.

    ``folder``: the repeated run's folder, or the archive of a run (`doit export`), unpacked to be repeated. Returns a
    line for the user; '' if the run wasn't accepted. Raises PacelineError: the repetition had another key.
    """
    accepted = acceptance.read(folder)
    if accepted is None:
        return ""
    if repeated_key != folder.key:
        raise PacelineError(
            f"{folder.key} can't be proven here: made again, its key is {repeated_key}; it stays {accepted}"
        )
    here = _folder_here(current, folder, accepted)  # None: ``folder`` is an archive of a run not accepted so here
    if equal:
        accepted = replace(accepted, proven=True)
    if here is not None:
        (acceptance.write if equal else acceptance.withdraw)(here, accepted)
        _record_acceptance(current, acceptance.base_of(here, accepted))
    elsewhere = "" if here is not None else "; no run folder here was accepted so, and the archive stays as it is"
    if equal:
        return f"{folder.key} is {accepted}{elsewhere}"
    if here is None:
        return f"{folder.key} was {accepted}; it came out otherwise{elsewhere}"
    return (
        f"{folder.key} was {accepted}; it came out otherwise, so the acceptance is withdrawn: doit train makes the run"
    )


def _folder_here(current: Session, folder: RunFolder, accepted: Acceptance) -> RunFolder | None:
    """Return the run folder here to which a proof of ``folder`` applies, which may be an unpacked archive; or None."""
    if not (folder.path / acceptance.BASE_RESULT_FILE).exists():  # only an archive has this file
        return folder
    # an archive's proof applies to the run of its key, if the same result was accepted for that
    here = RunFolder(current.config.runs_dir / folder.key)
    try:
        result, accepted_here = acceptance.result_or_accepted(here)
        archived_result, _ = acceptance.result_or_accepted(folder)
    except AlteredError:
        return None
    if result is None or archived_result is None or accepted_here is None:
        return None
    has_same_weights = result.fields.get("weights_sha256") == archived_result.fields.get("weights_sha256")
    return here if has_same_weights and accepted_here.run_digest == accepted.run_digest else None


def _record_acceptance(current: Session, base: RunFolder) -> None:
    """Record the acceptance with the base run in the trackers; if a server doesn't answer, `doit record` can later."""
    if base.path.is_dir():
        recorder = Recorder(base.path, current.config, ROOT)
        if not recorder.replay():
            note(f"WARNING: {recorder.titles()} doesn't know of it yet: {recorder.why()}\n  try: {recorder.hint()}")
