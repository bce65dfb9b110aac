"""The launcher ``local``: this computer is the only host.

It starts the same node agent as the others, without ssh. The ranks work in the run folder itself, so nothing is sent or
collected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, ClassVar

from pipeline.cluster.launchers.base import Transport
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.transport.answers import Answer, Output, quoted, too_old
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.files import expanded
from pipeline.core.specs import Host

_STARVED_S = 60.0  # how long other processes may leave the agent no processor time


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """Settings of the local launcher; it adds none."""

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, is_this_computer=True)

    launcher: str = "local"


class LocalTransport(Transport):
    """Starts the agent as a process of this computer.

    Without a network in between, the end of an agent is noticed at once. So an agent that is only silent gets no
    processor time at the moment, and it is worth waiting for.
    """

    silent_s = _STARVED_S

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        return {host.label: self.run_agent(host, stdin, timeout_s + _STARVED_S) for host in hosts}

    def stream_argv(self, host: Host) -> list[str]:
        return [str(expanded(host.python or sys.executable, f"cluster.python={host.python}")), "-E", "-c", BOOTSTRAP]

    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        if answer.reported_error is not None:
            return answer.reported_error, None
        note, code = answer.output.note, answer.output.code
        if note.startswith("program not found") or "can't be run" in note:
            return f"{note} (cluster.python={host.python})", "cluster.python=null, or the path of an interpreter"
        ended = note or f"the node agent ended with exit code {code} and no answer"
        return too_old(answer.output) or (ended + quoted(answer.output, host.secrets.values()), None)
