"""`doit step`, and what `why` and `logs` tell of user-defined steps."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from pipeline.cli.invocation import process_count
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import Session, relative
from pipeline.core.errors import UsageError
from pipeline.core.tables import aligned
from pipeline.steps import step_folders
from pipeline.steps.graph import Graph
from pipeline.steps.making import make_all


def step(current: Session) -> None:
    """Run the named steps, with what they need; without a name, list the states of all."""
    graph, names = current.steps, current.invocation.arguments
    if not names:
        rows = [(name, *_state(graph, name)) for name in graph.names()]
        if wants_json():
            answer([dict(zip(("name", "state", "why"), row, strict=True)) for row in rows])
        elif rows:
            say(aligned([("step", "state", ""), *rows]))
        else:
            say("there are no steps yet; write conf/step/NAME.yaml (docs/steps.md)")
        return
    made = make_all(graph, names, note, at_once=process_count())
    for name in names:
        say(f"step {name} is {'made' if made else 'up to date'}: {relative(_out(graph, name))}")


def make(current: Session, name: str) -> Path:
    """Run one step and what it needs, and return the folder of its outputs. Raises PacelineError."""
    graph = current.steps
    make_all(graph, [name], note, at_once=process_count())
    return _out(graph, name)


def _out(graph: Graph, name: str) -> Path:
    standing = graph.standing(name)
    assert standing.made is not None, "make_all raises where it isn't"
    return standing.made.out


def _state(graph: Graph, name: str) -> tuple[str, str]:
    """Return ``up to date`` and where, ``would run`` and why, or ``can't run`` and why not."""
    try:
        standing = graph.standing(name)
    except UsageError as error:
        return "can't run", error.what
    if standing.made is not None:
        lacks = standing.made.record.dependencies.get("files") or {}
        more = f"; its key lacks {', '.join(map(str, lacks))}" if lacks else ""
        return "up to date", relative(standing.made.folder) + more
    return "would run", "; ".join(standing.why)


def why(current: Session, name: str) -> None:
    """Return why a step would run: what has changed since it was run last."""
    graph = current.steps
    standing = graph.standing(name)
    key = standing.key.short if standing.key is not None else None
    if wants_json():
        answer({"step": name, "key": key, "made": standing.made is not None, "why": standing.why})
        return
    if standing.made is not None:
        say(f"step {name} is up to date: {relative(standing.made.folder)}")
        return
    say(f"step {name} would run:")
    for line in standing.why:
        say(f"  {line}")
    for before in graph.order([name])[:-1]:
        say(f"step {before}: {': '.join(_state(graph, before))}")


def under_way(runs_dir: Path) -> list[str]:
    """Return a line for each step that a command is running."""
    return [
        f"step {log.stem.rpartition('-')[0]} is being made, its last word {max(0.0, time.time() - said_at):.0f} s ago: "
        f"{relative(log)}"
        for log, said_at in step_folders.logs_in_progress(runs_dir)
    ]


def log_of(current: Session, name: str) -> Path:
    """Return the log of a step: of its current or last failed run, else of its outputs. Raises UsageError."""
    graph = current.steps
    graph.step(name)
    steps_dir = step_folders.steps_dir(graph.runs_dir)
    made = [folder / step_folders.LOG for folder, _ in step_folders.earlier_versions(graph.runs_dir, name)]
    logs = (path for path in steps_dir.glob(f"{name}-*.log") if path.stem.rpartition("-")[0] == name)  # not NAME-2's
    times = dict[Path, float]()
    for path in (*logs, *made):
        with suppress(FileNotFoundError):  # its step is made by now, and it lies there
            times[path] = path.stat().st_mtime
    if not times:
        raise UsageError(f"step {name} was never started: there is no log of it in {relative(steps_dir)}")
    return max(times, key=lambda path: times[path])
