"""Fetch new checkpoints while the training goes on, so that rank 0's host may be lost with its disk."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.processes import threads
from pipeline.core.specs import LaunchPlan, Outputs

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

_COPY_S = 5.0  # how long a copy to the mirror is waited for
_PAUSE_FACTOR = 10  # times a fetch's duration until the next one: ssh's encryption takes rank 0's processor time


class CheckpointFetch:
    """Fetches checkpoints in a thread, one at a time, at most every ``plan.checkpoint_fetch_s`` seconds (0: never)."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        run_dir: Path,
        on_fetched: Callable[[], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._launcher, self._plan, self._run_dir, self._every_s = launcher, plan, run_dir, plan.checkpoint_fetch_s
        self._on_fetched, self._on_failed = on_fetched, on_failed
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._fetched = threading.Event()
        self._step, self._next_at = 0, time.monotonic() + self._every_s

    def offer(self, step: int) -> None:
        """Fetch the checkpoint of ``step``, the newest on rank 0's host, if it is new and the pause is over."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._every_s and step > self._step and not busy and time.monotonic() >= self._next_at:
            self._fetched.clear()
            self._thread = threads.start(self._fetch, step, name="checkpoints", on_error=lambda _: None)

    def wait(self, *, copied: bool = True) -> None:
        """Wait for the end of a fetch. ``copied``: also for its copy to the mirror, else at most ``_COPY_S``."""
        if self._thread is not None:
            self._fetched.wait()
            self._thread.join(None if copied else _COPY_S)

    def _fetch(self, step: int) -> None:
        began = time.monotonic()
        try:
            fetched = self._launcher.collect(of_step(self._plan, step), self._run_dir, final=False)
            self._has_failed = False
        except OSError as error:
            fetched = False
            if not self._has_failed:
                self._on_failed(error)
            self._has_failed = True
        finally:
            self._fetched.set()
        if fetched:
            self._step = step
            self._on_fetched()
        now = time.monotonic()
        self._next_at = now + max(self._every_s, _PAUSE_FACTOR * (now - began))


def of_step(plan: LaunchPlan, step: int) -> LaunchPlan:
    """Return the plan with one checkpoint as its outputs: a script's ``step`` is a time (ms), of the newest file."""
    if plan.outputs.whole:
        folder = ("checkpoints",)
        outputs = Outputs(resume=folder, final=(), needed=folder, whole=folder, until_s=step / 1000)
        others = folder if plan.outputs.others else ()
        outputs = dataclasses.replace(outputs, others=others, work=plan.outputs.work)
        return dataclasses.replace(plan, outputs=outputs)
    name = f"checkpoints/step-{step:08d}"
    files = (f"{name}.pt", f"{name}.json", "checkpoints/best.*")
    outputs = Outputs(resume=files, final=(), needed=(f"{name}.json",))
    return dataclasses.replace(plan, outputs=outputs)
