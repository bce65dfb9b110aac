"""Notices to the user: call ``notify.command`` when a run or sweep ends, or its ranks hang.

Verbs that train use a ``Notifier`` as a context around their work. The command gets the notice as JSON on its stdin and
as variables. The training never waits for it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from pipeline.cluster.events import Verdict
from pipeline.config.schema import NotifyConfig
from pipeline.core.errors import Killed, PacelineError
from pipeline.core.masking import shown
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import Interruptible
from pipeline.core.redact import hide
from pipeline.core.specs import LaunchPlan, State
from pipeline.core.tables import quantity

LIMIT_S = 8.0  # for one notice; a command that takes longer can leave a process in the background
_MOST_BYTES = 100_000  # of a variable: Linux starts no program with one of 128 KiB
STALLED = "STALLED"  # the state in a notice about hanging ranks
_FIGURES = ("test/accuracy", "val/accuracy")  # metrics in the line; without these as many of the first ones


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The content of a notice. Users see these names, in JSON and in upper case as variables."""

    kind: str  # run or sweep
    state: str
    key: str  # of the run; of a sweep its name
    name: str  # what was run, in words
    metrics: Mapping[str, float] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    error: str = ""  # its first line
    minutes: float = 0.0  # how long this command worked on it

    @property
    def text(self) -> str:
        """One line for users."""
        names = [name for name in _FIGURES if name in self.metrics] or [*self.metrics][: len(_FIGURES)]
        figures = [f"{name} {quantity(name, self.metrics[name], '.4g')}" for name in names]
        reason = f": {self.error}" if self.error else ""
        return ", ".join(
            [f"{self.state} {self.kind} {self.key} ({self.name}){reason}", *figures, f"{self.minutes:.1f} min"]
        )


def as_json(notice: Notice) -> str:
    """Return the notice with its ``text``, as chat webhooks take it; metrics that are no numbers are null."""
    fields = {**asdict(notice), "hosts": list(notice.hosts), "metrics": _metrics(notice)}
    return json.dumps({"text": notice.text, **fields}, ensure_ascii=False)


def as_environment(notice: Notice) -> dict[str, str]:
    """Return the notice as variables PACELINE_STATE, PACELINE_KEY, …; too long ones are left out."""
    fields = {**asdict(notice), "text": notice.text, "hosts": " ".join(notice.hosts)}
    fields |= {"minutes": f"{notice.minutes:.1f}", "metrics": json.dumps(_metrics(notice))}
    texts = {f"PACELINE_{name.upper()}": str(value).replace("\0", "") for name, value in fields.items()}
    return {name: text for name, text in texts.items() if len(os.fsencode(text)) <= _MOST_BYTES}


def _metrics(notice: Notice) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in notice.metrics.items()}


class Notifier:
    """Sends a notice when the ranks of a run or sweep hang, and at the end of the context how the work ended.

    A thread of its own sends each notice. At the end of the context unfinished ones get LIMIT_S more seconds. ``say``
    is called with one warning if any notice fails.
    """

    def __init__(self, config: NotifyConfig, say: Callable[[str], None], *, kind: str, key: str, name: str) -> None:
        self._argv, self._say = shlex.split(config.command or ""), say
        self._notice = Notice(kind=kind, state=State.FINISHED, key=key, name=name)
        self._began = time.monotonic()
        self._sent: list[threading.Event] = []  # one for each notice under way, set when its command has ended
        self._has_failed = False
        self._process_groups: set[int] = set()
        # reported now, not after hours of training
        if self._argv and process.find(self._argv[0]) is None:
            self._warn(f"{self._argv[0]} is not there, or not executable")

    def on_event(self, event: Any) -> None:
        """Note the hosts of an attempt; send a notice if its ranks hang. Doesn't wait.

        The events of a sweep's trials are pairs (trial number, event); of these only hanging ranks count.
        """
        if isinstance(event, LaunchPlan):
            self._notice = replace(self._notice, hosts=tuple(node.host for node in event.nodes))
        trial, of_attempt = event if type(event) is tuple else (None, event)  # not a NamedTuple: that is an event
        if isinstance(of_attempt, Verdict):
            self._send_state(STALLED, of_attempt.text if trial is None else f"trial {trial}: {of_attempt.text}")

    def ended(self, metrics: Mapping[str, float], error: str = "") -> None:
        """Note how the work ended without an exception; ``error`` if trials of a sweep failed."""
        state = State.FAILED if error else State.FINISHED
        self._notice = replace(self._notice, state=state, metrics=metrics, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send the last notice, and wait a few seconds at most for all that are under way."""
        state, line = self._notice.state, self._notice.error
        if error is not None:
            message = error.what if isinstance(error, PacelineError) else type(error).__name__
            line = message.strip().partition("\n")[0]
            state = State.KILLED if isinstance(error, Killed | KeyboardInterrupt) else State.FAILED
        self._send_state(state, line)
        self.wait()

    def _send_state(self, state: str, error: str) -> None:
        minutes = (time.monotonic() - self._began) / 60
        self.send(replace(self._notice, state=str(state), error=error, minutes=minutes))

    def send(self, notice: Notice) -> None:
        """Send a notice, if the user wants any. Doesn't wait."""
        if self._argv:
            sent = threading.Event()
            self._sent.append(sent)
            threads.start(self._call, notice, sent, name="notify.command", on_error=self._warn)

    def wait(self) -> None:
        """Wait for notices under way, at most LIMIT_S. Ctrl-C ends only the notices."""
        try:
            with Interruptible():
                self._wait()
        except Killed as error:
            if not all(sent.is_set() for sent in self._sent):
                self._warn(f"{error.what.partition(';')[0]} before it was through")
            process.end_groups(self._process_groups)
        except KeyboardInterrupt:  # an earlier Ctrl-C, which the last notice reports: keep waiting
            self._wait()
        self._sent = []

    def _wait(self) -> None:
        """Wait without ``Thread.join``, which returns early after a signal."""
        deadline = time.monotonic() + LIMIT_S + 1
        for sent in self._sent:
            if not sent.wait(max(0.0, deadline - time.monotonic())):
                self._warn(f"nothing came of it in {LIMIT_S:.0f} s")

    def _call(self, notice: Notice, sent: threading.Event) -> None:
        """Call the command with the notice on its stdin and in its environment."""
        env, body = {**os.environ, **as_environment(notice)}, f"{as_json(notice)}\n".encode()
        try:
            ended = process.run_group(self._argv, input=body, env=env, timeout_s=LIMIT_S, running=self._process_groups)
            if ended.code != 0:
                last_line = (ended.stderr.strip().splitlines() or [""])[-1]
                reason = f": {last_line}" if last_line else ""
                self._warn(f"{self._argv[0]} ended with exit code {ended.code}{reason}")
        except PacelineError as error:
            self._warn(error.what)
        except OSError as error:
            self._warn(error.strerror or str(error))
        finally:
            sent.set()

    def _warn(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"WARNING: notify.command got no notice: {shown(hide(why.strip()))[:200]}")
