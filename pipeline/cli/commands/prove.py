"""`doit prove`: kill a repetition of a finished run, and compare the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.cli import answers
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, relative, session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_json
from pipeline.core.printable import printable_lines
from pipeline.core.tables import counted
from pipeline.reproduction import compare as verdicts
from pipeline.reproduction import proving
from pipeline.reproduction import reproduce as again
from pipeline.reproduction.proving import Proof
from pipeline.runs.folder import RunFolder

_KILLS = 3
_MOST_KILLS = 1000


def prove() -> None:
    """Prove a run. Raises UsageError: no valid number of kills; PacelineError: it comes out otherwise, or can't be
    repeated.
    """
    kills, seed = _number("kills", _KILLS, least=1, most=_MOST_KILLS), _number("moments", 0, least=0, most=1 << 32)
    folder = session().folder()
    result = folder.read_result()
    if result is None:
        raise UsageError(f"run {folder.key} isn't finished", hint=f"doit status {folder.key}")
    if result.fields.get("proven") is False:
        note(f"run {folder.key} was never repeated: first undisturbed")
        proof = _proven(folder, kills=0, seed=seed)
        if not proof.verdict.reproduced:
            _tell(folder, proof)
            return
        folder.prove()
    note(f"run {folder.key}, repeated and killed {counted(kills, 'time')}")
    _tell(folder, _proven(folder, kills=kills, seed=seed))


def _proven(folder: RunFolder, *, kills: int, seed: int) -> Proof:
    config = session().config
    return proving.prove(
        folder, root=ROOT, work=_place(folder), data_dir=config.data_dir, overrides=(), keep=False, say=note,
        kills=kills, seed=seed,
    )  # fmt: skip


def _place(folder: RunFolder) -> Path:
    return session().config.runs_dir.absolute() / again.FOLDER / f"{folder.key}{proving.FOLDER_SUFFIX}"


def _tell(folder: RunFolder, proof: Proof) -> None:
    """Write and print the proof. Raises PacelineError: it is not proven."""
    written = _place(folder) / "proof.json"
    write_json(written, _data(proof))
    shown = f"{printable_lines(proving.text(proof))}\n  {relative(written)}"
    error = None if proof.proven else PacelineError(f"{shown}{_differences(proof)}")
    if answers.wanted():
        answers.answer(_data(proof), error=error)
    if error is not None:
        raise error
    if not answers.wanted():
        say(shown)


def _differences(proof: Proof) -> str:
    return "" if proof.verdict.reproduced else f"\n{printable_lines(verdicts.text(proof.verdict))}"


def _number(name: str, default: int, *, least: int, most: int) -> int:
    text = session().invocation.options.get(name, str(default))
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError(f"{name}={text} is no number from {least} to {most}", hint=f"--{name} {default}")
    return int(text)


def _data(proof: Proof) -> dict[str, Any]:
    culprit = proof.culprit
    return {
        "run": proof.verdict.run,
        "proven": proof.proven,
        "kills": [{"after_s": kill.after_s, "checkpoint": kill.checkpoint} for kill in proof.kills],
        "resumed_at": [*proof.resumed_at],
        "started_over": proof.started_over,
        "offer": proof.offer or None,
        "differs_at": proof.differs_at,
        "culprit": culprit.name.lower() if culprit is not None else None,
        "finding": culprit.value[0] if culprit is not None else None,
        "mend": culprit.value[1] if culprit is not None else None,
        "differences": [str(item) for item in proof.verdict.outcome],
    }
