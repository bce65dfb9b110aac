"""How long the slots of a sweep have nothing to do: one slow and three fast trials on two lab hosts.

    python benchmarks/slots.py [repeats] [fast_s]        (Linux, root; raises the lab, leaves it up)

The slow trial has as many epochs as make it as long as the three fast ones together (``fast_s`` seconds each, from a
first sweep that shows what a start and an epoch cost here; one epoch more or less makes them three runs), so that a
schedule without any idle time exists. A slot is busy from the start of a trial's torchrun to its end; all else counts
as idle, also what is done to start the next one:

    idle = 1 - busy seconds / (2 * (last end - first start))

Since no two trainings take equally long, each repeat names the least idle time that any order of its four trials could
have had, without a moment between two of them. What is above that is the sweep's.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

TARGET = 0.10
CALIBRATION_EPOCHS = (4, 40)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A trial's torchrun on its slot, in unix seconds."""

    host: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    fast_s = float(sys.argv[2]) if len(sys.argv) > 2 else 15.0
    checked([*DOIT, "lab", "hosts=2"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        slow, fast = lengths(sweep(Path(temporary) / "lengths", CALIBRATION_EPOCHS, 0), fast_s)
        idle, least = [], []
        for repeat in range(repeats):
            spans = sweep(Path(temporary) / str(repeat), (slow, fast, fast - 1, fast + 1), repeat + 1)
            idle.append(idle_share(spans))
            least.append(least_idle([span.seconds for span in spans]))
            print(f"  repeat {repeat + 1}/{repeats}: idle {idle[-1]:.1%}, least possible {least[-1]:.1%}", flush=True)
            print("\n".join(f"    {line}" for line in shown(spans)), flush=True)
    kept = statistics.median(idle) <= TARGET
    print(f"one slow trial ({slow} epochs), three fast ones ({fast - 1} to {fast + 1}), two slots; {surroundings()}")
    print(f"idle share of the slots: {spread(idle)}; target at most {TARGET}: {'kept' if kept else 'MISSED'}")
    print(f"least that any order could have had: {spread(least)}")
    return 0 if kept else 1


def sweep(place: Path, epochs: tuple[int, ...], seed: int) -> list[Span]:
    """Run a trial for each number of epochs, in this order, a host each; their spans in order of their starts."""
    place.mkdir()
    where = [f"paths.runs={place}/runs", f"tracking.uri=sqlite:///{place}/mlflow.db", "cluster=two_node"]
    lengths = ["trainer.checkpoint_every_epochs=1000", f"trainer.epochs={','.join(map(str, epochs))}", f"seed={seed}"]
    words = ["sweep", "experiment=quickstart", *lengths, "sweep.nodes=1", *where]
    checked([*DOIT, *words], cwd=ROOT)
    found = sorted((span(path.parent) for path in (place / "runs").glob("*/result.json")), key=lambda item: item.start)
    if len(found) != len(epochs):
        sys.exit(f"{len(found)} of {len(epochs)} trials are finished in {place}")
    return found


def span(folder: Path) -> Span:
    """From the journal's word that torchrun runs to the file in which the controller noted its end."""
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    (exit_file,) = (folder / "attempts" / "1").glob("*.exit.json")
    started = next(entry["time"] for entry in entries if entry["state"] == "RUNNING")
    return Span(host=exit_file.name.split(".")[0], start=started, end=exit_file.stat().st_mtime)


def lengths(spans: list[Span], fast_s: float) -> tuple[int, int]:
    """Epochs of the slow and of a fast trial: a start costs the same in each, an epoch too."""
    short, long = sorted(item.seconds for item in spans)
    few, many = CALIBRATION_EPOCHS
    epoch_s = (long - short) / (many - few)
    start_s = short - few * epoch_s
    print(f"a start takes {start_s:.1f} s, an epoch {epoch_s:.3f} s", flush=True)
    slow, fast = (max(3, round((seconds - start_s) / epoch_s)) for seconds in (3 * fast_s, fast_s))
    return slow, fast


def idle_share(spans: list[Span]) -> float:
    makespan = max(item.end for item in spans) - min(item.start for item in spans)
    return 1 - sum(item.seconds for item in spans) / (2 * makespan)


def least_idle(seconds: list[float]) -> float:
    """Of all ways to spread them over two slots without a gap."""
    halves = itertools.product((0, 1), repeat=len(seconds))
    sums = ([sum(s for s, at in zip(seconds, half, strict=True) if at == slot) for slot in (0, 1)] for half in halves)
    return 1 - sum(seconds) / (2 * min(max(pair) for pair in sums))


def shown(spans: list[Span]) -> list[str]:
    first = min(item.start for item in spans)
    return [
        f"{item.host}: {item.start - first:6.2f} s to {item.end - first:6.2f} s ({item.seconds:.2f} s)"
        for item in spans
    ]


if __name__ == "__main__":
    sys.exit(main())
