"""This computer as the only host: the same agent, started without ssh. Nothing is sent or collected."""

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

_STARVED_S = 60.0


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """Settings of the local launcher: no further ones."""

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, is_this_computer=True)

    launcher: str = "local"


class LocalTransport(Transport):
    """Starts the agent as a process of this computer.

    There is no network in between, so the end of an agent is noticed at once. A silent agent only gets no processor
    time, for as long as other processes want it all, which is why it is waited for.
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
