"""`doit compare`, `plot` and `report`: choose runs, and print or write how they differ beyond the spread over seeds.

The package ``pipeline.comparing`` computes the figures and draws the curves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import invocation, trials
from pipeline.cli.commands.runs import RUNS_DIR, filter_of
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import Session, relative
from pipeline.comparing import comparison as tables
from pipeline.comparing import curves
from pipeline.comparing import report as reports
from pipeline.comparing.comparison import compare as compared
from pipeline.comparing.curves import FORMATS, Band
from pipeline.comparing.groups import ComparedRun, Group, command_line, grouped, metrics_of, read
from pipeline.comparing.report import Absent, Report, why_made
from pipeline.core import masking
from pipeline.core.errors import PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import expanded, replaceable_path, sha256_text, write_atomic, write_hint
from pipeline.core.printable import takes_colours
from pipeline.core.redact import hide
from pipeline.core.specs import State
from pipeline.core.tables import folded, in_width
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import ALTERED
from pipeline.sweep import folder as folders
from pipeline.sweep.folder import SweepFolder


def chosen_runs(current: Session, keys: Sequence[str]) -> list[ComparedRun]:
    """Return the runs with the ``keys`` and of ``sweep=``, or without both all runs, filtered by the overrides.

    Raises UsageError: nothing is named, no run matches, or a word that no run can be chosen by.
    """
    runs_dir, sweep = current.config.runs_dir, current.invocation.options.get("sweep")
    words = [word for word in current.invocation.overrides if not word.lstrip("+").startswith(f"{RUNS_DIR}=")]
    folders = [index.find(runs_dir, key) for key in keys]
    folders += sweep_with_runs(runs_dir, sweep)[1] if sweep is not None else []
    if words:
        rows = [index.row(folder) for folder in folders] or index.rows(runs_dir)
        matching = filter_of(words, current.config.resolved).configs(runs_dir, rows, in_part=True)
        folders = [RunFolder(runs_dir / key) for key in matching]
    elif not folders:
        newest = " ".join(row.key for row in index.rows(runs_dir)[-2:]) or "model=resnet18 dataset=cifar10"
        raise UsageError(
            f"which runs? doit {current.invocation.verb} takes keys or their beginnings, a sweep's name, or overrides",
            hint=f"doit {current.invocation.verb} {newest}; doit runs lists what there is",
        )
    if not folders:
        raise UsageError(f"no run under {relative(runs_dir)} matches these values", hint="doit runs")
    return [read(folder) for folder in {folder.key: folder for folder in folders}.values()]


def sweep_with_runs(runs_dir: Path, name: str | None) -> tuple[SweepFolder, list[RunFolder]]:
    """Return the sweep whose name begins with ``name`` (None: the newest), and its run folders. Raises UsageError."""
    sweep = folders.find(runs_dir, name)
    trial_folders = [RunFolder(runs_dir / trial.key) for trial in sweep.read_begun().trials]
    return sweep, [folder for folder in trial_folders if index.is_run(folder)]


def compare(current: Session) -> None:
    """Compare runs. Raises UsageError: no run matches, or none has a requested metric."""
    current = trials.with_sweep(current)
    options = current.invocation.options
    groups = as_configurations(chosen_runs(current, current.invocation.arguments), current.invocation.arguments)
    requested = [name for name in options.get("metric", "").split(",") if name]
    existing = metrics_of(groups)
    for name in requested:
        if name not in existing:
            raise UsageError(f"metric={name}: none of these runs has it; {suggestion(name, existing)}")
    differences = compared(groups, requested)
    if wants_json():
        answer(tables.as_json(differences))
    elif current.invocation.is_on("markdown"):
        say(tables.markdown(differences))
    else:
        say(tables.text(differences, shutil.get_terminal_size().columns))


def as_configurations(runs: Sequence[ComparedRun], keys: Sequence[str]) -> list[Group]:
    """Group the runs that differ only in their seed: in the order of the typed ``keys``; without keys, best first."""
    return grouped(runs) if keys else reports.best_first(grouped(runs))[0]


_DEFAULT_METRIC = "val/accuracy"
_HEIGHT = 22  # lines
_MAX_CURVES = 8  # more colours can't be told apart


def plot(current: Session) -> None:
    """Plot curves. Raises UsageError: no run matches, none has such a curve, or an unknown kind of file."""
    current = trials.with_sweep(current)
    options, keys = current.invocation.options, current.invocation.arguments
    axis = options.get("x", "step")
    log, target = current.invocation.is_on("log"), _output_file(current)
    form = target.suffix.lower().removeprefix(".") if target is not None else ""
    if target is not None and form not in FORMATS:
        raise UsageError(f"file={options['file']} must end in {', '.join(f'.{one}' for one in FORMATS)}")
    metric, bands, more = metric_and_bands(chosen_runs(current, keys), options.get("metric"), axis, keys=keys)
    bands = [curves.positive_parts(band) for band in bands] if log else bands
    if target is not None:
        from pipeline.comparing.drawing import curve_file  # imports matplotlib, which only a file needs

        _write(target, curve_file(bands, metric=metric, axis=axis, form=form, log=log))
        say(relative(target))
        return
    columns = shutil.get_terminal_size().columns
    colour = takes_colours(sys.stdout, os.environ)
    drawn = curves.plot(bands, metric=metric, axis=axis, width=columns, height=_HEIGHT, log=log, colour=colour)
    say(drawn, is_coloured=colour)
    more_of_them = f"; {more} more configurations: name fewer" if more else ""
    say(folded(f"{curves.NOTE}{more_of_them}", columns))


def metric_and_bands(
    runs: Sequence[ComparedRun], typed_metric: str | None, axis: str, *, keys: Sequence[str] = ()
) -> tuple[str, list[Band], int]:
    """Return the metric to plot, a band for each of the first configurations, and how many more there are.

    A band is a configuration's curve with its spread over seeds. Configurations are in the order of the typed ``keys``;
    without keys the best is first. Raises UsageError: none has such a curve.
    """
    rows = curves.rows_of_runs(runs)  # key → rows of metrics.jsonl
    existing = sorted({name for rows_of_run in rows.values() for row in rows_of_run for name in row.metrics})
    # scripts log metrics of any name: the first one is the default
    of_scripts = [] if _DEFAULT_METRIC in existing else curves.drawable_metrics(rows.values())
    metric = typed_metric or next(iter(of_scripts), _DEFAULT_METRIC)
    for run in runs:
        if run.state == ALTERED:
            note(f"left out: {run.key} is {run.reservation}")
    bands = [curves.band(group, rows, metric, axis) for group in as_configurations(runs, keys)]
    drawable = [band for band in bands if band.points]
    if not existing:
        raise UsageError("none of these runs has logged a metric", hint="doit status KEY")
    if not drawable:
        why = f", over x={axis}" if metric in existing else f"; {suggestion(metric, existing)}"
        raise UsageError(f"metric={metric}: none of these runs has such a curve{why}")
    return metric, drawable[:_MAX_CURVES], max(0, len(drawable) - _MAX_CURVES)


_FOLDER = "reports"  # below the folder of runs
_SUFFIXES = {"html": ".html", "markdown": ".md", "json": ".json"}


def report(current: Session) -> None:
    """Write a report of the named runs, or of a sweep (default: the newest) with its table. Raises PacelineError."""
    current = trials.with_sweep(current)
    options = current.invocation.options
    form, as_json = options.get("format", "html"), wants_json()
    words = [word for word in current.invocation.overrides if not word.lstrip("+").startswith(("paths.", "tracking"))]
    if is_of_sweep := not words and not current.invocation.arguments:
        # show prints the table of the trials; with --json that is the whole answer
        if as_json or "format" not in options:
            trials.show(folders.find(current.config.runs_dir, options.get("sweep")))
        if as_json:
            return
    name, page = _sweep_report(current) if is_of_sweep else _runs_report(current)
    if as_json and "file" not in options:
        answer(reports.as_json(page))
        return
    form = "json" if as_json else form
    if form == "html":
        from pipeline.comparing import drawing  # imports matplotlib (0.6 s), which only the page needs

        text = masking.shown(drawing.html(page))
    else:
        data = json.dumps(reports.as_json(page), indent=2, allow_nan=False) if form == "json" else ""
        text = masking.shown(data or reports.markdown(page))
    if form != "html" and "file" not in options:
        say(text)
        return
    file_name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}{_SUFFIXES[form]}"
    target = _output_file(current) or current.config.runs_dir / _FOLDER / file_name
    _write(target, text)
    if form == "html" and not is_of_sweep:
        figures = tables.by_configuration(page.comparison, page.columns)
        say("\n".join(in_width(figures, shutil.get_terminal_size().columns)))
    say(f"\n{page.summary}\n  report       {relative(target)}" if form == "html" else relative(target))


def _sweep_report(current: Session) -> tuple[str, Report]:
    """Return a name for the file, and the report of a sweep. Raises UsageError: none of its trials was started."""
    sweep, folders = sweep_with_runs(current.config.runs_dir, current.invocation.options.get("sweep"))
    record, runs = sweep.read_begun(), [read(folder) for folder in folders]
    if not runs:
        raise UsageError(f"none of the trials of sweep {sweep.name} was started", hint="doit report --json")
    # trials that were started and have no run folder: it was deleted, or they failed before it was made
    present, absent = {run.key for run in runs}, []
    for trial in trials.results_of(sweep):
        if trial.key not in present and trial.state != State.PLANNED:
            is_deleted = trial.state == State.FINISHED
            why = "its run folder isn't here any more" if is_deleted else hide(trial.detail) or "it has no run folder"
            absent.append(Absent(key=trial.key, what=" ".join(trial.chosen), state=trial.state, why=why))
    missing = record.total - len(runs) - len(absent)
    page = _page(
        runs, subject=f"Sweep {sweep.name}", command=command_line("sweep", record.words), by=record.by,
        why=[f"{missing} of its {record.total} trials were not started yet."] if missing > 0 else [],
        goals=record.goals, absent=absent,
    )  # fmt: skip
    return f"sweep-{sweep.name}", page


def _runs_report(current: Session) -> tuple[str, Report]:
    """Return a name for the file, which is the same for the same runs, and the report of the named runs."""
    runs, runs_dir = chosen_runs(current, current.invocation.arguments), current.config.runs_dir
    if len(runs) > 1:
        command = command_line("report", [*current.invocation.arguments, *current.invocation.overrides])
        name = f"selection-{sha256_text(' '.join(sorted(run.key for run in runs)))[:12]}"
        return name, _page(runs, subject=f"{len(runs)} runs", command=command, why=[])
    (run,) = runs
    # the report of a single run says how it differs from the finished run that is most like it
    others = {key: parts for key, parts in index.finished_parts(runs_dir).items() if key != run.key}
    why = why_made(index.nearest(runs_dir, others, run.parts))
    return run.key, _page(runs, subject=f"Run {run.key}", command=run.command, why=why)


def _page(runs: Sequence[ComparedRun], **about: Any) -> Report:
    """Return the report of these runs; ``about`` are arguments of ``comparing.report.report``."""
    return reports.report(runs, curves.rows_of_runs(runs), unix_time=time.time(), **about)


# ----------------------------------------------------------------------------------------------- files
def _output_file(current: Session) -> Path | None:
    """Return the path of ``file=``, relative to where the command was typed. Raises UsageError: it can't be written."""
    option = current.invocation.options.get("file")
    if option is None:
        return None
    return replaceable_path(invocation.typed_in() / expanded(option, f"file={option}"), f"file={option}")


def _write(target: Path, content: str | bytes) -> None:
    try:
        write_atomic(target, content)
    except OSError as error:
        hint = f"--output <another path>; or {write_hint(error, target.parent)}"
        raise PacelineError(f"{target} can't be written: {os_reason(error)}", hint=hint) from error
