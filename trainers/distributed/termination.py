"""The handling of SIGTERM: all ranks end after the same step, though the signal may reach only some of them.

A thread receives the signal at once, even while the main thread waits in a collective. It stops further steps, and
publishes in the rendezvous store how many steps this rank has begun. All ranks end after the largest of these numbers,
because a step that one rank has begun needs the gradients of all."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from types import TracebackType

from torch._C._distributed_c10d import Store

from trainers.distributed.process_group import RankContext

_LOOK_S = 0.5  # interval of checks whether another rank received the signal
_POLL_S = 0.01
_PATIENCE_S = 30.0  # longest wait for the other ranks; normally SIGKILL comes sooner (the agent's after 3 s)
_STORE_KEY = "paceline/terminate"


class Termination:
    """Handles SIGTERM inside its context. The main thread calls ``may_begin`` before each step."""

    def __init__(self, context: RankContext, finished: int) -> None:
        """``finished``: steps of the run so far."""
        self._store, self._ranks = context.store, context.ranks
        self._changed = threading.Condition()  # guards the next two lines
        self._begun = finished  # steps that this rank has begun
        self._requested, self._last = False, -1  # some rank got SIGTERM; the step to end after (-1: not agreed on yet)
        self._ending = False  # the context is left

    def __enter__(self) -> Termination:
        # Python writes the number of each signal into this pipe, which wakes the thread
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(self._pipe[1])
        self._thread = threading.Thread(target=self._listen, name="termination", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler, descriptor = self._before
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, handler)
        self._ending = True
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def may_begin(self, step: int) -> bool:
        """Return True if the step after ``step`` finished steps should run. Waits while the ranks agree on the end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._requested or self._last >= 0)
            if 0 <= self._last <= step:
                return False
            self._begun = step + 1
            return True

    def end(self) -> None:
        """End this process by SIGTERM, as without the handler."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    def _listen(self) -> None:
        """Wait for a signal here, and with other ranks look regularly whether one of them got it."""
        while not self._ending:
            ready, _, _ = select.select([self._pipe[0]], [], [], None if self._store is None else _LOOK_S)
            signalled = bool(ready) and signal.SIGTERM in os.read(self._pipe[0], 64)
            if signalled or (not self._ending and self._requested_elsewhere()):
                self._agree()
                return

    def _requested_elsewhere(self) -> bool:
        try:
            return self._store is not None and self._store.check([_STORE_KEY])
        except RuntimeError:  # torch's DistError derives from it: the store's host is gone
            self._store = None
            return False

    def _agree(self) -> None:
        """Stop further steps, agree with the other ranks on the last step, and let the main thread run up to it."""
        with self._changed:
            self._requested, begun = True, self._begun
        last = begun if self._store is None else self._largest(self._store, begun)
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def _largest(self, store: Store, begun: int) -> int:
        """Return the most steps that any rank has begun; this rank's number if a rank is silent or the store gone."""
        keys = [f"{_STORE_KEY}/{rank}" for rank in range(self._ranks.world_size)]
        until = time.monotonic() + _PATIENCE_S
        try:
            store.set(keys[self._ranks.rank], str(begun))
            store.set(_STORE_KEY, "")
            while not self._ending and time.monotonic() < until:
                if store.check(keys):
                    return max(int(store.get(key)) for key in keys)
                time.sleep(_POLL_S)
        except RuntimeError:  # the store's host is gone
            pass
        return begun
