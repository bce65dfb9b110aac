"""`doit step`: run or list the user's steps (conf/step/NAME.yaml); and what `why`, `logs` and `status` say of them."""

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
        say(f"step {name} is {'made' if made else 'up to date'}: {relative(_output_folder(graph, name))}")


def make(current: Session, name: str) -> Path:
    """Run one step and what it needs, and return the folder of its outputs. Raises PacelineError."""
    graph = current.steps
    make_all(graph, [name], note, at_once=process_count())
    return _output_folder(graph, name)


def _output_folder(graph: Graph, name: str) -> Path:
    """Return the folder of a made step's outputs."""
    status = graph.status(name)
    assert status.made is not None, "make_all raises where it isn't"
    return status.made.out


def _state(graph: Graph, name: str) -> tuple[str, str]:
    """Return the state of a step and a remark: ``up to date`` and where, ``would run`` or ``can't run`` and why."""
    try:
        status = graph.status(name)
    except UsageError as error:
        return "can't run", error.what
    if status.made is not None:
        unkeyed = status.made.record.dependencies.get("files") or {}  # files that it read without declaring them
        more = f"; its key lacks {', '.join(map(str, unkeyed))}" if unkeyed else ""
        return "up to date", relative(status.made.folder) + more
    return "would run", "; ".join(status.reasons)


def why(current: Session, name: str) -> None:
    """Print why a step would run: what has changed since it was run last."""
    graph = current.steps
    status = graph.status(name)
    key = status.key.short if status.key is not None else None
    if wants_json():
        answer({"step": name, "key": key, "made": status.made is not None, "why": status.reasons})
        return
    if status.made is not None:
        say(f"step {name} is up to date: {relative(status.made.folder)}")
        return
    say(f"step {name} would run:")
    for line in status.reasons:
        say(f"  {line}")
    for before in graph.order([name])[:-1]:
        say(f"step {before}: {': '.join(_state(graph, before))}")


def under_way(runs_dir: Path) -> list[str]:
    """Return a line for each step that a command is running."""
    return [
        f"step {log.stem.rpartition('-')[0]} is being made, its last word {max(0.0, time.time() - written):.0f} s ago: "
        f"{relative(log)}"
        for log, written in step_folders.logs_in_progress(runs_dir)
    ]


def log_of(current: Session, name: str) -> Path:
    """Return the newest log of a step: of its current or failed run, or among its outputs. Raises UsageError."""
    graph = current.steps
    graph.step(name)  # raises if there is no such step
    steps_dir = step_folders.steps_dir(graph.runs_dir)
    made = [folder / step_folders.LOG for folder, _ in step_folders.earlier_versions(graph.runs_dir, name)]
    # NAME-KEY.log; the pattern also matches logs of a step that is called NAME-2
    logs = (path for path in steps_dir.glob(f"{name}-*.log") if path.stem.rpartition("-")[0] == name)
    times = dict[Path, float]()
    for path in (*logs, *made):
        with suppress(FileNotFoundError):  # a step that has just been made takes its log along
            times[path] = path.stat().st_mtime
    if not times:
        raise UsageError(f"step {name} was never started: there is no log of it in {relative(steps_dir)}")
    return max(times, key=lambda path: times[path])
