"""The verbs that look at runs and prove them: plan, why, status, logs, export, reproduce."""

from __future__ import annotations

import json
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.acceptance import settle
from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.cluster.spares import without_use
from pipeline.core import leftovers
from pipeline.core.errors import PacelineError, UsageError, suggestion
from pipeline.core.files import asked_for, expanded
from pipeline.core.heartbeat import waiting
from pipeline.core.tables import file_size

if TYPE_CHECKING:
    from pipeline.execution.configured_run import Run
    from pipeline.execution.dry_run import PlannedRun
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.result import AlteredError


def plan() -> None:
    from pipeline.execution import dry_run

    options = session().asked.options
    shapes = {"text": dry_run.text, "json": dry_run.as_json, "mermaid": dry_run.mermaid, "dot": dry_run.dot}
    shape = "json" if is_on(options, "json") else options.get("format", "text")
    if shape not in shapes:
        raise UsageError(f"format={shape} is not known; {suggestion(shape, shapes)}")
    say(shapes[shape](_trials()), data=shape != "text")
    current = session()
    if shape == "text" and not current.sweeps and (idle := without_use(current.config.cluster)):
        say(idle)


def _trials() -> list[PlannedRun]:
    from pipeline.execution import dry_run

    current = session()
    current.refuse_data()
    if not current.sweeps:
        return [dry_run.planned(current.config, current.pack, current.run, root=ROOT)]
    return [
        dry_run.planned(item.config, item.run.pack if item.run else None, item.run, root=ROOT, chosen=item.chosen)
        for item in current.space.trials
    ]


def why() -> None:
    asked = session().asked.options.get("step")
    if asked is None:
        _why_run(session())
        return
    from pipeline.cli import steps as own

    own.why(asked)


def _why_run(current: Session) -> None:
    from pipeline.execution import dry_run
    from pipeline.runs import index as runs

    current.refuse_data()
    run = current.run
    steps = dry_run.steps(current.config, current.pack, run, root=ROOT)
    reason = run.reason if run else current.why_no_key
    finished = _finished_parts(current) if run and reason else {}
    found = runs.nearest(current.config.runs_dir, finished, run.key.parts) if run else None
    accepted = run.accepted if run and not reason else None
    damage = _damage(run) if run and not (reason or accepted) else None
    if is_on(session().asked.options, "json"):
        answer = {
            "key": run.key.short if run else None,
            "reason": reason,
            "accepted": str(accepted) if accepted else None,
            "damage": damage and damage.what,
            "nearest": found and found[0],
            "differences": [asdict(item) for item in found[1]] if found else [],
            "steps": [asdict(step) for step in steps],
        }
        say(json.dumps(answer, indent=2, ensure_ascii=False), data=True)
        return
    name, standing = run.key.short if run else "this run", "finished" if damage else "finished and intact"
    say(f"{name}: {reason or f'{accepted or standing}; doit train launches nothing'}")
    _tell_alterations(run if not reason else None, damage)
    if found is not None:
        key, differing = found
        say(f"the nearest finished run is {key}; " + ("it has the same key" if not differing else "it differs in:"))
        for item in differing:
            say(f"  {item}")
    elif run and reason:
        say("no finished run to compare with")
    for step in steps:
        say(f"{step.name:<9} {'done' if step.done else 'to do':<6} {step.why}")


def _tell_alterations(run: Run | None, damage: AlteredError | None) -> None:
    """What of a finished run's folder isn't as the run has left it."""
    from pipeline.runs import status as progress

    if damage is not None:
        say(f"WARNING: {damage.what}\n  it can't be exported or reproduced from here; try: {damage.hint}")
    if run is None:
        return
    for name in progress.added(run.folder):
        say(f"WARNING: {relative(run.folder.path / name)} was added after the run; it is none of its outputs")


def _finished_parts(current: Session) -> dict[str, dict[str, Any]]:
    """Key and key parts of the finished runs to compare with: of the one that ``run=`` names alone, if it is."""
    from pipeline.runs import index as runs

    found = runs.finished_parts(current.config.runs_dir)
    named = current.folder().key if "run" in current.asked.options else ""
    return {named: found[named]} if named in found else found


def _damage(run: Run) -> AlteredError | None:
    """What isn't as it was when the run finished, though no training has to be repeated for it."""
    from pipeline.runs.agreement import check_parts
    from pipeline.runs.result import AlteredError

    try:
        check_parts(run.folder, run.key, run.folder.read_result(), ROOT)
    except AlteredError as altered:
        return altered
    return None


def status() -> None:
    """A run, and before it the steps that are being made, unless a run is named; of a sweep under way its trials."""
    from pipeline.cli import showing, sweeping
    from pipeline.cli import steps as own
    from pipeline.runs import index as runs
    from pipeline.runs import status as progress

    current = session()
    named = "run" in current.asked.options or current.asked.paths
    making = [] if named else own.under_way(current.config.runs_dir)
    for line in making:
        say(line)
    if making and not runs.rows(current.config.runs_dir):
        return
    folder, watched = _named_or_newest(), is_on(current.asked.options, "watch")
    any_run = not named and all(word.startswith("paths.") for word in current.asked.overrides)
    sweep = sweeping.under_way(current.config.runs_dir, folder) if any_run else None
    if watched and sweep is not None:
        showing.watch_sweep(sweep)
        sweeping.show(sweep)
        return
    if sweep is not None:
        say(f"{sweeping.standing(sweep)}: doit status watch=1 follows it; its newest trial:")
    if watched:
        showing.watch(folder)
        if not runs.is_run(folder):
            raise PacelineError(f"run {folder.key} was removed while it was watched", hint="doit runs")
    say(progress.status(folder))


def logs() -> None:
    from pipeline.runs import status as progress

    if "step" in session().asked.options:
        from pipeline.cli import steps as own

        log = own.log_of(session().asked.options["step"])
        say(f"{relative(log)}:\n{log.read_text(encoding='utf-8', errors='replace').rstrip()}", data=True)
        return
    for line in progress.logs(_named_or_newest(), session().asked.options.get("host")):
        say(line, data=True)


def _named_or_newest() -> RunFolder:
    """The run that ``run=`` or the overrides name; with neither the one that something happened to last."""
    from pipeline.runs import index as runs
    from pipeline.runs.folder import RunFolder

    current = session()
    if current.asked.paths:
        return _of_key(current)
    if "run" in current.asked.options or any(not word.startswith("paths.") for word in current.asked.overrides):
        return current.folder()
    rows = runs.rows(current.config.runs_dir)
    if not rows:
        raise UsageError(f"no runs under {relative(current.config.runs_dir)} yet; try doit train experiment=quickstart")
    folder = RunFolder(current.config.runs_dir / rows[-1].key)
    folder.refuse_newer()
    return folder


def _of_key(current: Session) -> RunFolder:
    """The run that a bare word names. Raises UsageError."""
    from pipeline.runs import index as runs

    if len(current.asked.paths) > 1 or "run" in current.asked.options:
        raise UsageError(f"one run at a time, not {' and '.join(current.asked.paths)}", hint="doit runs")
    return runs.find(current.config.runs_dir, current.asked.paths[0])


def export() -> None:
    from pipeline.core import git
    from pipeline.reproduction import archive as exports
    from pipeline.reproduction import recipe
    from pipeline.runs import acceptance

    folder = session().folder()
    asked = session().asked.options.get("to")
    beside = session().config.runs_dir / "exports" / f"{folder.key}.tar.gz"
    to = asked_for(expanded(asked, f"to={asked}").absolute(), f"to={asked}") if asked else beside
    with waiting(say, "packing the archive"):
        size = exports.export(folder, root=ROOT, to=to, weights=is_on(session().asked.options, "weights"))
    say(f"{folder.key}: {relative(to)}, {file_size(size)}")
    _, accepted = acceptance.standing(folder)
    if accepted is not None:
        say(f"  {folder.key} is {accepted}")
    try:
        made_of = recipe.read(folder, ROOT)
    except PacelineError as error:
        say(f"  it tells of the run, but can't be made again: {error.what}")
        return
    again = f"doit reproduce {shlex.quote(f'run={to}')}"
    if git.has_commit(ROOT, made_of.commit):
        say(f"  make it again anywhere  {again}")
    else:
        say(f"  commit {made_of.commit} isn't here, so it was not packed; in a clone that has it: {again}")


def reproduce() -> None:
    from pipeline.reproduction import reproduce as again

    asked = session().asked
    named = asked.options.get("run")
    if named is None:
        raise UsageError("which run? doit reproduce run=KEY, an MLflow run id, or an exported archive; doit runs")
    for word in asked.overrides:
        if not word.lstrip("+~").startswith(again.WHERE):
            raise UsageError(
                f"doit reproduce takes no {word!r}: the run's own configuration is used; "
                f"only {', '.join(again.WHERE)} may be told anew"
            )
    with tempfile.TemporaryDirectory(prefix=leftovers.of_system("reproduce")) as scratch:
        with waiting(say, "reading how the run was made"):
            folder = _to_reproduce(named, Path(scratch))
        reproduce_run(folder)


def reproduce_run(folder: RunFolder) -> None:
    """Make a finished run again and tell how it compares. Raises PacelineError: it came out otherwise, or can't be."""
    from pipeline.reproduction import compare as verdicts
    from pipeline.reproduction import reproduce as again

    config, asked = session().config, session().asked
    work = config.runs_dir.absolute() / again.FOLDER / folder.key
    say(f"run {folder.key}, made again in {relative(work)}")
    verdict = again.reproduce(
        folder,
        root=ROOT,
        work=work,
        data_dir=config.data_dir,
        overrides=[word for word in asked.overrides if word.lstrip("+~").startswith(again.WHERE)],
        keep=is_on(asked.options, "keep"),
        say=say,
    )
    settled = settle(folder, equal=verdict.reproduced, again=verdict.again)
    if settled:
        say(settled)
    if verdict.reproduced:
        folder.prove()
    if not verdict.reproduced:
        raise PacelineError(f"{verdicts.text(verdict)}\n  {relative(work / 'verdict.json')}")
    say(verdicts.text(verdict))
    say(f"  {relative(work / 'verdict.json')}")


def _to_reproduce(named: str, scratch: Path) -> RunFolder:
    """The run folder; unpacked below ``scratch`` from an archive, or from what MLflow holds of a run of elsewhere."""
    from pipeline import tracking
    from pipeline.reproduction import archive as exports
    from pipeline.reproduction import from_mlflow
    from pipeline.runs import index as runs

    archive = _archive(named)
    if archive is not None:
        return exports.unpack(archive, scratch, root=ROOT)
    config = session().config
    try:
        return session().folder()
    except UsageError:
        if not runs.is_mlflow_id(named):
            raise
    uri = tracking.absolute_uri(config.tracking.uri, ROOT)
    return from_mlflow.fetched(named, uri, scratch, runs_dir=config.runs_dir)


def _archive(named: str) -> Path | None:
    """The file of that name, if there is one; a name that no file can have is none."""
    try:
        path = Path(named).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # too long; the home of nobody
        return None
