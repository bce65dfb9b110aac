"""The up-to-date checks of doit's tasks: whether data are fetched and a run is trained; and the line about a result.

A command whose run is finished needs nothing but this module, so it imports no launcher, no view and no Hydra.
"""

from __future__ import annotations

import os
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
from pipeline.tracking.destinations import URI_VARIABLE
from trainers.contract.host_facts import Hardware


def title(current: Session, verb: str) -> str:
    """Return the line that doit prints about a task: ``train cf08480a1b2c``; '' if a script has no data to fetch."""
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
    """Whether the data and the initial weights are on this computer."""
    weights = current.initial_weights
    return current.pack is not None and (weights is None or weights.url is None)  # with a URL: not downloaded yet


def is_trained(current: Session) -> bool:
    """Whether nothing is left to do: the run is finished, and --prove doesn't ask to repeat it.

    Prints the result of a finished run, and completes its record if the tracking server lacks it.
    """
    try:
        finished = is_finished(current)
    except UsageError:  # doit train meets the same error later, and reports it in one line
        return False
    if finished and current.run is not None and current.run.accepted is None:
        _record_what_is_missing(current, current.run.folder)
    return finished and not current.invocation.is_on("prove")


def is_finished(current: Session) -> bool:
    """Whether the run is finished, or another run's result was accepted for it (`doit accept`); print that result.

    Raises UsageError: a newer version of Paceline wrote the run folder.
    """
    with waiting(note, "looking up the run"):
        run = current.run
        if run is None or run.reason is not None:
            return False
    result, accepted = acceptance.result_or_accepted(run.folder)
    if result is None:  # another command has removed it since the check above
        return False
    word = "finished" if accepted is None else str(accepted)
    say(f"{run.key.short} is {word}: {figures(result)}; {relative(run.folder.path)}", folds=True)
    # for other verbs, such as evaluate, this check is only a step on the way to their own answer
    if current.invocation.verb in ("train", "attach"):
        answer_with(result, run.folder)
    if other := other_hardware(result.fields):
        say(f"  finished on other hardware: {other}; bits unverified here", folds=True)
    warn_of_variables(run)
    return True


def warn_of_variables(run: Run) -> None:
    """Warn of environment variables that the run's code reads and that its ranks, unlike this shell, don't have."""
    if text := run.variables_not_passed:
        note(f"WARNING: {text}")
    tracked = run.config.tracking
    if os.environ.get(URI_VARIABLE) and tracked.enabled and tracked.uri is None:
        note(f'WARNING: {URI_VARIABLE} of this shell has no effect; tracking.uri="${URI_VARIABLE}" records there')


def _record_what_is_missing(current: Session, folder: RunFolder) -> None:
    """Record a finished run in each tracking server that lacks it or has only a part of it."""
    settings = current.config.resolved["tracking"]
    missing = [to for to in tracking.destinations(settings, ROOT) if not to.is_recorded(folder.path)]
    if not missing:
        return
    from pipeline.tracking.client import Recorder  # starts the recorder's process; rarely needed here

    where = " and ".join(tracking.public_uri(to.uri) for to in missing)
    note(f"{folder.key} is not (all) recorded in {where}: it is recorded now")
    with waiting(note, f"recording in {' and '.join(to.title for to in missing)}"):
        Recorder(folder.path, current.config, ROOT).finish(note)


# ------------------------------------------------------------------------------------- the line about a result
def figures(result: Result) -> str:
    """Return ``test/accuracy 0.9917, 1 node, 2 ranks, 2,459 images/s``; for a script the metrics that it logs."""
    if result.fields.get("program"):
        return _script_figures(result)
    accuracy = result.metrics.get("test/accuracy")
    shown = "no test accuracy" if accuracy is None else f"test/accuracy {accuracy:.4f}"
    warning = " (SYNTHETIC DATA: means nothing)" if result.synthetic else ""
    ranks = [counted(result.fields.get(name, 0), noun) for name, noun in (("nnodes", "node"), ("world_size", "rank"))]
    return f"{shown}{warning}, {', '.join(ranks)}, {result.images_per_s or 0:,.0f} images/s"


def _script_figures(result: Result) -> str:
    """Return the last values of a script's first four metrics, its ranks, and ``unproven`` until it was repeated."""
    nonfinite, ranks = nonfinite_note(result.fields), sum(result.nproc_per_node)
    parts = first_metrics(result.metrics, 4) or ([] if nonfinite else ["no metric was logged"])
    # one rank isn't mentioned, because the script may start others itself (Lightning's devices=2)
    parts += [nonfinite, counted(ranks, "rank") if ranks > 1 else ""]
    if not result.fields.get("proven"):
        parts.append("unproven (doit reproduce repeats it and compares)")
    return ", ".join(filter(None, parts))


def answer_with(result: Result, folder: RunFolder) -> None:
    """Print a run's result as the JSON answer, if the command line asks for JSON."""
    if wants_json():
        fields = ("key", "state", "what", "metrics", "images_per_s", "train_s", "hosts", "nproc_per_node", "synthetic")
        data = {name: getattr(result, name) for name in fields}
        answer({**data, "folder": str(folder.path)})


def other_hardware(result: Mapping[str, Any]) -> str | None:
    """Return the processor or GPU that a result.json names, in words; None if this computer has the same."""
    other = recorded_hardware.other_than_here(result, this_hardware()) if result.get("hardware") else None
    return None if other is None else printable(other)


@cache
def this_hardware() -> Hardware:
    """Return the hardware of this computer."""
    return hardware.hardware()
