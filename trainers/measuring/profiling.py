"""Trace a few training steps: ``torchrun … -m trainers.measuring.profiling --config RUN_DIR/config.json``.

Every rank trains, rank 0 is traced. It writes RUN_DIR/trace.json.gz (for ui.perfetto.dev or chrome://tracing) and
RUN_DIR/profile.json with the longest operations. config.json is that of a training with an additional section
``profile``: {"steps": n}.
"""

from __future__ import annotations

from pathlib import Path

from trainers.entry import leave, start


def _run(path: Path) -> None:
    from trainers.measuring.trace import run  # imports torch: only after start has set sys.path

    run(path)


def main() -> None:
    start("trainers.measuring.profiling", _run)


if __name__ == "__main__":
    main()
    leave()
