"""`doit accept`, `export`, `reproduce` and `prove`: accept, pack and repeat finished runs."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.cli import clone
from pipeline.cli.invocation import is_on
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.files import expanded, replaceable_path, system_temporary_prefix, write_hint, write_json
from pipeline.core.printable import printable_lines
from pipeline.core.processes import git
from pipeline.core.processes.unexpected import is_of_output
from pipeline.core.processes.wait_reports import waiting
from pipeline.core.tables import counted, file_size
from pipeline.execution import complete
from pipeline.execution.run import Run
from pipeline.keys import content_key
from pipeline.keys.content_key import ContentKey, Difference
from pipeline.reproduction import archive as exports
from pipeline.reproduction import compare as verdicts
from pipeline.reproduction import proving, recipe
from pipeline.reproduction import reproduce as again
from pipeline.reproduction.proving import Proof
from pipeline.runs import acceptance, index
from pipeline.runs.acceptance import Acceptance
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import locked
from pipeline.runs.result import AlteredError
from pipeline.tracking.client import Recorder
from trainers.contract import run_folder

_NEEDS_WORD = ("config", "data", "topology")  # what decides the weights as a rule: the run has to be named


def accept(current: Session) -> None:
    """Accept a finished run. Raises UsageError, PacelineError: nothing to accept, or the run must be named."""
    current.refuse_data()
    run = current.run
    if run is None:
        raise PacelineError("the data set isn't fetched, so this run has no key yet", hint="doit fetch, then the same")
    try:
        with locked(run.folder, note):
            base = _undo(run) if is_on(current.invocation.options, "undo") else _accept(current, run)
        _record(current, base)
    except OSError as error:
        if is_of_output(error):
            raise
        raise PacelineError(
            f"what is accepted for run {run.key.short} can't be written: {os_reason(error)}",
            hint=write_hint(error, run.folder.path.parent),
        ) from error


def _accept(current: Session, run: Run) -> RunFolder:
    """Accept a finished run, and return it."""
    if (reason := run.reason) is None:
        accepted_before = acceptance.read(run.folder) if not run.folder.result.exists() else None
        raise PacelineError(f"{run.key.short} is {accepted_before or 'finished: there is nothing to accept'}")
    base, key, differing = _base(current, run, reason)
    origin, patch = complete.collect_provenance(run, sys.argv, time.time(), note)
    accepted = acceptance.by_this_user(run.key, key, differing)
    run.folder.prepare(run.description())
    origin.write(run.folder.path, patch)
    acceptance.write(run.folder, accepted)
    say(f"{run.key.short} is {accepted}; it differs in:")
    for item in differing:
        say(f"  {item}")
    say(f"  prove it      doit reproduce {run.key.short}")
    say("  take it back  doit accept --undo with the same words")
    return base


def _undo(run: Run) -> RunFolder:
    """Withdraw an acceptance, and return the run that was accepted."""
    accepted = acceptance.read(run.folder)
    if accepted is None:
        raise PacelineError(f"{run.key.short}: nothing was accepted for it")
    acceptance.withdraw(run.folder, accepted)
    say(f"{run.key.short} was {accepted}; it is no longer")
    return acceptance.base_of(run.folder, accepted)


def _base(current: Session, run: Run, reason: str) -> tuple[RunFolder, ContentKey, list[Difference]]:
    """Return the finished run to accept, its key, and the differences. Raises PacelineError, UsageError."""
    runs_dir, named = current.config.runs_dir, current.invocation.options.get("run")
    if named is not None:
        base = index.find(runs_dir, named)
        chain = acceptance.read(base)
        if chain is not None and not base.result.exists():
            raise UsageError(f"run={named} is itself {chain}", hint=f"doit accept {chain.run} with the same words")
    else:
        parts = {key: known for key, known in index.finished_parts(runs_dir).items() if key != run.key.short}
        same_version = {key: known for key, known in parts.items() if known.get("version") == run.key.parts["version"]}
        nearest = content_key.nearest(same_version, run.key.parts)
        if nearest is None:
            raise PacelineError(f"{run.key.short}: {reason}, and no finished run is there to accept")
        base = RunFolder(runs_dir / nearest[0])
        _refuse_choice(same_version, run, nearest)
    key, result = base.read_key(), base.read_result()
    if key is None or result is None:
        raise PacelineError(f"run {base.key} isn't finished, so it can hold for no other", hint="doit runs")
    if base.key == run.key.short or key.parts.get("version") != run.key.parts["version"]:
        raise UsageError(f"run={base.key} is this very run, or its key was taken by an older Paceline")
    if (broken := base.stale_because(key.digest)) is not None:
        raise PacelineError(f"run {base.key} can hold for no other: {broken}", hint="doit train with its words")
    return base, key, content_key.differences(key.parts, run.key.parts)


def _refuse_choice(parts: dict[str, dict[str, object]], run: Run, nearest: tuple[str, list[Difference]]) -> None:
    """Refuse to guess. Raises UsageError: several runs are equally near, or more than code differs."""
    key, differing = nearest
    near = [name for name in parts if len(content_key.differences(parts[name], run.key.parts)) == len(differing)]
    lines = "\n".join(f"  {item}" for item in differing)
    if len(near) > 1:
        names = ", ".join(sorted(near))
        raise UsageError(
            f"{len(near)} finished runs are as near, each with {counted(len(differing), 'difference')}: {names}",
            hint=f"the same command with a key, for example doit accept {key} …, which differs in:\n{lines}",
        )
    if any(item.part in _NEEDS_WORD for item in differing):
        raise UsageError(
            f"more than code and environment differs from the nearest finished run, {key}:\n{lines}",
            hint=f"the same command with that key, doit accept {key} …, if that is meant",
        )


def settle(current: Session, folder: RunFolder, *, equal: bool, again: str) -> str:
    """Mark an accepted run as proven, or withdraw the acceptance. Return a line. Raises PacelineError."""
    accepted = acceptance.read(folder)
    if accepted is None:
        return ""
    if again != folder.key:
        raise PacelineError(f"{folder.key} can't be proven here: made again, its key is {again}; it stays {accepted}")
    here = _of_this_clone(current, folder, accepted)
    if equal:
        accepted = replace(accepted, proven=True)
    if here is not None:
        (acceptance.write if equal else acceptance.withdraw)(here, accepted)
        _record(current, acceptance.base_of(here, accepted))
    elsewhere = "" if here is not None else "; no run folder here was accepted so, and the archive stays as it is"
    if equal:
        return f"{folder.key} is {accepted}{elsewhere}"
    if here is None:
        return f"{folder.key} was {accepted}; it came out otherwise{elsewhere}"
    return (
        f"{folder.key} was {accepted}; it came out otherwise, so the acceptance is withdrawn: doit train makes the run"
    )


def _of_this_clone(current: Session, folder: RunFolder, accepted: Acceptance) -> RunFolder | None:
    """Return the run folder here that a proof of an unpacked run applies to, if its weights are equal."""
    if not (folder.path / acceptance.BASE_RESULT_FILE).exists():
        return folder
    here = RunFolder(current.config.runs_dir / folder.key)
    try:
        (mine, known), (theirs, _) = acceptance.result_or_accepted(here), acceptance.result_or_accepted(folder)
    except AlteredError:
        return None
    if mine is None or theirs is None or known is None or known.run_digest != accepted.run_digest:
        return None
    return here if mine.fields.get("weights_sha256") == theirs.fields.get("weights_sha256") else None


def _record(current: Session, base: RunFolder) -> None:
    """Record the acceptance in the trackers; without a server, doit record does it later."""
    if base.path.is_dir():
        recorder = Recorder(base.path, current.config, ROOT)
        if not recorder.replay():
            note(f"WARNING: {recorder.titles()} doesn't know of it yet: {recorder.why()}\n  try: {recorder.hint()}")


def export(current: Session) -> None:
    folder = current.folder()
    option = current.invocation.options.get("to")
    if option:
        to = replaceable_path(clone.typed_in() / expanded(option, f"to={option}"), f"to={option}")
    else:
        to = current.config.runs_dir / "exports" / f"{folder.key}.tar.gz"
    with waiting(note, "packing the archive"):
        size = exports.export(folder, root=ROOT, to=to, weights=is_on(current.invocation.options, "weights"), say=note)
    say(f"{folder.key}: {relative(to)}, {file_size(size)}")
    _, accepted = acceptance.result_or_accepted(folder)
    if accepted is not None:
        say(f"  {folder.key} is {accepted}")
    try:
        made_of = recipe.read(folder, ROOT)
    except PacelineError as error:
        say(f"  it tells of the run, but can't be made again: {error.what}")
        return
    again = f"doit reproduce {shlex.quote(str(to))}"
    if made_of.commit is None:
        say(f"  not from a commit: made again in this project by  {again}")
    elif git.has_commit(ROOT, made_of.commit):
        say(f"  make it again anywhere  {again}")
    else:
        say(f"  commit {made_of.commit} isn't here, so it was not packed; in a clone that has it: {again}")


def reproduce(current: Session) -> None:
    invocation = current.invocation
    named = invocation.options.get("run")
    if named is None:
        raise UsageError("which run? doit reproduce KEY, an MLflow run id, or an exported archive; doit runs")
    for word in invocation.overrides:
        if not word.lstrip("+~").startswith(again.WHERE):
            raise UsageError(
                f"doit reproduce takes no {word!r}: the run's own configuration is used; "
                f"only {', '.join(again.WHERE)} may be set anew"
            )
    with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("reproduce")) as scratch:
        with waiting(note, "reading how the run was made"):
            folder = _to_reproduce(current, named, Path(scratch))
        reproduce_run(current, folder)


def reproduce_run(current: Session, folder: RunFolder) -> None:
    """Repeat a finished run and report the comparison. Raises PacelineError: it came out otherwise, or can't be."""
    config, invocation = current.config, current.invocation
    work = config.runs_dir.absolute() / again.FOLDER / folder.key
    note(f"run {folder.key}, made again in {relative(work)}")
    verdict = again.reproduce(
        folder,
        root=ROOT,
        work=work,
        data_dir=config.data_dir,
        overrides=[word for word in invocation.overrides if word.lstrip("+~").startswith(again.WHERE)],
        keep=is_on(invocation.options, "keep"),
        say=note,
    )
    shown, written = verdicts.text(verdict), f"  {relative(work / 'verdict.json')}"
    if verdict.nothing:
        hint = "paceline.log(step, loss=…) or a file in {run} gives it something to compare"
        raise PacelineError(f"{shown}\n{written}", hint=hint)
    if verdict.within_spread:  # neither proven nor refuted
        say(f"{printable_lines(shown)}\n{written}")
        return
    if settled := settle(current, folder, equal=verdict.reproduced, again=verdict.again):
        say(settled)
    if not verdict.reproduced:
        raise PacelineError(f"{shown}\n{written}")
    folder.prove()
    say(shown)
    if (folder.read_json(run_folder.PROVENANCE) or {}).get("git_commit") is None:
        say(f"not from a commit: its code is the copy in {relative(folder.code)}")
    say(written)


def _to_reproduce(current: Session, named: str, scratch: Path) -> RunFolder:
    """Return the run folder; an archive or a run of another host in MLflow is unpacked below ``scratch``."""
    try:
        archive = clone.typed_in() / Path(named).expanduser()
        is_archive = archive.is_file()
    except (OSError, RuntimeError):  # too long for a file; the home of nobody
        is_archive = False
    if is_archive:
        return exports.unpack(archive, scratch, root=ROOT)
    config = current.config
    try:
        return current.folder()
    except UsageError:
        if not index.is_mlflow_id(named):
            raise
    uri = tracking.absolute_uri(config.tracking.uri, ROOT)
    return recipe.from_mlflow(named, uri, scratch, runs_dir=config.runs_dir)


# ---------------------------------------------------------------------------------------------- proofs
_MOST_KILLS = 1000


def prove(current: Session, *, once: bool = False) -> None:
    """Prove a run; ``once``: unless that was done.

    Raises UsageError: no valid number of kills; PacelineError: it comes out otherwise, or can't be repeated.
    """
    config, folder = current.config, current.folder()
    work = config.runs_dir.absolute() / again.FOLDER / f"{folder.key}{proving.FOLDER_SUFFIX}"
    written = work / "proof.json"
    if once and documents.read_or_empty(written).get("proven") is True:
        say(f"PROVEN {folder.key} before: {relative(written)}")
        return
    kills, seed = (
        _number(current, "kills", 3, least=1, most=_MOST_KILLS),
        _number(current, "moments", 0, least=0, most=1 << 32),
    )
    result = folder.read_result()
    if result is None:
        raise UsageError(f"run {folder.key} isn't finished", hint=f"doit status {folder.key}")

    def proven(kills: int) -> Proof:
        return proving.prove(folder, root=ROOT, work=work, data_dir=config.data_dir, kills=kills, seed=seed, say=note)

    if result.fields.get("proven") is False:
        note(f"run {folder.key} was never repeated: first undisturbed")
        proof = proven(0)
        if not proof.is_equal:
            _report(proof, written)
            return
        folder.prove()
    note(f"run {folder.key}, repeated and killed {counted(kills, 'time')}")
    _report(proven(kills), written)


def _report(proof: Proof, written: Path) -> None:
    """Write and print the proof. Raises PacelineError: it is not proven."""
    write_json(written, _data(proof))
    shown = f"{printable_lines(proving.text(proof))}\n  {relative(written)}"
    differences = "" if proof.verdict.reproduced else f"\n{printable_lines(verdicts.text(proof.verdict))}"
    error = None if proof.proven else PacelineError(f"{shown}{differences}")
    if wants_json():
        answer(_data(proof), error=error)
    if error is not None:
        raise error
    if not wants_json():
        say(shown)


def _number(current: Session, name: str, default: int, *, least: int, most: int) -> int:
    text = current.invocation.options.get(name, str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError(f"{name}={text} is no number from {least} to {most}", hint=f"--{name} {default}")
    return int(text)


def _data(proof: Proof) -> dict[str, Any]:
    culprit = proof.culprit
    tensors = [f"{name}: tensors" for name in proof.evidence.tensors_differ]
    return {
        "run": proof.verdict.run,
        "proven": proof.proven,
        "kills": [{"after_s": kill.after_s, "checkpoint": kill.checkpoint} for kill in proof.evidence.kills],
        "resumed_at": [*proof.evidence.resumed_at],
        "started_over": proof.evidence.started_over,
        "offer": proof.offer or None,
        "differs_at": None if proof.proven else proof.evidence.differs_at,
        "culprit": culprit.name.lower() if culprit is not None else None,
        "finding": culprit.value[0] if culprit is not None else None,
        "mend": culprit.value[1] if culprit is not None else None,
        "differences": [*map(str, proof.verdict.outcome), *tensors],
    }
