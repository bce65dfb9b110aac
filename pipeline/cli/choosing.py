"""Which runs a command line stands for: keys, words as `doit runs` takes them, a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.session import Session, relative
from pipeline.cli.wanted import PLACE, config_of, experiments_of, matches, started_with, wanted_values
from pipeline.core.errors import UsageError

if TYPE_CHECKING:
    from pipeline.comparing.reading import ComparedRun
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep.folder import SweepFolder


def chosen(current: Session, named: Sequence[str]) -> list[ComparedRun]:
    """The runs that are named by the beginning of their keys, in that order, then those of the sweep, then those with
    all values of the other words.

    Raises:
        UsageError: nothing is named, no run is meant, or a word that none can be chosen by.
    """
    from pipeline.comparing import reading

    runs_dir, sweep = current.config.runs_dir, current.asked.options.get("sweep")
    words = [word for word in current.asked.overrides if not word.lstrip("+").startswith(f"{PLACE}=")]
    folders = [_named(runs_dir, key) for key in named]
    folders += of_sweep(runs_dir, sweep)[1] if sweep is not None else []
    if words:
        folders = _having(current, words, folders or _all(runs_dir))
    elif not folders:
        raise UsageError(
            f"which runs? doit {current.asked.verb} takes keys (or their first digits), sweep=NAME, or overrides",
            hint=f"doit {current.asked.verb} model=resnet18 dataset=cifar10; doit runs lists what there is",
        )
    if not folders:
        raise UsageError(f"no run under {relative(runs_dir)} matches these values", hint="doit runs")
    return [reading.read(folder) for folder in {folder.key: folder for folder in folders}.values()]


def _named(runs_dir: Path, key: str) -> RunFolder:
    from pipeline.runs import index

    try:
        return index.find(runs_dir, key)
    except UsageError as error:  # it speaks of run=KEY
        raise UsageError(error.what.removeprefix("run="), hint=error.hint) from error


def _all(runs_dir: Path) -> list[RunFolder]:
    from pipeline.runs import index
    from pipeline.runs.folder import RunFolder

    return [RunFolder(runs_dir / row.key) for row in index.rows(runs_dir)]


def of_sweep(runs_dir: Path, name: str | None) -> tuple[SweepFolder, list[RunFolder]]:
    """The sweep whose name begins so (None: the newest), and its trials that have a run folder. Raises UsageError."""
    from pipeline.runs import index
    from pipeline.runs.folder import RunFolder
    from pipeline.sweep import folder as folders

    sweep = folders.find(runs_dir, name)
    found = [RunFolder(runs_dir / trial.key) for trial in sweep.begun().trials]
    return sweep, [folder for folder in found if index.is_run(folder)]


def _having(current: Session, words: Sequence[str], folders: Sequence[RunFolder]) -> list[RunFolder]:
    """An altered run is one of them where nothing that its key vouches for says otherwise."""
    from pipeline.runs import index

    experiments = experiments_of(words)
    wanted = wanted_values(words, current.config.resolved)
    found = []
    for folder in folders:
        altered = index.row(folder).state == index.ALTERED
        config = config_of(folder, wanted, altered=altered)
        if started_with(folder, experiments) and matches(config, wanted, in_part=altered):
            found.append(folder)
    return found
