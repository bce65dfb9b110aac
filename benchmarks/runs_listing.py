"""`doit runs`, and `paceline.runs()` in a notebook that has imported pandas, over ten thousand finished run folders.

All are made of one real run.

    python benchmarks/runs_listing.py [runs] [repetitions]

The folders hold what a listing could read, as links to the same files, and a result with a key of its own.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

TARGET_S = 2.0
OVERRIDES = ["experiment=quickstart", "trainer.max_steps=2", "tracking=none"]
IN_PYTHON = """
import sys, time
import pandas, paceline
taken = []
for _ in range(2):
    started = time.perf_counter()
    states = paceline.runs(sys.argv[1])["state"]
    taken.append(time.perf_counter() - started)
print(*taken, *states)
"""


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary, "runs")
        where = [f"paths.runs={runs}", f"paths.data={temporary}/data"]
        checked([*DOIT, "train", *OVERRIDES, *where], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        (original,) = (path.parent for path in runs.glob("*/result.json"))
        multiply(original, count)
        missed = False
        listing = [sys.executable, "-c", IN_PYTHON, where[0]]
        for name, argv in (("doit runs", [*DOIT, "runs", where[0]]), ("paceline.runs()", listing)):
            taken, used, first_calls = [], [], []
            for _ in range(repetitions + 1):
                before, started = processor_s(), time.perf_counter()
                shown = checked(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
                whole_s = time.perf_counter() - started
                if argv is listing:
                    first_s, further_s = map(float, shown.split()[:2])
                    first_calls.append(first_s)
                taken.append(further_s if argv is listing else whole_s)
                used.append(processor_s() - before)
                if shown.count("FINISHED") != count:
                    sys.exit(f"{shown.count('FINISHED')} of {count} runs were listed")
            print(f"{name}, {count:,} folders; {surroundings()}")
            print(
                f"{spread(taken[1:], 's')}; target below {TARGET_S} s; processor {spread(used[1:], 's')}"
            )  # the first warmed up
            if first_calls:
                print(f"the first call of a notebook, which imports the controller: {spread(first_calls[1:], 's')}")
            missed |= sorted(taken[1:])[len(taken[1:]) // 2] >= TARGET_S
    return int(missed)


def processor_s() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def multiply(original: Path, count: int) -> None:
    """Copies under keys of their own until there are ``count`` runs."""
    sys.path.insert(0, str(ROOT))
    from pipeline.core import documents
    from pipeline.runs import result as results

    result = documents.read_sealed(original / "result.json")
    copies = [original.parent / f"{number:012x}" for number in range(1, count)]
    left_out = shutil.ignore_patterns("code", "attempts", "result.json", "data")
    for copy in copies:
        shutil.copytree(original, copy, copy_function=os.link, ignore=left_out)
    for run in (original, *copies):  # the last link is made: the stamps of the files change no more
        files = {name: results.fingerprint(run / name) for name in result["files"]}
        documents.write_sealed(run / "result.json", {**result, "key": run.name, "files": files})


if __name__ == "__main__":
    sys.exit(main())
