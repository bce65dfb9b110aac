"""The folder that a batch job shares with the controller: orders to its nodes, and what they tell.

Every file in it is made before the job is submitted and only ever grows: over NFS a new file may stay hidden for half a
minute, what was appended to one shows when it is opened. pipeline/cluster/agent/job.py is the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.payload import message, new_token
from pipeline.core.errors import HostError
from pipeline.core.files import write_atomic

REQUEST = "request"
"""What every node's agent reads first, a file in the job's folder."""
OUTPUT, _ORDERS = "out", "orders"

_TAIL_BYTES = 64 << 10


class JobFolder:
    """One job's folder.

    Args:
        script_name: the file that holds what the scheduler was given.
    """

    def __init__(self, path: Path, script_name: str) -> None:
        self.path, self._script = path, path / script_name

    def make(self, script: str, request: dict[str, Any], nnodes: int) -> None:
        """Everything that the job reads, and the empty files that will be written. Raises OSError."""
        self.path.mkdir(parents=True)
        write_atomic(self._script, script)
        write_atomic(self.path / REQUEST, message(request, new_token()))
        for name in (_ORDERS, OUTPUT, *(f"{of}-{number}" for of in ("node", "beats") for number in range(nnodes))):
            (self.path / name).touch()

    def removed(self, job: str) -> HostError | None:
        """What is said of a job that ended because its folder was removed while it waited; None: it is there."""
        if self.path.is_dir():
            return None
        return HostError(f"{job} found its folder {self.path} removed", hint="the same command begins anew")

    @property
    def script(self) -> str:
        """What the scheduler was given; '' where the folder is gone."""
        try:
            return self._script.read_text(encoding="utf-8")
        except OSError:
            return ""

    def order(self, **order: Any) -> None:
        """Tell all nodes: ``restart`` and ``start`` or ``end``, or ``leave``. Raises OSError."""
        with (self.path / _ORDERS).open("r+", encoding="utf-8") as file:  # never made anew where it was removed
            file.seek(0, 2)
            file.write(json.dumps(order) + "\n")

    def end(self, restart: int) -> None:
        """Tell all nodes to end what they run in that life of the job."""
        with contextlib.suppress(OSError):  # the folder was removed, which ends it too
            self.order(restart=restart, end=True)

    def beat(self) -> None:
        """Tell nodes that wait for a start that somebody still wants to give one."""
        with contextlib.suppress(OSError):
            os.utime(self.path / _ORDERS)

    def leave(self, restart: int | None = None) -> None:
        """Tell all nodes to end what they do and let the job end; ``restart``: in that life of it."""
        which = {} if restart is None else {"restart": restart}
        with contextlib.suppress(OSError):  # the folder was removed, which ends it too
            self.order(**which, leave=True)

    def orders(self) -> list[dict[str, Any]]:
        """All orders so far."""
        return self._lines(_ORDERS)

    def was_left(self) -> bool:
        """Whether the nodes were told to leave for good."""
        return any("leave" in order and "restart" not in order for order in self.orders())

    def is_idle(self, restart: int, nnodes: int) -> bool:
        """Whether every start of this life of the job has ended on every node."""
        started = [
            order["start"]["run_id"] for order in self.orders() if order.get("restart") == restart and "start" in order
        ]
        return all(self.end_of(number, run_id) for run_id in started for number in range(nnodes))

    def output_bytes(self) -> int:
        """How much the job has printed so far."""
        try:
            return (self.path / OUTPUT).stat().st_size
        except OSError:
            return 0

    def told(self, number: int) -> list[dict[str, Any]]:
        """What one node has told so far."""
        return self._lines(f"node-{number}")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text(encoding="utf-8").split("\n")[:-1]
            return [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return []

    def facts(self, restart: int, nnodes: int) -> list[dict[str, Any]]:
        """The facts of the nodes that have told them in this life of the job, in the order of their numbers."""
        rows = [self.told(number) for number in range(nnodes)]
        found = [[row["facts"] for row in told if "facts" in row and row["restart"] == restart] for told in rows]
        return [facts[-1] for facts in found if facts]

    def end_of(self, number: int, run_id: str) -> dict[str, Any] | None:
        """How one node's part of a start has ended, with the node's time; None: not yet."""
        return next((row for row in self.told(number) if row.get("run_id") == run_id and "exit" in row), None)

    def beats(self, number: int, run_id: str) -> dict[str, Any] | None:
        """Where one node's ranks of a start stood lately; None: not told, or it is just being written."""
        try:
            value = json.loads((self.path / f"beats-{number}").read_bytes())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) and value.get("run_id") == run_id else None

    def look(self, restart: int, peers: Sequence[tuple[str, int]] | None) -> None:
        """Ask all nodes how their ranks are."""
        with contextlib.suppress(OSError):
            self.order(restart=restart, look=peers)

    def looks(self, number: int, run_id: str) -> list[dict[str, Any]]:
        """One node's answers to that, in a start."""
        return [row["look"] for row in self.told(number) if row.get("run_id") == run_id and "look" in row]

    def ended_well(self, run_id: str, nnodes: int) -> bool:
        """Whether all nodes have told that a start ended well."""
        ends = [self.end_of(number, run_id) for number in range(nnodes)]
        return all(end is not None and end["exit"]["code"] == 0 for end in ends)

    def output(self, start_bytes: int = 0) -> list[str]:
        """The last lines of what the job has printed from ``start_bytes`` on."""
        try:
            data = (self.path / OUTPUT).read_bytes()[start_bytes:][-_TAIL_BYTES:]
        except OSError:
            return []
        return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
