"""Who is told of the end of a run or a sweep (notify.command=, notify.url=), and of ranks that stop moving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import Killed, PacelineError
from pipeline.core.specs import LaunchPlan, State
from pipeline.core.tables import counted

if TYPE_CHECKING:
    from pipeline.config.build import RunConfig
    from pipeline.config.schema import NotifyConfig
    from pipeline.execution.run import Run
    from pipeline.live.notices import Notices


class Told:
    """What is known of the work as it goes on; ``None`` for ``notices``: nobody is to be told."""

    def __init__(self, notices: Notices | None, *, kind: str, key: str, name: str) -> None:
        self._notices, self._what = notices, {"kind": kind, "key": key, "name": name}
        self._hosts: tuple[str, ...] = ()
        self._began = time.monotonic()
        self._metrics: Mapping[str, float] = {}
        self._error = ""

    def hear(self, event: Any) -> None:
        """Of an attempt: on which hosts it is; that its ranks don't move any more. A trial's come in a pair with its
        number, and the latter alone counts. Doesn't wait."""
        from pipeline.cluster.stalls import Verdict
        from pipeline.live.notices import STALLED

        if isinstance(event, LaunchPlan):
            self._hosts = tuple(node.host for node in event.nodes)
        trial, said = event if type(event) is tuple else (None, event)  # records are tuples too
        if isinstance(said, Verdict):
            self._send(STALLED, said.text if trial is None else f"trial {trial}: {said.text}")

    def ended(self, metrics: Mapping[str, float], error: str = "") -> None:
        """The work is done; ``error``: of a sweep, in which trials have failed."""
        self._metrics, self._error = metrics, error

    def over(self, error: BaseException | None) -> None:
        """Tell how it ended, and wait for those who are told, for a few seconds at most."""
        if self._notices is None:
            return
        if error is not None:
            killed = isinstance(error, Killed | KeyboardInterrupt)
            what = error.what if isinstance(error, PacelineError) else type(error).__name__
            self._send(State.KILLED if killed else State.FAILED, what.strip().partition("\n")[0])
        else:
            self._send(State.FAILED if self._error else State.FINISHED, self._error)
        self._notices.wait()

    def _send(self, state: str, error: str) -> None:
        from pipeline.live.notices import Notice

        if self._notices is not None:
            minutes = (time.monotonic() - self._began) / 60
            known: dict[str, Any] = {**self._what, "metrics": self._metrics, "hosts": self._hosts, "minutes": minutes}
            self._notices.send(Notice(state=str(state), error=error, **known))


def of_run(run: Run, say: Callable[[str], None]) -> AbstractContextManager[Told]:
    """Of one run."""
    from pipeline.runs.contents import what

    return _told(run.config.notify, say, kind="run", key=run.key.short, name=what(run.config.resolved))


def of_sweep(first: RunConfig, key: str, trials: int, say: Callable[[str], None]) -> AbstractContextManager[Told]:
    """Of a sweep, whose trials tell nobody of their ends. ``first``: the configuration of one of them."""
    from pipeline.runs.contents import what

    return _told(first.notify, say, kind="sweep", key=key, name=f"{counted(trials, 'trial')} of {what(first.resolved)}")


@contextmanager
def _told(config: NotifyConfig, say: Callable[[str], None], kind: str, key: str, name: str) -> Iterator[Told]:
    notices = None
    if config.command is not None or config.url is not None:
        from pipeline.live.notices import Notices

        notices = Notices(config, say)
    told = Told(notices, kind=kind, key=key, name=name)
    try:
        yield told
    except BaseException as error:
        told.over(error)
        raise
    told.over(None)
