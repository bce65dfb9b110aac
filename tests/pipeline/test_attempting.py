"""What the terminal gets of what a rank says."""

from __future__ import annotations

from pipeline.core.specs import LogLine
from pipeline.execution.attempting import shown


def test_a_line_of_the_log_names_host_and_rank() -> None:
    assert shown(LogLine(host="node0", rank=3, text="epoch 1")) == "node0:3 | epoch 1"
    assert shown(LogLine(host="node0", rank=None, text="x" * 2000)) == f"node0:- | {'x' * 2000}"


def test_of_a_line_that_fills_pages_the_beginning_is_shown() -> None:
    said = shown(LogLine(host="node0", rank=3, text="é" * 65_536))
    assert said == f"node0:3 | {'é' * 2000}… (cut: 63,536 more characters are in the log)"
