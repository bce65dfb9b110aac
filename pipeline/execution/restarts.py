"""Whether another attempt may end otherwise than the last one, and on which hosts it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from pipeline.cluster import spares
from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


class Restarts:
    """The attempts of one command: the cluster as it is by now, and how the last attempt ended."""

    def __init__(self, cluster: Cluster, *, shards: int = 0, keeps_hosts: bool = False, goes_on: bool = False) -> None:
        """``keeps_hosts``: they are a sweep's, which deals them out, so no other takes the place of one. ``goes_on``: a
        command before this one has begun the run, and may have been killed after a host was gone."""
        self.cluster, self.shards = cluster, shards
        self._keeps_hosts = keeps_hosts
        self.begun = False
        self.replaces = goes_on and cluster.max_restarts > 0
        self._last: tuple[str, int, str] | None = None
        self._gone: dict[str, float] = {}  # hosts that could not be asked to stop → unix time at which their lease ends

    def after(self, error: TrainingError, *, step: int, now: float, saved: str = "") -> None:
        """An attempt has failed. Raises TrainingError where the next one would fail in the same way: for a value of the
        configuration, or at the same step with the same message (numbers in it don't count), for a reason that is no
        host's; where somebody has ended it by the scheduler; or where it ended well and can't be brought here yet.

        Args:
            saved: what a script goes on from; where it is another checkpoint than before, the script has advanced.
        """
        if error.cause in ("config", "cancelled", "outputs"):
            raise error
        failure = re.sub(r"\d+", "#", error.what.partition("\n")[0]), step, saved
        if error.cause != "host" and failure == self._last:
            known = f"at step {step} before" if step else "before, and no logged step or checkpoint tells of progress"
            raise TrainingError(
                f"{error.what}\nit has failed in the same way {known}, so it is not tried again",
                hint=error.hint,
                cause=error.cause,
            ) from None
        self._last, self.begun, self.replaces = failure, True, True
        self._gone |= dict.fromkeys(error.gone, now + self.cluster.lease_s)

    def may_still_run(self, now: float) -> str:
        """Where an earlier attempt may have left ranks, as the end of a sentence that there are none; '': nowhere."""
        late = [f"{host} until {clock(ends)}" for host, ends in self._gone.items() if ends > now]
        if not late:
            return ""
        return f", but perhaps on {', '.join(late)} (cluster.lease_s={self.cluster.lease_s:g}), which couldn't be asked"

    def replace(self, gone: Sequence[str]) -> list[str]:
        """Let spares take the places of the hosts ``gone``, or go on without them where trainer.shards and
        cluster.min_nodes allow; lines that say so. None where nothing does: the same hosts are asked again."""
        if not gone or self._keeps_hosts:
            return []
        replaced = spares.replace(self.cluster, gone)
        if replaced is None and self.shards:
            replaced = spares.shrink(self.cluster, gone, lambda ranks: self.shards % ranks == 0)
        if replaced is None:
            return []
        self.cluster, lines = replaced
        return lines

    def passed_over(self, gone: Sequence[str]) -> list[str]:
        """Why spares stay idle though the hosts ``gone`` have none in their place, a line for each."""
        return [] if self._keeps_hosts else spares.passed_over(self.cluster, gone)


class Waits:
    """The pauses between tries of hosts that don't answer: longer and longer ones, for ``limit_s`` together."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.doing = limit_s, ""
        self._pause_s = _FIRST_PAUSE_S
        self._ends: float | None = None

    def next(self, now: float) -> float | None:
        """Seconds until the next try; None: none is left. ``now`` is of a clock that only goes forward."""
        self._ends = now + self.limit_s if self._ends is None else self._ends
        if now >= self._ends:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return min(pause_s, self._ends - now)


def clock(unix_time: float) -> str:
    """``13:45:12``, of this computer."""
    return time.strftime("%H:%M:%S", time.localtime(unix_time))
