"""What an attempt whose controller was killed, or whose connection broke, has left on its hosts: its checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.base import Launcher
from pipeline.core.specs import LaunchPlan, NodeFacts, NodePlan, Outputs
from pipeline.runs import attempts

_DONE = "collected"


def bring(launcher: Launcher, facts: Sequence[NodeFacts], run_dir: Path) -> None:
    """End the attempt before on every host, take its checkpoints into ``run_dir``, and clear the hosts of it.

    Does nothing where they came already, or where its first host isn't one of these any more.
    """
    plan = left(run_dir)
    first = next((fact for fact in facts if plan is not None and fact.identity == plan.nodes[0].identity), None)
    if plan is None or first is None:
        return
    nodes = (dataclasses.replace(plan.nodes[0], host=first.host), *plan.nodes[1:])  # it may have another name by now
    plan = dataclasses.replace(plan, nodes=nodes)
    launcher.stop(plan.run_key, run_dir)
    if launcher.collect(plan, run_dir, final=False):
        launcher.clean(plan)
        nothing_is_left(plan, run_dir)


def nothing_is_left(plan: LaunchPlan, run_dir: Path) -> None:
    """Note that no later attempt has to ask the hosts of ``plan`` for anything. A removed folder needs no note."""
    folder = run_dir / "attempts" / str(plan.attempt)
    if folder.is_dir():
        (folder / _DONE).write_text(plan.run_id, encoding="utf-8")


def is_fetched(run_id: str, run_dir: Path) -> bool:
    """Whether nothing that the attempt has left on its hosts is asked for any more: a later one has begun, or all of
    it is here."""
    known, number = attempts.known(run_dir), run_id.rsplit("-", 2)[-2]
    return run_id in known and (known[-1] != run_id or _noted(run_dir, number) == run_id)


def _noted(run_dir: Path, attempt: int | str) -> str:
    path = run_dir / "attempts" / str(attempt) / _DONE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def newest(run_dir: Path) -> LaunchPlan | None:
    """The plan of the newest attempt; None where it can't be told."""
    try:
        return _read(json.loads((run_dir / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def left(run_dir: Path) -> LaunchPlan | None:
    """The same, unless all that it left is here."""
    plan = newest(run_dir)
    if plan is None or not plan.nodes or attempts.known(run_dir)[-1:] != [plan.run_id]:
        return None
    return None if _noted(run_dir, plan.attempt) == plan.run_id else plan


def _read(value: dict[str, Any]) -> LaunchPlan:
    nodes = tuple(NodePlan(**node) for node in value["nodes"])
    outputs: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value["outputs"].items()
    }
    return LaunchPlan(**{**value, "nodes": nodes, "outputs": Outputs(**outputs)})
