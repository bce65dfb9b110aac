"""`doit plan`, `doit why` and `doit config`: what would be done, and why. Nothing is started or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.cli import answers
from pipeline.cli.commands import steps as own_steps
from pipeline.cli.commands.finished import other_arithmetic
from pipeline.cli.invocation import is_on
from pipeline.cli.output import note, say, say_folded, say_log
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster.spares import unused_warning
from pipeline.config.overrides import origins
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.tables import first_of
from pipeline.data.trees import Tree, changed_files
from pipeline.execution import dry_run
from pipeline.execution.run import Run
from pipeline.keys.content_key import Difference
from pipeline.runs import acceptance, index
from pipeline.runs import status as run_status
from pipeline.runs.folder import check_parts
from pipeline.runs.result import AlteredError

_MOST_FILES = 5  # of changed data


def plan(current: Session) -> None:
    """Print what would run: the trials, their steps and the commands of each host."""
    options = current.invocation.options
    shapes = {"text": dry_run.text, "mermaid": dry_run.mermaid, "dot": dry_run.dot}
    shape = options.get("format", "text")
    if shape not in shapes:
        raise UsageError(f"format={shape} is not known; {suggestion(shape, shapes)}")
    current.refuse_data()
    if current.sweeps:
        trials = [
            dry_run.planned(item.config, item.run.pack if item.run else None, item.run, root=ROOT, chosen=item.chosen)
            for item in current.space.trials
        ]
    else:
        trials = [dry_run.planned(current.config, current.pack, current.run, root=ROOT)]
    if is_on(options, "json"):
        answers.answer([asdict(item) for item in trials])
        return
    say(shapes[shape](trials))
    if shape == "text" and not current.sweeps and (idle := unused_warning(current.config.cluster)):
        say(idle)


def why(current: Session) -> None:
    """Print why a run, or a user-defined step, would run."""
    if (own_step := current.invocation.options.get("step")) is not None:
        own_steps.why(current, own_step)
        return
    current.refuse_data()
    run = current.run
    steps = dry_run.steps(current.config, current.pack, run, root=ROOT)
    reason = run.reason if run else current.why_no_key
    finished = _keys_of_finished_runs(current) if run and reason else {}
    nearest = index.nearest(current.config.runs_dir, finished, run.key.parts) if run else None
    accepted = run.accepted if run and not reason else None
    damage = _damage(run) if run and not (reason or accepted) else None
    result = acceptance.standing(run.folder)[0] if run and not (reason or damage) else None
    data_files = _changed_data(current, nearest[1]) if nearest else []
    other = other_arithmetic(result.fields) if result else None  # the hardware of a finished run, if not that here
    if is_on(current.invocation.options, "json"):
        answer = {
            "key": run.key.short if run else None,
            "reason": reason,
            "accepted": str(accepted) if accepted else None,
            "damage": damage and damage.what,
            "other_arithmetic": other,
            "nearest": nearest and nearest[0],
            "differences": [asdict(item) for item in nearest[1]] if nearest else [],
            "data_files": data_files,
            "steps": [asdict(step) for step in steps],
        }
        answers.answer(answer)
        return
    name, standing = run.key.short if run else "this run", "finished" if damage else "finished and intact"
    say_folded(f"{name}: {reason or f'{accepted or standing}; doit train launches nothing'}")
    if other:
        say_folded(f"  finished on other arithmetic: {other}; bits unverified here")
    if damage:
        note(f"WARNING: {damage.what}\n  it can't be exported or reproduced from here; try: {damage.hint}")
    if run and not reason:
        for added in run_status.added(run.folder):
            note(f"WARNING: {relative(run.folder.path / added)} was added after the run; it is not an output of it")
    if nearest is not None:
        key, differing = nearest
        say_folded(
            f"the nearest finished run is {key}; " + ("it has the same key" if not differing else "it differs in:")
        )
        for item in differing:
            say_folded(f"  {item}")
            if item.part == "data" and data_files:
                say_folded(f"    {first_of(data_files, _MOST_FILES)}")
    elif run and reason:
        say("no finished run to compare with")
    for step in steps:
        say_folded(f"{step.name:<9} {'done' if step.done else 'to do':<6} {step.why}")
    if reason and not current.invocation.overrides and index.rows(current.config.runs_dir):
        say("without overrides this is the default configuration; doit why last explains the newest run")


def _keys_of_finished_runs(current: Session) -> dict[str, dict[str, Any]]:
    """Return key → key parts of the finished runs to compare with; only of the one that ``run=`` names, if any."""
    parts = index.finished_parts(current.config.runs_dir)
    named = current.folder().key if "run" in current.invocation.options else ""
    return {named: parts[named]} if named in parts else parts


def _changed_data(current: Session, differing: Sequence[Difference]) -> list[str]:
    """Return which files of a script's data differ from those of the nearest finished run."""
    old, pack = next((item.old for item in differing if item.part == "data"), None), current.pack
    if not isinstance(old, str) or not isinstance(pack, Tree):
        return []
    return changed_files(pack, old, current.config.data_dir)


def _damage(run: Run) -> AlteredError | None:
    """Return the error if files of a finished run were altered in a way that needs no new training."""
    try:
        check_parts(run.folder, run.key, run.folder.read_result(), ROOT)
    except AlteredError as altered:
        return altered
    return None


def config(current: Session) -> None:
    """Print the composed configuration, with the source of each value."""
    values = origins.values(current.invocation.overrides)
    if answers.wanted():
        answers.answer([{"field": ".".join(item.keys), "value": item.value, "source": item.origin} for item in values])
        return
    say_log(origins.text(values))
