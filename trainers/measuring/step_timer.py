"""Time the parts of the Trainer's steps: data, forward, backward, communication, optimizer.

The parts are timed from outside (hooks of the network, wrapped methods), so that a normal training has no overhead.
Each mark waits for the device, which makes a step on a GPU longer than in a training.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainers.measuring.bandwidth import settle
from trainers.optimizers import Optimizer

PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
"""``backward`` begins with the loss; ``communication`` is the wait that remains after the last gradient."""


class Stopwatch:
    """Seconds per part, added up over all steps."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._part: str | None = None
        self._since = 0.0

    def mark(self, part: str | None) -> None:
        """Assign the time from now on to ``part`` (None: to no part)."""
        settle(self._device)
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now


@contextmanager
def watching(model: nn.Module, device: torch.device) -> Iterator[Stopwatch]:
    """Let the steps of ``model`` mark their parts in this context. The caller marks ``data`` where a step begins."""
    watch = Stopwatch(device)
    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(lambda *_: watch.mark("forward")))
        stack.enter_context(model.register_forward_hook(lambda *_: watch.mark("backward")))
        if isinstance(model, DistributedDataParallel):
            _mark_last_gradient(model, watch, stack)
        for kind in Optimizer.__subclasses__():
            stack.enter_context(_wrapped(kind, "step", watch, "optimizer", "other"))
        yield watch
        watch.mark(None)


def _mark_last_gradient(model: DistributedDataParallel, watch: Stopwatch, stack: ExitStack) -> None:
    """Mark ``communication`` at the last gradient of the backward pass that communicates."""
    parameters = [item for item in model.parameters() if item.requires_grad]
    missing = set(parameters)

    def arrived(parameter: Tensor) -> None:
        missing.discard(parameter)
        if not missing and model.require_backward_grad_sync:
            watch.mark("communication")

    stack.enter_context(model.register_forward_pre_hook(lambda *_: missing.update(parameters)))
    for parameter in parameters:
        stack.enter_context(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]


@contextmanager
def _wrapped(kind: type, name: str, watch: Stopwatch, during: str, after: str) -> Iterator[None]:
    original: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        watch.mark(during)
        try:
            return original(*args, **kwargs)
        finally:
            watch.mark(after)

    setattr(kind, name, marked)
    try:
        yield
    finally:
        setattr(kind, name, original)
