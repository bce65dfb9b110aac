"""What doit asks before it starts a task: whether its work is done already. For a finished run a command does no more,
so this module imports no launcher, no view and no Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipeline import tracking
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster.agent.host import hardware
from pipeline.core.errors import UsageError
from pipeline.core.printable import printable
from pipeline.core.processes.threads import waiting
from pipeline.core.tables import counted
from pipeline.execution.run import Run
from pipeline.runs import acceptance, recorded_hardware
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import Result, first_metrics, nonfinite_note
from trainers.contract.host_facts import Hardware


def title(current: Session, verb: str) -> str:
    """Return doit's line about the task; '' for a script without data."""
    if verb == "fetch":
        config = current.config
        if config.script is not None:
            return "fetch data" if config.script.data else ""
        return f"fetch {config.resolved['dataset']['name']}"
    if verb in ("train", "evaluate") and "run" not in current.invocation.options:
        run = current.run
        return f"{verb} {run.key.short}" if run else verb
    return verb


def is_fetched(current: Session) -> bool:
    """Whether the data and the initial weights are here."""
    start = current.initial_weights
    return current.pack is not None and (start is None or start.url is None)


def is_trained(current: Session) -> bool:
    """Whether the run is finished, and --prove asks for no more.

    A finished run is reported, and a record that no tracking server got is completed.
    """
    try:
        finished = is_finished(current)
    except UsageError:  # said by the verb itself, in one line
        return False
    if finished and current.run is not None and current.run.accepted is None:
        _record_what_is_missing(current, current.run.folder)
    return finished and not current.invocation.is_on("prove")


def is_finished(current: Session) -> bool:
    """Whether the run is finished, or another was accepted for it. Raises UsageError: a newer Paceline wrote it."""
    with waiting(note, "looking up the run"):
        run = current.run
        if run is None or run.reason is not None:
            return False
    result, accepted = acceptance.result_or_accepted(run.folder)
    if result is None:  # removed a moment ago
        return False
    word = "finished" if accepted is None else str(accepted)
    say(f"{run.key.short} is {word}: {figures(result)}; {relative(run.folder.path)}", folds=True)
    if current.invocation.verb in ("train", "attach"):
        answer_with(result, run.folder)
    if other := other_hardware(result.fields):
        say(f"  finished on other hardware: {other}; bits unverified here", folds=True)
    warn_of_variables(run)
    return True


def warn_of_variables(run: Run) -> None:
    """Warn of variables of this shell that the run's code reads, as its ranks don't get them."""
    if text := run.variables_not_passed:
        note(f"WARNING: {text}")


def _record_what_is_missing(current: Session, folder: RunFolder) -> None:
    """Complete the record of a finished run that the tracking server lacks, or has only in part."""
    settings = current.config.resolved["tracking"]
    missing = [to for to in tracking.destinations(settings, ROOT) if not to.is_recorded(folder.path)]
    if not missing:
        return
    from pipeline.tracking.client import Recorder  # starts the recorder's process; rarely needed here

    where = " and ".join(tracking.shown(to.uri) for to in missing)
    note(f"{folder.key} is not (all) recorded in {where}: it is recorded now")
    with waiting(note, f"recording in {' and '.join(to.title for to in missing)}"):
        Recorder(folder.path, current.config, ROOT).finish(note)


# ------------------------------------------------------------------------------------- what is said of a result
def figures(result: Result) -> str:
    """Return ``test/accuracy 0.9917, 1 node, 2 ranks, 2,459 images/s``; for a script its own metrics."""
    if result.fields.get("program"):
        return _script_figures(result)
    accuracy = result.metrics.get("test/accuracy")
    shown = "no test accuracy" if accuracy is None else f"test/accuracy {accuracy:.4f}"
    warning = " (SYNTHETIC DATA: means nothing)" if result.synthetic else ""
    ranks = [counted(result.fields.get(name, 0), noun) for name, noun in (("nnodes", "node"), ("world_size", "rank"))]
    return f"{shown}{warning}, {', '.join(ranks)}, {result.images_per_s or 0:,.0f} images/s"


def _script_figures(result: Result) -> str:
    """Return the last value of its first metrics, and whether a repetition came out equal.

    One rank isn't mentioned: it may be a script that starts the others itself (Lightning's ``devices=2``).
    """
    parts, ranks = first_metrics(result.metrics, 4) or ["no metric was logged"], sum(result.nproc_per_node)
    parts += [nonfinite_note(result.fields), counted(ranks, "rank") if ranks > 1 else ""]
    if not result.fields.get("proven"):
        parts.append("unproven (doit reproduce repeats it and compares)")
    return ", ".join(filter(None, parts))


def answer_with(result: Result, folder: RunFolder) -> None:
    """Print a run's result as the JSON answer, if that is wanted."""
    if wants_json():
        fields = ("key", "state", "what", "metrics", "images_per_s", "train_s", "hosts", "nproc_per_node", "synthetic")
        data = {name: getattr(result, name) for name in fields}
        answer({**data, "folder": str(folder.path)})


def other_hardware(result: Mapping[str, Any]) -> str | None:
    """Return the processor or GPU in a result.json, in words, if this computer lacks it."""
    other = recorded_hardware.other_than_here(result, this_hardware()) if result.get("hardware") else None
    return None if other is None else printable(other)


@cache
def this_hardware() -> Hardware:
    """Return the hardware of this computer."""
    return hardware.hardware()
