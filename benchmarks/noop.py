"""`doit train` on a finished run against bare doit plus one Hydra compose of the same configuration.

    python benchmarks/noop.py [pairs]

The bare side is a dodo.py with one task that is up to date and one compose of conf/ with the same overrides.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, interleaved, spread, surroundings, verdict

TARGET = 1.25
OVERRIDES = ["experiment=quickstart", "trainer.max_steps=2", "tracking=none"]
BARE_DODO = """\
from hydra import compose, initialize_config_dir
from pipeline.config.compose import register

register()  # conf/ refers to the schemas
with initialize_config_dir({conf!r}, version_base="1.3"):
    compose("config", overrides={overrides!r})

def task_noop():
    return {{"actions": ["true"], "uptodate": [True]}}
"""


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling the sources at each call is no part of a no-op
    with tempfile.TemporaryDirectory() as temporary:
        overrides = [*OVERRIDES, f"paths.runs={temporary}/runs"]
        bare = Path(temporary, "bare")
        bare.mkdir()
        (bare / "dodo.py").write_text(BARE_DODO.format(conf=str(ROOT / "conf"), overrides=overrides))

        cpu: dict[Path, list[float]] = {ROOT: [], bare: []}

        def seconds(argv: list[str], cwd: Path) -> float:
            before, started = cpu_seconds(), time.perf_counter()
            checked(argv, cwd=cwd, env={"PYTHONPATH": str(ROOT)})
            elapsed = time.perf_counter() - started
            cpu[cwd].append(cpu_seconds() - before)
            return elapsed

        def paceline(_: int) -> float:
            return seconds([*DOIT, "train", *overrides], ROOT)

        def baseline(_: int) -> float:
            return seconds([*DOIT, "noop"], bare)

        paceline(0)  # the run itself; byte code and the page cache are warm after it
        finished = journals(Path(temporary))
        baseline(0)
        a, b = interleaved(paceline, baseline, pairs)
        if journals(Path(temporary)) != finished:
            sys.exit("a finished run was launched again: this measured no no-op")
    print(f"no-op; {surroundings()}")
    ratios = [x / y for x, y in zip(cpu[ROOT][1:], cpu[bare][1:], strict=True)]  # the first of each warmed up
    print(f"processor seconds, which other load hardly touches, ratio: {spread(ratios)}")
    return verdict(("doit train, finished", "bare doit + one compose"), a, b, TARGET)


def cpu_seconds() -> float:
    """User and system time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def journals(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("runs/*/journal.jsonl"))]


if __name__ == "__main__":
    sys.exit(main())
