"""Notices to the user: ``notify.command`` is called when a run or a sweep ends, or ranks hang. No work waits for it."""

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
STALLED = "STALLED"
_FIGURES = ("test/accuracy", "val/accuracy")  # a run that has neither shows as many of its first metrics


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The content of a notice."""

    kind: str  # run or sweep
    state: str
    key: str
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
        ended = f"{self.state} {self.kind} {self.key} ({self.name}){f': {self.error}' if self.error else ''}"
        return ", ".join([ended, *figures, f"{self.minutes:.1f} min"])


def as_json(notice: Notice) -> str:
    """Return the notice with its ``text``, as chat webhooks take it; metrics that are no numbers are null."""
    fields = {**asdict(notice), "hosts": list(notice.hosts), "metrics": _metrics(notice)}
    return json.dumps({"text": notice.text, **fields}, ensure_ascii=False)


def as_environment(notice: Notice) -> dict[str, str]:
    """Return the notice as variables for a command: PACELINE_STATE, PACELINE_KEY, …

    Variables that are too long are left out.
    """
    fields = {**asdict(notice), "text": notice.text, "hosts": " ".join(notice.hosts)}
    fields |= {"minutes": f"{notice.minutes:.1f}", "metrics": json.dumps(_metrics(notice))}
    texts = {f"PACELINE_{name.upper()}": str(value).replace("\0", "") for name, value in fields.items()}
    return {name: text for name, text in texts.items() if len(os.fsencode(text)) <= _MOST_BYTES}


def _metrics(notice: Notice) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in notice.metrics.items()}


class Notifier:
    """Sends a notice when ranks of a run or sweep stop moving, and at the end of the context how it ended.

    Each is sent by a thread of its own; at the end those under way have LIMIT_S. ``say`` gets one warning if any fails.
    """

    def __init__(self, config: NotifyConfig, say: Callable[[str], None], *, kind: str, key: str, name: str) -> None:
        self._argv, self._say = shlex.split(config.command or ""), say
        self._notice = Notice(kind=kind, state=State.FINISHED, key=key, name=name)
        self._began = time.monotonic()
        self._done: list[threading.Event] = []  # of the notices under way
        self._has_failed = False
        self._process_groups: set[int] = set()
        if self._argv and process.find(self._argv[0]) is None:  # said now, not after hours of training
            self._warn(f"{self._argv[0]} is not there, or not executable")

    def hear(self, event: Any) -> None:
        """Take events of an attempt: its hosts, and that its ranks stopped moving.

        In a sweep an event is (trial number, event), and only stalls count. Doesn't wait.
        """
        if isinstance(event, LaunchPlan):
            self._notice = replace(self._notice, hosts=tuple(node.host for node in event.nodes))
        trial, of_attempt = event if type(event) is tuple else (None, event)  # a NamedTuple is an event alone
        if isinstance(of_attempt, Verdict):
            self._send_state(STALLED, of_attempt.text if trial is None else f"trial {trial}: {of_attempt.text}")

    def ended(self, metrics: Mapping[str, float], error: str = "") -> None:
        """Note the end of the work; ``error``: of a sweep with failed trials."""
        state = State.FAILED if error else State.FINISHED
        self._notice = replace(self._notice, state=state, metrics=metrics, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send the last notice, and wait a few seconds at most for those under way."""
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
            self._done.append(done := threading.Event())
            threads.start(self._call, notice, done, name="notify.command", on_error=self._warn)

    def wait(self) -> None:
        """Wait for notices under way, at most LIMIT_S. Ctrl-C ends only the notices."""
        try:
            with Interruptible():
                self._wait()
        except Killed as error:
            if not all(done.is_set() for done in self._done):
                self._warn(f"{error.what.partition(';')[0]} before it was through")
            process.end_groups(self._process_groups)
        except KeyboardInterrupt:  # the Ctrl-C that the last notice reports: wait on
            self._wait()
        self._done = []

    def _wait(self) -> None:
        """Wait without ``Thread.join``, which returns early after a signal."""
        deadline = time.monotonic() + LIMIT_S + 1
        for done in self._done:
            if not done.wait(max(0.0, deadline - time.monotonic())):
                self._warn(f"nothing came of it in {LIMIT_S:.0f} s")

    def _call(self, notice: Notice, done: threading.Event) -> None:
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
            done.set()

    def _warn(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"WARNING: notify.command got no notice: {shown(hide(why.strip()))[:200]}")
