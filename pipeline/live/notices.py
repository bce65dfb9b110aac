"""Notices of the end of a run or a sweep: to the user's command and address. Nothing waits for them."""

from __future__ import annotations

import json
import math
import os
import shlex
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pipeline.cluster.events import Verdict
from pipeline.config.schema import NotifyConfig
from pipeline.core.errors import Killed, PacelineError
from pipeline.core.masking import shown
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import Interruptible
from pipeline.core.redact import hide
from pipeline.core.specs import LaunchPlan, State
from pipeline.core.tables import quantity
from pipeline.core.web_address import opener

LIMIT_S = 8.0  # for one notice; a command that takes longer can leave a process in the background
_LONGEST = 100_000  # bytes of a variable: Linux starts no program with one of 128 KiB
STALLED = "STALLED"
_FIGURES = ("test/accuracy", "val/accuracy")  # a run that has neither shows as many of its first metrics


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The content of a notice.

    ``kind`` is run or sweep, ``name`` its name, ``error`` the first line of the error, ``minutes`` how long this
    command worked on it.
    """

    kind: str
    state: str
    key: str
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    error: str = ""
    minutes: float = 0.0

    @property
    def text(self) -> str:
        """One line for users."""
        named = [name for name in _FIGURES if name in self.metrics] or [*self.metrics][: len(_FIGURES)]
        figures = [f"{name} {quantity(name, self.metrics[name], '.4g')}" for name in named]
        said = ": ".join([f"{self.state} {self.kind} {self.key} ({self.name})", *([self.error] if self.error else [])])
        return ", ".join([said, *figures, f"{self.minutes:.1f} min"])


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
    return {name: text for name, text in texts.items() if len(os.fsencode(text)) <= _LONGEST}


def _metrics(notice: Notice) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in notice.metrics.items()}


class Notifier:
    """Send the notices of one run or sweep: when its ranks stop moving, and how it ended, at the end of the ``with``.

    Each goes in its own thread; at the end those under way have LIMIT_S.

    Args:
        say: takes the warning about a failed notice, once for the command and once for the address.
        kind: run or sweep.
        key: of the run, or the sweep's name.
        name: its name for users.
    """

    def __init__(self, config: NotifyConfig, say: Callable[[str], None], *, kind: str, key: str, name: str) -> None:
        self._config, self._say = config, say
        self._notice = Notice(kind=kind, state=State.FINISHED, key=key, name=name)
        self._began = time.monotonic()
        self._under_way: list[tuple[str, threading.Event]] = []
        self._failed: set[str] = set()
        self._running: set[int] = set()
        # warn now, not after hours of training
        if config.command and process.find(program := shlex.split(config.command)[0]) is None:
            self._tell("notify.command", f"{program} is not there, or not executable")

    def hear(self, event: Any) -> None:
        """Take events of an attempt: its hosts, and that its ranks stopped moving.

        In a sweep an event is (trial number, event), and only stalls count. Doesn't wait.
        """
        if isinstance(event, LaunchPlan):
            self._notice = replace(self._notice, hosts=tuple(node.host for node in event.nodes))
        trial, of_attempt = event if type(event) is tuple else (None, event)  # a NamedTuple is an event alone
        if isinstance(of_attempt, Verdict):
            self._send(STALLED, of_attempt.text if trial is None else f"trial {trial}: {of_attempt.text}")

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
            what = error.what if isinstance(error, PacelineError) else type(error).__name__
            line = what.strip().partition("\n")[0]
            state = State.KILLED if isinstance(error, Killed | KeyboardInterrupt) else State.FAILED
        self._send(state, line)
        self.wait()

    def _send(self, state: str, error: str) -> None:
        minutes = (time.monotonic() - self._began) / 60
        self.send(replace(self._notice, state=str(state), error=error, minutes=minutes))

    def send(self, notice: Notice) -> None:
        """Send a notice. Doesn't wait."""
        ways = {"notify.command": self._config.command and self._call, "notify.url": self._config.url and self._post}
        for name, way in ways.items():
            if way:
                on_error = lambda why, name=name: self._tell(name, why)  # noqa: E731
                self._under_way.append((name, done := threading.Event()))
                threads.start(self._try, name, way, notice, done, name=name, on_error=on_error)

    def wait(self) -> None:
        """Wait for notices under way, at most LIMIT_S. Ctrl-C ends only the notices."""
        try:
            with Interruptible():
                self._wait()
        except Killed as error:
            for name, done in self._under_way:
                if not done.is_set():
                    self._tell(name, f"{error.what.partition(';')[0]} before it was through")
            process.end_groups(self._running)
        except KeyboardInterrupt:  # the Ctrl-C that the last notice reports: wait on
            self._wait()
        self._under_way = []

    def _wait(self) -> None:
        """Wait without ``Thread.join``, which returns early after a signal."""
        end = time.monotonic() + LIMIT_S + 1
        for name, done in self._under_way:
            if not done.wait(max(0.0, end - time.monotonic())):
                self._tell(name, f"nothing came of it in {LIMIT_S:.0f} s")

    def _try(self, name: str, way: Callable[[Notice], None], notice: Notice, done: threading.Event) -> None:
        try:
            way(notice)
        except PacelineError as error:
            self._tell(name, error.what)
        except OSError as error:  # urllib's are among them
            self._tell(name, str(getattr(error, "reason", "") or error.strerror or error))
        finally:
            done.set()

    def _tell(self, name: str, why: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            self._say(f"WARNING: {name} got no notice: {shown(hide(why.strip()))[:200]}")

    def _call(self, notice: Notice) -> None:
        argv = shlex.split(self._config.command or "")
        env = {**os.environ, **as_environment(notice)}
        body = f"{as_json(notice)}\n".encode()
        done = process.run_group(argv, input=body, env=env, timeout_s=LIMIT_S, running=self._running)
        if done.code != 0:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            raise PacelineError(f"{argv[0]} ended with exit code {done.code}{': ' if last else ''}{last}")

    def _post(self, notice: Notice) -> None:
        import http.client  # these take 30 ms, for who has an address
        import urllib.error
        import urllib.request

        class NoRedirect(urllib.request.HTTPRedirectHandler):
            """Refuse redirects: urllib would follow with an empty GET, and give the login to any host."""

            def redirect_request(self, *_: object) -> None:
                """Return None: the redirect is the answer, and is reported as a failure."""

        url = self._config.url or ""
        parts = urlsplit(url)
        login, at, host = parts.netloc.rpartition("@")
        headers = {"Content-Type": "application/json", "User-Agent": "paceline"}
        headers |= {"Authorization": f"Basic {b64encode(unquote(login).encode()).decode()}"} if at else {}
        address, data = parts._replace(netloc=host).geturl(), as_json(notice).encode()
        request = urllib.request.Request(address, data, headers, method="POST")
        try:
            with opener(url, NoRedirect).open(request, timeout=LIMIT_S) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            with suppress(OSError):
                error.close()
            words = http.client.responses.get(error.code, "")  # the server's own may name the path
            raise PacelineError(f"{_host(url)} answers {error.code} {words}") from None
        except (ValueError, http.client.HTTPException) as error:  # their messages could reveal the address
            raise PacelineError(f"{_host(url)}: {type(error).__name__}") from None


def _host(url: str) -> str:
    """Return the part of an address that may be shown."""
    with suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""
