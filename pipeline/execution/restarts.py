"""What follows a failed attempt: whether another one could succeed, on which hosts, and from which checkpoint.

``attempting`` makes the attempts and asks ``Restarts`` after each failure."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.cluster import starts, validation
from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.execution.run import Run
from pipeline.runs import checkpoints
from trainers.script.settings import ScriptConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


class Restarts:
    """Decides about the next attempt of a command, from the hosts that are left and from how the last one failed."""

    def __init__(
        self, cluster: Cluster, *, shards: int = 0, keeps_hosts: bool = False, begun_before: bool = False
    ) -> None:
        """``keeps_hosts``: a sweep has assigned the hosts, so none is replaced. ``begun_before``: an earlier command
        began the run, and may have been killed after it had lost a host. ``shards``: trainer.shards."""
        self.cluster, self.shards = cluster, shards
        # labels of the hosts of earlier attempts: another host that doesn't answer may have a wrong name
        self.took_part = {host.label for host in cluster.hosts} if begun_before else set[str]()
        self._keeps_hosts = keeps_hosts
        self.has_failed = False  # True after a failed attempt of this command: the next attempt is a restart
        self.replaces = begun_before and cluster.settings.max_restarts > 0  # whether silent hosts may be replaced
        self._last_failure: tuple[str, int, str] | None = None  # message, step, the script's checkpoint
        self._gone: dict[str, float] = {}  # host whose stop wasn't confirmed → unix time at which its lease ends

    def record_failure(self, error: TrainingError, *, step: int, now: float, saved: str = "") -> None:
        """Record a failed attempt. ``saved``: the checkpoints that a script resumes from, as text. Raises TrainingError
        if another attempt wouldn't help."""
        if error.cause in ("config", "cancelled", "outputs"):  # a bad setting, a cancelled job, a failed fetch
            raise error
        self.took_part |= {host.label for host in self.cluster.hosts}
        # the same message (numbers aside) at the same step from the same checkpoint would only come a third time
        failure = re.sub(r"\d+", "#", error.what.partition("\n")[0]), step, saved
        if error.cause != "host" and failure == self._last_failure:
            before = f"at step {step} before" if step else "before, and no logged step or checkpoint tells of progress"
            raise TrainingError(
                f"{error.what}\nit has failed in the same way {before}, so it is not tried again",
                hint=error.hint,
                cause=error.cause,
            ) from None
        self._last_failure, self.has_failed, self.replaces = failure, True, True
        self._gone |= dict.fromkeys(error.gone, now + self.cluster.settings.lease_s)

    def may_still_run(self, now: float) -> str:
        """Return the hosts on which ranks of earlier attempts may still run, as the end of a sentence; '' if none."""
        late = [f"{host} until {clock(ends)}" for host, ends in self._gone.items() if ends > now]
        if not late:
            return ""
        lease_s = self.cluster.settings.lease_s
        return f", but perhaps on {', '.join(late)} (cluster.lease_s={lease_s:g}), which couldn't be asked"

    def replace(self, gone: Sequence[str]) -> list[str]:
        """Replace the hosts ``gone`` by spares, or go on without them where that is allowed. Return lines about it."""
        if not gone or self._keeps_hosts:
            return []
        replaced = validation.replace_lost(self.cluster, gone)
        if replaced is None and self.shards:
            replaced = validation.go_on_with_fewer(self.cluster, gone, lambda ranks: self.shards % ranks == 0)
        if replaced is None:
            return []
        self.cluster, lines = replaced
        return lines

    def idle_spares(self, gone: Sequence[str]) -> list[str]:
        """Return a line for each spare that can't replace the hosts ``gone``, with the reason."""
        return [] if self._keeps_hosts else validation.unfit_spares(self.cluster, gone)


class Pauses:
    """The pauses between requests to silent hosts: each longer than the one before, ``limit_s`` in total."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.doing = limit_s, ""  # doing: what is waited for, in words; '' before the first pause
        self._pause_s = _FIRST_PAUSE_S
        self._ends: float | None = None

    def next(self, now: float) -> float | None:
        """Return the seconds until the next request; None after ``limit_s``. ``now``: time.monotonic()."""
        self._ends = now + self.limit_s if self._ends is None else self._ends
        if now >= self._ends:
            return None
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return min(pause_s, self._ends - now)


def clock(unix_time: float) -> str:
    """Return ``13:45:12``, by this computer's clock."""
    return time.strftime("%H:%M:%S", time.localtime(unix_time))


# ------------------------------------------------------------------------- where the next attempt begins
def next_start(run: Run, lost: Collection[str] = ()) -> str:
    """Return where the next attempt starts, as words that follow "it starts": ``from the checkpoint of step 40``.
    ``lost``: hosts that can't be reached."""
    script = ScriptConfig(**run.config.resolved["program"]) if run.config.script is not None else None
    return next_start_in(run.folder.path, script, lost)


def next_start_in(run_dir: Path, script: ScriptConfig | None, lost: Collection[str] = ()) -> str:
    """Return the same words for a run folder. ``script``: None for Paceline's own trainer."""
    unfinished = starts.unfinished_plan(run_dir)
    # rank 0 wrote into a folder of its host, which may have checkpoints that aren't here
    is_unfetched = unfinished is not None and Path(unfinished.nodes[0].run_dir) != run_dir.resolve()
    unfetched = unfinished if is_unfetched else None
    is_lost = unfetched is not None and unfetched.nodes[0].host in lost
    reachable = None if is_lost else unfetched
    attempts = checkpoints.script_attempts(run_dir, script)
    start = _next_start_of_trainer(run_dir, reachable) if attempts is None else attempts.next_start(reachable)
    if unfetched is not None and is_lost and not start:
        host, fetched = unfetched.nodes[0].host, f"checkpoints are fetched each {unfetched.checkpoint_fetch_s:g} s"
        return (
            f"from the beginning: what attempt {unfetched.attempt} saved is on {host}, which is lost ({fetched}, by "
            "cluster.checkpoint_fetch_s)"
        )
    return start or "from the beginning: there is no checkpoint yet"


def _next_start_of_trainer(run_dir: Path, unfetched: LaunchPlan | None) -> str:
    if step := checkpoints.newest_step(run_dir):
        return f"from the checkpoint of step {step}"
    if unfetched is not None:
        host = unfetched.nodes[0].host
        return f"from the newest checkpoint that attempt {unfetched.attempt} has left on {host}, if there is one"
    return ""
