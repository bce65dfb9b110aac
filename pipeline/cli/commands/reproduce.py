"""`doit export`, `reproduce`, `prove`, `diff`: pack a finished run, repeat it, and find the first difference of two."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.cli import invocation
from pipeline.cli.commands.accept import settle_acceptance
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import expanded, replaceable_path, temporary_prefix, write_json
from pipeline.core.places import REPRODUCTIONS
from pipeline.core.printable import printable_lines
from pipeline.core.processes import git
from pipeline.core.processes.threads import waiting
from pipeline.core.tables import counted, file_size
from pipeline.reproduction import archive as exports
from pipeline.reproduction import compare as verdicts
from pipeline.reproduction import divergence, proving, recipe
from pipeline.reproduction import reproduce as reproducing
from pipeline.reproduction.divergence import FirstDifference, Origin
from pipeline.reproduction.proving import Proof
from pipeline.runs import acceptance, index
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder


def export(current: Session) -> None:
    """Write a run as an archive, and say how it can be made again from that. Raises PacelineError, UsageError."""
    folder = current.folder()
    option = current.invocation.options.get("to")
    if option:
        to = replaceable_path(invocation.typed_in() / expanded(option, f"to={option}"), f"to={option}")
    else:
        to = current.config.runs_dir / "exports" / f"{folder.key}.tar.gz"
    with waiting(note, "packing the archive"):
        size = exports.export(folder, root=ROOT, to=to, weights=current.invocation.is_on("weights"), say=note)
    say(f"{folder.key}: {relative(to)}, {file_size(size)}")
    _, accepted = acceptance.result_or_accepted(folder)
    if accepted is not None:
        say(f"  {folder.key} is {accepted}")
    try:
        run_recipe = recipe.read(folder, ROOT)  # what is needed to repeat the run: commit, patch, words, …
    except PacelineError as error:
        say(f"  it tells of the run, but can't be made again: {error.what}")
        return
    command = f"doit reproduce {shlex.quote(str(to))}"
    if run_recipe.commit is None:
        say(f"  not from a commit: made again in this project by  {command}")
    elif git.has_commit(ROOT, run_recipe.commit):
        say(f"  make it again anywhere  {command}")
    else:
        say(f"  commit {run_recipe.commit} isn't here, so it was not packed; in a clone that has it: {command}")


def reproduce(current: Session) -> None:
    """Repeat the run that a key, an archive or an MLflow id names. Raises PacelineError, UsageError."""
    invocation = current.invocation
    name = invocation.options.get("run")
    if name is None:
        raise UsageError("which run? doit reproduce KEY, an MLflow run id, or an exported archive; doit runs")
    for word in invocation.overrides:
        if not word.lstrip("+~").startswith(reproducing.CHANGEABLE):
            raise UsageError(
                f"doit reproduce takes no {word!r}: the run's own configuration is used; "
                f"only {', '.join(reproducing.CHANGEABLE)} may be set anew"
            )
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-reproduce")) as scratch:
        with waiting(note, "reading how the run was made"):
            folder = _find_run(current, name, Path(scratch))
        reproduce_run(current, folder)


def reproduce_run(current: Session, folder: RunFolder) -> None:
    """Repeat a finished run and report the comparison. Raises PacelineError: it differs, or can't be repeated."""
    config, invocation = current.config, current.invocation
    work = config.runs_dir.absolute() / REPRODUCTIONS / folder.key
    note(f"run {folder.key}, made again in {relative(work)}")
    verdict = reproducing.reproduce(
        folder,
        root=ROOT,
        work=work,
        data_dir=config.data_dir,
        overrides=[word for word in invocation.overrides if word.lstrip("+~").startswith(reproducing.CHANGEABLE)],
        keep=invocation.is_on("keep"),
        say=note,
    )
    shown, written = verdicts.text(verdict), f"  {relative(work / 'verdict.json')}"
    if verdict.nothing:  # the script logs nothing and writes no files
        # {run} is no f-string field here: the user writes it so in the script's arguments
        hint = "paceline.log(step, loss=…) or a file in {run} gives it something to compare"
        raise PacelineError(f"{shown}\n{written}", hint=hint)
    if verdict.within_spread:  # other bits, but no other result: neither proven nor refuted
        say(f"{printable_lines(shown)}\n{written}")
        return
    # `doit accept` may have let the result of another run count for this key: the repetition proves or refutes that
    if settled := settle_acceptance(current, folder, equal=verdict.reproduced, repeated_key=verdict.repeated_key):
        say(settled)
    if not verdict.reproduced:
        raise PacelineError(f"{shown}\n{written}")
    folder.mark_proven()
    say(shown)
    if (folder.read_json(run_folder.PROVENANCE) or {}).get("git_commit") is None:
        say(f"not from a commit: its code is the copy in {relative(folder.code)}")
    say(written)


def _find_run(current: Session, name: str, scratch: Path) -> RunFolder:
    """Return the folder of the run that a key, an archive or the id of an MLflow run names.

    An archive is unpacked below ``scratch``, and so is an MLflow run that has no folder here.
    """
    try:
        archive = invocation.typed_in() / Path(name).expanduser()
        is_archive = archive.is_file()
    except (OSError, RuntimeError):  # the name is too long for a file, or ~USER for an unknown user
        is_archive = False
    if is_archive:
        return exports.unpack(archive, scratch, root=ROOT)
    config = current.config
    try:
        return current.folder()
    except UsageError:
        if not index.is_mlflow_id(name):
            raise
    uri = tracking.absolute_uri(config.tracking.uri, ROOT)
    return recipe.from_mlflow(name, uri, scratch, runs_dir=config.runs_dir)


# ---------------------------------------------------------------------------------------------- proofs
def prove(current: Session, *, unless_proven: bool = False) -> None:
    """Prove a run: repeat it, kill the repetition, resume it, and compare.

    Raises UsageError: a wrong option, or no finished run; PacelineError: the result differs, or can't be repeated.
    """
    config, folder = current.config, current.folder()
    work = config.runs_dir.absolute() / REPRODUCTIONS / f"{folder.key}{proving.FOLDER_SUFFIX}"
    written = work / "proof.json"
    if unless_proven and documents.read_or_empty(written).get("proven") is True:
        say(f"PROVEN {folder.key} before: {relative(written)}")
        return
    kills = current.invocation.numbers("kills").get("kills", 3)
    seed_of_moments = current.invocation.options.get("moments", "0")  # the moments of the kills are drawn from it
    if not seed_of_moments.isdecimal():
        raise UsageError(f"moments={seed_of_moments} is no whole number", hint="--moments 1")
    result = folder.read_result()
    if result is None:
        raise UsageError(f"run {folder.key} isn't finished", hint=f"doit status {folder.key}")

    # program.ignore_metrics=[NAMES]: metrics that may differ without making the run unproven
    ignore_overrides = [
        word for word in current.invocation.overrides if word.lstrip("+~").startswith(reproducing.IGNORED)
    ]

    def repeat(kills: int) -> Proof:
        return proving.prove(
            folder, root=ROOT, work=work, data_dir=config.data_dir, kills=kills, seed=int(seed_of_moments),
            say=note, overrides=ignore_overrides,
        )  # fmt: skip

    # if even an undisturbed repetition differs, a killed one can't show whether checkpoints work
    if result.fields.get("proven") is False:
        note(f"run {folder.key} was never repeated: first undisturbed")
        proof = repeat(0)
        if not proof.is_equal:
            _report_proof(proof, written)
            return
        folder.mark_proven()
    note(f"run {folder.key}, repeated and killed {counted(kills, 'time')}")
    _report_proof(repeat(kills), written)


def _report_proof(proof: Proof, written: Path) -> None:
    """Write the proof to the file ``written``, and print it. Raises PacelineError: the run isn't proven."""
    write_json(written, _proof_as_json(proof))
    shown = f"{printable_lines(proving.text(proof))}\n  {relative(written)}"
    differences = "" if proof.verdict.reproduced else f"\n{printable_lines(verdicts.text(proof.verdict))}"
    error = None if proof.proven else PacelineError(f"{shown}{differences}")
    if wants_json():
        answer(_proof_as_json(proof), error=error)
    if error is not None:
        raise error
    if not wants_json():
        say(shown)


def _proof_as_json(proof: Proof) -> dict[str, Any]:
    """Return the JSON form of a proof (docs/json.md)."""
    culprit = proof.culprit
    tensors = [f"{name}: tensors" for name in proof.evidence.tensors_differ]
    return {
        "run": proof.verdict.run,
        "proven": proof.proven,
        "kills": [{"after_s": kill.after_s, "checkpoint": kill.checkpoint} for kill in proof.evidence.kills],
        "resumed_at": [*proof.evidence.resumed_at],
        "started_over": proof.evidence.started_over,
        "offer": proof.offer or None,  # the argument that would give the script its checkpoint
        "differs_at": None if proof.proven else proof.evidence.differs_at,
        "culprit": culprit.name.lower() if culprit is not None else None,
        "finding": culprit.finding if culprit is not None else None,
        "mend": culprit.mend if culprit is not None else None,
        "differences": [*map(str, proof.verdict.outcome), *tensors],
    }


# ---------------------------------------------------------------------------------------------- diff
def diff(current: Session) -> None:
    """Find the first difference of two trainings: the step and tensor by their digests, then the operator by a replay.

    Raises PacelineError: they differ, or can't be compared; UsageError: not two runs are named.
    """
    runs = _find_pair(current.config.runs_dir, current.invocation.arguments)
    digests = [divergence.read(folder.path) for folder in runs]
    first, steps = divergence.first_difference(digests[0], digests[1])
    origin, summary = None, f"{runs[0].key} and {relative(runs[1].path)}: {counted(len(steps), 'step')} compared"
    if first is None:
        say(f"{summary}, up to step {steps[-1]}: all digests are equal")
    else:
        summary += f"\n  first difference  {divergence.difference_line(first)}"
        if current.invocation.options.get("replay") != "0":
            line, origin = _replay(current, runs, first, len(digests[0][first.step]))
            summary += f"\n  replay            {line}"
    error = None if first is None else PacelineError(summary)  # exit code 1 for a difference, as of diff(1)
    if wants_json():
        data = {
            "runs": [folder.key for folder in runs],
            "steps": len(steps),
            "first": asdict(first) if first else None,
            "origin": asdict(origin) if origin else None,
        }
        answer(data, error=error)
    if error is not None:
        raise error


def _find_pair(runs_dir: Path, keys: Sequence[str]) -> list[RunFolder]:
    """Return the two named runs; if only one is named, that one and its reproduction. Raises UsageError."""
    match [index.find(runs_dir, key) for key in keys]:
        case [first, second]:
            return [first, second]
        case [run]:
            results = [*(runs_dir / REPRODUCTIONS / run.key / "runs").glob(f"*/{run_folder.RESULT}")]
            if results:
                return [run, RunFolder(results[0].parent)]
            raise UsageError(
                f"run {run.key} has no reproduction here to compare it with", hint=f"doit reproduce {run.key}"
            )
    raise UsageError("doit diff takes two runs, or one that was reproduced", hint="doit diff 495e1d cf0848")


def _replay(
    current: Session, runs: Sequence[RunFolder], difference: FirstDifference, ranks: int
) -> tuple[str, Origin | None]:
    """Train both runs again from their last equal step to the first different one, recording what each operator gives.

    Returns a line, and the first operator with another result. Raises PacelineError.
    """
    if not runs[0].program.is_ours:
        return "none, as a script's steps can't be trained one by one", None
    work_dir = current.config.runs_dir.absolute() / REPRODUCTIONS / f"{runs[0].key}-diff"
    first, last, records = difference.equal + 1, difference.step, []
    for folder, name in zip(runs, ("first", "second"), strict=True):
        with waiting(note, f"training steps {first} to {last} of {folder.key} again"):
            work = divergence.replay(folder, work_dir / name, first=first, last=last, ranks=ranks)
        records.append(divergence.recorded(work))
    origin = divergence.origin(*records)
    return divergence.origin_line(origin), origin
