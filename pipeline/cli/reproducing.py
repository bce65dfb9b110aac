"""`doit export` and `doit reproduce`: a finished run as an archive, and made again."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli import clone
from pipeline.cli.acceptance import settle
from pipeline.cli.options import is_on
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, relative, session
from pipeline.core import leftovers
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import asked_for, expanded
from pipeline.core.heartbeat import waiting
from pipeline.core.printable import printable_lines
from pipeline.core.tables import file_size
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder


def export() -> None:
    from pipeline.core import git
    from pipeline.reproduction import archive as exports
    from pipeline.reproduction import recipe
    from pipeline.runs import acceptance

    folder = session().folder()
    asked = session().asked.options.get("to")
    beside = session().config.runs_dir / "exports" / f"{folder.key}.tar.gz"
    to = asked_for(clone.started_in() / expanded(asked, f"to={asked}"), f"to={asked}") if asked else beside
    with waiting(note, "packing the archive"):
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
    if made_of.commit is None:
        say(f"  not from a commit: made again in this project by  {again}")
    elif git.has_commit(ROOT, made_of.commit):
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
        with waiting(note, "reading how the run was made"):
            folder = _to_reproduce(named, Path(scratch))
        reproduce_run(folder)


def reproduce_run(folder: RunFolder) -> None:
    """Make a finished run again and tell how it compares. Raises PacelineError: it came out otherwise, or can't be."""
    from pipeline.reproduction import compare as verdicts
    from pipeline.reproduction import reproduce as again

    config, asked = session().config, session().asked
    work = config.runs_dir.absolute() / again.FOLDER / folder.key
    note(f"run {folder.key}, made again in {relative(work)}")
    verdict = again.reproduce(
        folder,
        root=ROOT,
        work=work,
        data_dir=config.data_dir,
        overrides=[word for word in asked.overrides if word.lstrip("+~").startswith(again.WHERE)],
        keep=is_on(asked.options, "keep"),
        say=note,
    )
    if verdict.nothing:
        raise PacelineError(
            f"{verdicts.text(verdict)}\n  {relative(work / 'verdict.json')}",
            hint="paceline.log(step, loss=…) or a file in {run} gives it something to compare",
        )
    if verdict.within_spread:  # neither proven nor refuted
        say(f"{printable_lines(verdicts.text(verdict))}\n  {relative(work / 'verdict.json')}")
        return
    settled = settle(folder, equal=verdict.reproduced, again=verdict.again)
    if settled:
        say(settled)
    if not verdict.reproduced:
        raise PacelineError(f"{verdicts.text(verdict)}\n  {relative(work / 'verdict.json')}")
    folder.prove()
    say(verdicts.text(verdict))
    if (folder.read_json(run_folder.PROVENANCE) or {}).get("git_commit") is None:
        say(f"not from a commit: its code is the copy in {relative(folder.code)}")
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
        path = clone.started_in() / Path(named).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # too long; the home of nobody
        return None
