"""`doit runs` over ten thousand finished run folders, made of one real one.

    python benchmarks/runs_listing.py [runs] [repetitions]

The folders hold what a listing could read (key, configuration, journal, result), each with a key of its own.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

TARGET_S = 2.0
OVERRIDES = ["experiment=quickstart", "trainer.max_steps=2", "tracking=none"]
COPIED = ("key.json", "config.json", "journal.jsonl")


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary, "runs")
        where = [f"paths.runs={runs}", f"paths.data={temporary}/data"]
        checked([*DOIT, "train", *OVERRIDES, *where], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        (original,) = (path.parent for path in runs.glob("*/result.json"))
        multiply(original, count)
        taken, used = [], []
        for _ in range(repetitions + 1):
            before, started = processor_s(), time.perf_counter()
            shown = checked([*DOIT, "runs", *where], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
            taken.append(time.perf_counter() - started)
            used.append(processor_s() - before)
            if shown.count("FINISHED") != count:
                sys.exit(f"{shown.count('FINISHED')} of {count} runs were listed")
    print(f"doit runs, {count:,} folders; {surroundings()}")
    print(
        f"{spread(taken[1:], 's')}; target below {TARGET_S} s; processor {spread(used[1:], 's')}"
    )  # the first warmed up
    return 0 if sorted(taken[1:])[len(taken[1:]) // 2] < TARGET_S else 1


def processor_s() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def multiply(original: Path, count: int) -> None:
    """Copies under keys of their own until there are ``count`` runs."""
    sys.path.insert(0, str(ROOT))
    from pipeline.core import documents

    result = documents.read_sealed(original / "result.json")
    for number in range(1, count):
        copy = original.parent / f"{number:012x}"
        copy.mkdir()
        for name in COPIED:
            shutil.copy(original / name, copy / name)
        (copy / "result.json").write_text(documents.sealed({**result, "key": copy.name}))


if __name__ == "__main__":
    sys.exit(main())
