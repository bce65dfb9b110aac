"""A trace of a few training steps: ``torchrun … -m trainers.measuring.profiling --config RUN_DIR/config.json``.

Every rank trains, rank 0 is traced. It writes RUN_DIR/trace.json.gz (for ui.perfetto.dev or chrome://tracing) and
RUN_DIR/profile.json with the operations that took longest. config.json is a training's, with a section
``profile`` beside it: {"steps": n}.
"""

from __future__ import annotations

from pathlib import Path

from trainers.entry import leave, start


def _run(path: Path) -> None:
    from trainers.measuring.trace import run  # torch only after what the ranks may import was settled

    run(path)


def main() -> None:
    start("trainers.measuring.profiling", _run)


if __name__ == "__main__":
    main()
    leave()
