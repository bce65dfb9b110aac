"""`doit clean steps=1`: outputs and logs of steps that nothing needs any more, shown, asked about and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cli.cleaning import agreed
from pipeline.cli.options import is_on
from pipeline.cli.output import say
from pipeline.cli.session import relative, session
from pipeline.core import leftovers
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.tables import aligned, counted, file_size
from pipeline.steps import removal, store


def clean_steps(options: Mapping[str, str]) -> None:
    """Raises UsageError: words that choose runs. PacelineError: one can't be removed."""
    other = [name for name in options if name not in ("steps", "yes")]
    if other:
        raise UsageError(f"{other[0]}={options[other[0]]} chooses runs, and steps=1 is about the outputs of steps")
    graph = session().steps
    leftovers.remove([store.steps_dir(graph.runs_dir)])
    going, staying = removal.idle(graph, session().config.data_dir)
    for folder, why in staying.items():
        say(f"{folder.name} stays: {why}")
    if not going:
        say(f"nothing to remove under {relative(store.steps_dir(graph.runs_dir))}")
        return
    sizes = list(removal.sizes(going))
    rows = [(path.name, file_size(size), why) for (path, why), size in zip(going.items(), sizes, strict=True)]
    say(aligned([("step", "frees", "why"), *rows]))
    amount = f"{_amount([*going])}, {file_size(sum(sizes))}"
    if not is_on(options, "yes") and not agreed(amount):
        return
    for path in going:
        try:
            gone = removal.remove(path)
        except OSError as error:
            raise PacelineError(f"{path.name} can't be removed: {os_reason(error)}") from error
        say(f"removed {path.name}" if gone else f"{path.name} stays: a command is making it")


def _amount(paths: Sequence[Path]) -> str:
    """``the outputs of 2 steps and 1 log``."""
    folders = sum(path.is_dir() for path in paths)
    parts = [f"the outputs of {counted(folders, 'step')}"] if folders else []
    return " and ".join([*parts, *([counted(len(paths) - folders, "log")] if folders < len(paths) else [])])
