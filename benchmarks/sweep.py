"""What a sweep costs beyond its trainings: planning, a finished sweep, the time between two trials of a slot.

    python benchmarks/sweep.py [trials] [trained]

Planning and the finished sweep are timed with many trials whose run folders are copies of one real run under each
trial's key (nothing is launched for them; a launch would show in their journals). Then ``trained`` tiny trials run
on one slot; the time between the end of one torchrun and the start of the next is the overhead that a slot sees.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

PLAN_TARGET_S, FINISHED_TARGET_S, GAP_TARGET_S = 2.0, 3.0, 0.5
TINY = ["experiment=quickstart", "trainer.max_steps=2", "cluster.nproc_per_node=1"]
REPEATS = 5


def main() -> int:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    trained = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        gaps = slot_gaps(place / "gaps", trained)
        words = ["sweep", *TINY, f"seed=range({trials // 4})", "optimizer.lr=0.1,0.2,0.3,0.4", *where(place / "many")]
        planned = [seconds([*words, "dry_run=1"]) for _ in range(REPEATS)]
        finish_all(place / "many", words, next((place / "gaps" / "runs").glob("*/result.json")).parent)
        seconds(words)  # writes the sweep's folder
        before = journals(place / "many")
        finished = [seconds(words) for _ in range(REPEATS)]
        if journals(place / "many") != before:
            sys.exit("a finished trial was launched again")
    print(f"sweeps; {surroundings()}")
    return max(
        told(f"plan of {trials} trials (dry_run=1)", planned, PLAN_TARGET_S),
        told(f"finished sweep of {trials} trials, nothing launched", finished, FINISHED_TARGET_S),
        told("a slot between two trials", gaps, GAP_TARGET_S),
    )


def where(place: Path) -> list[str]:
    return [f"paths.runs={place}/runs", f"tracking.uri=sqlite:///{place}/mlflow.db", "tracking=none"]


def seconds(words: list[str]) -> float:
    started = time.perf_counter()
    checked([*DOIT, *words], cwd=ROOT)
    return time.perf_counter() - started


def told(what: str, values: list[float], target: float) -> int:
    middle = sorted(values)[len(values) // 2]
    print(f"{what}: {spread(values, 's')}; target {target:g} s: {'kept' if middle <= target else 'MISSED'}")
    return 0 if middle <= target else 1


def slot_gaps(place: Path, count: int) -> list[float]:
    """Train; seconds from each torchrun's end to the next one's start, the first pair left out (it warms up)."""
    place.mkdir(parents=True)
    words = ["sweep", *TINY, f"seed=range({count})", *where(place)[:2]]
    checked([*DOIT, *words], cwd=ROOT)
    spans = []
    for folder in (path.parent for path in (place / "runs").glob("*/key.json")):
        entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        started = next(entry["time"] for entry in entries if entry["state"] == "RUNNING")
        spans.append((started, (folder / "attempts" / "1" / "localhost.exit.json").stat().st_mtime))
    spans.sort()
    return [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans[1:])]


def finish_all(place: Path, words: list[str], run: Path) -> None:
    """A finished run folder for every trial: the real one's files with the trial's own key."""
    sys.path.insert(0, str(ROOT))
    from pipeline.core import documents
    from pipeline.runs import result as results
    from pipeline.sweep.expand import expand

    for trial in expand(words[1:], root=ROOT, local_gpus=0).trials:
        assert trial.run is not None
        folder = trial.run.folder.path
        folder.mkdir(parents=True)
        original = documents.read_sealed(run / "result.json")
        for name in (*original["files"], "journal.jsonl"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(run / name, folder / name)
        own = {"key": trial.run.key.short, "digest": trial.run.key.digest}
        (folder / "key.json").write_text(json.dumps({**own, **trial.run.key.parts}))
        files = {**original["files"], "key.json": results.fingerprint(folder / "key.json")}
        documents.write_sealed(folder / "result.json", {**original, **own, "files": files})


def journals(place: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in (place / "runs").glob("*/journal.jsonl")}


if __name__ == "__main__":
    sys.exit(main())
