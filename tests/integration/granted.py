"""One attempt on hosts that a scheduler grants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from tests.contract.conftest import Bench
from tests.contract.listening import listener
from tests.contract.stub import Stub


def settings(bench: Bench, **change: object) -> Bench:
    """The same with other settings of the scheduler."""
    return replace(bench, cluster=bench.cluster.with_settings(**change))


def run(bench: Bench, stub: Stub, lines: list[LogLine] | None = None) -> list[str]:
    """One attempt to its end; what was said of the job."""
    said: list[str] = []
    listening = listener((lines if lines is not None else []).append, on_notice=said.append)
    run_attempt(stub.spec(), closing(Hosts(bench.cluster)), listening)
    return said


class WhenUp(list[LogLine]):
    """Calls once, when both ranks are up."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call, self.up = call, 0

    def append(self, line: LogLine) -> None:
        self.up += line.text == "up"
        if self.up == 2 and line.text == "up":
            self.call()
