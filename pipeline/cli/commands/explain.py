"""`doit plan`, `doit why` and `doit config`: what would be done, and why. Nothing is started or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.cli.commands import steps as own_steps
from pipeline.cli.finished import other_hardware
from pipeline.cli.output import answer, note, say, say_log, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster.validation import unused_warning
from pipeline.config.overrides import origins
from pipeline.core.tables import first_of
from pipeline.data.trees import Tree, changed_files
from pipeline.execution import dry_run
from pipeline.execution.run import Run
from pipeline.keys.content_key import Difference
from pipeline.runs import acceptance, index
from pipeline.runs import status as run_status
from pipeline.runs.folder import check_parts
from pipeline.runs.result import AlteredError
from trainers.contract.records import as_json

_MAX_FILES = 5  # names of changed data files that are shown


def plan(current: Session) -> None:
    """Print what would run: the trials, the tasks of each (fetch, train, …) and the command of each host."""
    formats = {"text": dry_run.text, "mermaid": dry_run.mermaid, "dot": dry_run.dot}
    chosen_format = current.invocation.options.get("format", "text")
    current.refuse_unfetchable_data()
    if current.sweeps:
        trials = [
            dry_run.planned(item.config, item.run.pack if item.run else None, item.run, root=ROOT, chosen=item.chosen)
            for item in current.space.trials
        ]
    else:
        trials = [dry_run.planned(current.config, current.pack, current.run, root=ROOT)]
    if wants_json():
        answer(as_json([asdict(item) for item in trials]))
        return
    say(formats[chosen_format](trials))
    if chosen_format == "text" and not current.sweeps and (idle := unused_warning(current.config.cluster)):
        say(idle)


def why(current: Session) -> None:
    """Print why a run, or a user-defined step, would run."""
    if (own_step := current.invocation.options.get("step")) is not None:
        own_steps.why(current, own_step)
        return
    current.refuse_unfetchable_data()
    run = current.run
    tasks = dry_run.steps(current.config, current.pack, run, root=ROOT)  # also refuses a newer Paceline's run folder
    reason = run.reason if run is not None else current.why_no_key
    accepted = run.accepted if run is not None and not reason else None
    nearest, differences, damage, hardware = None, list[Difference](), None, None
    # a run that isn't finished is compared with the nearest finished one; a finished one is checked for damage
    if run is not None and reason:
        parts = _parts_of_finished_runs(current)
        nearest, differences = index.nearest(current.config.runs_dir, parts, run.key.parts) or (None, [])
    elif run is not None:
        damage = _damage(run) if accepted is None else None
        result = acceptance.result_or_accepted(run.folder)[0] if damage is None else None
        hardware = other_hardware(result.fields) if result is not None else None
    data_files = _changed_data(current, differences)
    if wants_json():
        answer(
            {
                "key": run.key.short if run is not None else None,
                "reason": reason,
                "accepted": str(accepted) if accepted else None,
                "damage": damage and damage.what,
                "other_hardware": hardware,
                "nearest": nearest,
                "differences": [asdict(item) for item in differences],
                "data_files": data_files,
                "steps": [asdict(task) for task in tasks],
            }
        )
        return
    state = accepted or ("finished" if damage else "finished and intact")
    say(f"{run.key.short if run else 'this run'}: {reason or f'{state}; doit train launches nothing'}", folds=True)
    if hardware:
        say(f"  finished on other hardware: {hardware}; bits unverified here", folds=True)
    if damage:
        note(f"WARNING: {damage.what}\n  it can't be exported or reproduced from here; try: {damage.hint}")
    if run is not None and not reason:
        for added in run_status.files_added_later(run.folder):
            note(f"WARNING: {relative(run.folder.path / added)} was added after the run; it is not an output of it")
    if run is not None and reason:
        _say_nearest(nearest, differences, data_files)
    for task in tasks:
        say(f"{task.name:<9} {'done' if task.done else 'to do':<6} {task.why}", folds=True)
    # a bare `doit why` is often meant for the last run
    names_nothing = "run" not in current.invocation.options and not current.invocation.overrides
    if reason and names_nothing and index.rows(current.config.runs_dir):
        say("without overrides this is the default configuration; doit why last explains the newest run")


def _say_nearest(nearest: str | None, differences: Sequence[Difference], data_files: Sequence[str]) -> None:
    if nearest is None:
        say("no finished run to compare with")
        return
    differs = "it differs in:" if differences else "it has the same key"
    say(f"the nearest finished run is {nearest}; {differs}", folds=True)
    for item in differences:
        say(f"  {item}", folds=True)
        if item.part == "data" and data_files:
            say(f"    {first_of(data_files, _MAX_FILES)}", folds=True)


def _parts_of_finished_runs(current: Session) -> dict[str, dict[str, Any]]:
    """Return key → parts of the key, of all finished runs or of the one that ``run=KEY`` names, if that is finished."""
    parts = index.finished_parts(current.config.runs_dir)
    key = current.folder().key if "run" in current.invocation.options else ""
    return {key: parts[key]} if key in parts else parts


def _changed_data(current: Session, differing: Sequence[Difference]) -> list[str]:
    """Return the files in which the data of a script (a ``Tree``) differ from those of the nearest finished run."""
    old_digest, tree = next((item.old for item in differing if item.part == "data"), None), current.pack
    if not isinstance(old_digest, str) or not isinstance(tree, Tree):
        return []
    return changed_files(tree, old_digest, current.config.data_dir)


def _damage(run: Run) -> AlteredError | None:
    """Return the error about altered files of a run that still counts as finished; None if it is intact."""
    try:
        check_parts(run.folder, run.key, run.folder.read_result(), ROOT)
    except AlteredError as altered:
        return altered
    return None


def config(current: Session) -> None:
    """Print the composed configuration, with the source of each value."""
    values = origins.values(current.invocation.overrides)
    if wants_json():
        answer([{"field": ".".join(item.keys), "value": item.value, "source": item.origin} for item in values])
        return
    say_log(origins.as_yaml(values))
