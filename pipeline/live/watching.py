"""A run that another command trains, followed by what its folder tells. Reads only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.cluster import earlier
from pipeline.cluster.launchers.answers import log_line
from pipeline.cluster.tracebacks import is_for_a_person
from pipeline.core import locks
from pipeline.core.specs import LaunchPlan, LogLine, Waiting
from pipeline.execution.attempting import shown
from pipeline.live.screen import Screen
from pipeline.runs import rank_beats
from pipeline.runs import status as progress
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, RankBeat

LOOK_S = 0.5
_LAST_BYTES = 1 << 16  # of a log that was long before it was watched


def is_under_way(folder: RunFolder) -> bool:
    """Whether a command works on it now. One that was killed doesn't, whatever the journal says."""
    return locks.is_held(folder.lock)


def follow(folder: RunFolder, screen: Screen, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until no command works on the run any more: tell the screen what its files tell, and say its ranks' lines."""
    files = AttemptFiles(folder)
    since = time.monotonic()
    while True:
        over = not is_under_way(folder)
        for event in files.look():
            screen.tell(event)
            if isinstance(event, LogLine) and is_for_a_person(event):
                screen.say(shown(event))
        if over:
            return
        if screen.is_live:
            screen.tell(Waiting(what=progress.under_way(folder), for_s=time.monotonic() - since))
        sleep(LOOK_S)


class AttemptFiles:
    """``look`` yields what the files of the newest attempt tell since the last one."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._plan: LaunchPlan | None = None
        self._logs: dict[Path, _Log] = {}
        self._beaten = 0

    def look(self) -> Iterator[Any]:
        plan = earlier.newest(self._folder.path)
        if plan is None:
            return
        if self._plan is None or plan.run_id != self._plan.run_id:
            self._plan, self._logs, self._beaten = plan, {}, 0
            yield plan
        attempt = self._folder.path / run_folder.ATTEMPTS / str(plan.attempt)
        for node in plan.nodes:
            path = attempt / f"{node.host}.log"
            log = self._logs.setdefault(path, _Log(path))
            yield from (log_line(node.host, text) for text in log.lines())
        with suppress(OSError):
            changed = (attempt / rank_beats.FILE).stat().st_mtime_ns
            if changed != self._beaten:
                self._beaten = changed
                yield from beats(attempt)


def beats(attempt: Path) -> Iterator[NodeBeat]:
    """What each host told last, from the file that the command rewrites every other second."""
    rows, _ = rank_beats.read(attempt)
    usages = rank_beats.usages(attempt)
    for host in dict.fromkeys([*(row.host for row in rows), *usages]):
        ranks = tuple(
            RankBeat(
                rank=row.rank, pid=0, step=row.step, phase=row.phase, moves=0, for_s=row.for_s, collectives=0,
                own_s=row.own_s,
            )
            for row in rows
            if row.host == host
        )  # fmt: skip
        yield NodeBeat(host=host, ranks=ranks, usage=usages.get(host))


class _Log:
    """A growing log, as whole lines; of a long one first the end."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, -1

    def lines(self) -> list[str]:
        with suppress(OSError), self._path.open("rb") as file:
            size = file.seek(0, 2)
            cut = self._at < 0 and size > _LAST_BYTES
            self._at = max(0, size - _LAST_BYTES) if self._at < 0 else min(self._at, size)
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            return whole.decode(errors="replace").splitlines()[1 if cut else 0 :]
        return []
