"""Take some kinds of an attempt's events, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.cluster.events import AllSucceeded, AttemptEvent, Emit, HostNote, LogLine, Notice, ShownLine
from pipeline.core.specs import LaunchPlan

Take = Callable[[Any], object]


def listener(
    on_line: Callable[[LogLine], object] = lambda _: None,
    *,
    on_notice: Take = lambda _: None,
    on_note: Take = lambda _: None,
    on_start: Take = lambda _: None,
    on_end: Take = lambda _: None,
) -> Emit:
    """Return a receiver that passes on shown lines, and the texts of notices and of remarks about hosts."""

    def take(event: AttemptEvent) -> None:
        match event:
            case ShownLine(line=line):
                on_line(line)
            case Notice(text=text):
                on_notice(text)
            case HostNote(text=text):
                on_note(text)
            case LaunchPlan():
                on_start(event)
            case AllSucceeded():
                on_end(event)

    return take
