"""Faults drawn from a seed over kinds × moments × places, against the same training undisturbed.

    python benchmarks/faults.py [count] [seed] [jobs] [only]        (Linux, root, a C compiler)

Each case trains in a folder of its own, is disturbed once at its moment, and then the same command is typed again until
it ends well (at most three times; what an error told to type is typed before). In the end the weights and metrics must
be those of the undisturbed run, MLflow must have one finished run, no process may be left on any host, and no
controller may have been silent for more than 15 s. A case in which the moment never came counts as not hit and is
said so. ``only`` is a part of a kind's name. A line for each case goes to faults.jsonl in the
working directory, and a case that was missed leaves its folder there (faults-kept-N).
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fault_kinds import KINDS, clock_library, small_disk
from fault_trial import SILENT_S, SWEEP_TRIALS, Trial, hints_of
from measure import ROOT, surroundings

from pipeline.lab import Lab, down, up

TRIES = 3


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    moment: str
    place: str
    seed: int


@dataclass(frozen=True)
class Expected:
    """An undisturbed run of one place."""

    weights: list[str]
    metrics: list[tuple[object, object]]


def cases(count: int, seed: int, only: str = "") -> list[Case]:
    """Every kind in turn, its moment and place by chance; the same for the same seed."""
    chance = random.Random(seed)
    names = [name for name in KINDS if only in name]
    chance.shuffle(names)
    drawn = []
    for number, name in zip(range(count), itertools.cycle(names), strict=False):
        kind = KINDS[name]
        place = chance.choice(kind.places)
        moment = chance.choice([m for m in kind.moments if not (place == "sweep" and m in ("send", "collect"))])
        drawn.append(Case(number, name, moment, place, chance.randrange(1 << 30)))
    return drawn


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its hosts are taken down
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or commands inherit that a background job ignores it
    words = [*sys.argv[1:], *["200", "0", "2", ""][len(sys.argv) - 1 :]]
    count, seed, jobs = int(words[0]), int(words[1]), int(words[2])
    drawn = cases(count, seed, words[3])
    print(f"{len(drawn)} faults, seed {seed}; {surroundings()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="disturbed-") as temporary:
        outcomes = run_all(Path(temporary), drawn, jobs)
    table(outcomes)
    return 1 if any(outcome["missed"] for outcome in outcomes) else 0


def run_all(place: Path, drawn: list[Case], jobs: int) -> list[dict[str, Any]]:
    labs = [up(_made(place / f"lab{number}"), 2) for number in range(jobs)]
    local = threading.local()
    numbers = itertools.count()
    lock = threading.Lock()

    def one(case: Case) -> dict[str, Any]:
        if not hasattr(local, "number"):
            local.number = next(numbers)
        outcome = asdict(case) | run_case(place, case, labs[local.number], expected[case.place])
        with lock, Path("faults.jsonl").open("a", encoding="utf-8") as record:
            missed = "; ".join(outcome["missed"])
            name = f"{case.number:>3} {case.kind} at {case.moment}, {case.place}"
            print(f"{name}: {'MISSED: ' + missed if missed else outcome['how']}", flush=True)
            print(json.dumps(outcome), file=record)
        return outcome

    pool = ThreadPoolExecutor(jobs)
    try:
        expected = {where: undisturbed(place, where, labs[0]) for where in {case.place for case in drawn}}
        return list(pool.map(one, drawn))
    finally:
        pool.shutdown(cancel_futures=True)
        for number in range(jobs):
            down(place / f"lab{number}")


def undisturbed(place: Path, where: str, lab: Lab) -> Expected:
    trial = Trial(_made(place / f"undisturbed-{where}"), where, lab if where == "lab" else None)
    if trial.start().wait() != 0:
        sys.exit("an undisturbed run failed:\n" + "\n".join(trial.command.lines if trial.command else []))
    return Expected(trial.weights(), trial.metrics())


def run_case(place: Path, case: Case, lab: Lab, expected: Expected) -> dict[str, Any]:
    """The outcome: how it came to its end, how often the command was typed, what was missed."""
    chance = random.Random(case.seed)
    kind = KINDS[case.kind]
    trial = Trial(_made(place / f"case{case.number}"), case.place, lab if case.place == "lab" else None)
    unmount = small_disk(trial.folder / "runs") if case.kind == "disk full" else None
    if case.kind.startswith("clock"):
        trial.clock = trial.folder / "clock"
        clock_library(trial.clock)
    shutil.copytree(place / f"undisturbed-{case.place}" / "data", trial.folder / "data")
    began = time.monotonic()
    try:
        outcome = disturb_and_finish(trial, kind.fault, case, chance)
        outcome["missed"] += verify(trial, expected, case)
    finally:
        if unmount is not None:
            unmount()
    outcome["seconds"] = round(time.monotonic() - began, 1)
    if not outcome["missed"]:
        shutil.rmtree(trial.folder, ignore_errors=True)
    else:
        kept = Path(f"faults-kept-{case.number}")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(trial.folder, kept, symlinks=True, ignore_dangling_symlinks=True)
        (kept / "output.txt").write_text("\n".join(outcome["said"]))
    return outcome


def disturb_and_finish(trial: Trial, fault: Any, case: Case, chance: random.Random) -> dict[str, Any]:
    first = trial.start()
    hit = trial.wait_for(case.moment)
    time.sleep(chance.uniform(0.0, 0.4) if case.moment != "finished" else 0.0)
    undo = fault(trial, chance) if hit else None
    code = first.wait()
    said, missed = ["$ first", *first.lines], []
    silent_s = first.silent_s
    if code is None:
        missed.append("the first command hangs")
    if undo is not None:
        undo()
    how = "not hit" if not hit else "finished by itself" if code == 0 and case.moment != "finished" else ""
    typed = 1
    while (code != 0 or not how) and typed <= TRIES:
        if typed > 1:
            for hint in hints_of(said[-12:]):
                done = subprocess.run(_typed(hint, trial), cwd=ROOT, capture_output=True, text=True, check=False)
                said += [f"$ {' '.join(hint)}", done.stdout + done.stderr]
                how = "finished by what the message told"
        again = trial.start()
        code, typed = again.wait(), typed + 1
        silent_s = max(silent_s, again.silent_s)
        said += [f"$ again: {code}", *again.lines]
        if code is None:
            missed.append("the repeated command hangs")
            break
        how = how or ("finished by the same command" if typed == 2 else f"finished by the same command, {typed}th time")
    if code != 0:
        missed.append(f"not finished after {typed} commands: {said[-1][:300] if said else ''}")
    if silent_s > SILENT_S:
        missed.append(f"silent for {silent_s:.0f} s")
    if any(line.startswith("Traceback (most recent call last)") for line in said):  # a rank's lines begin with its name
        missed.append("a traceback was shown")
    return {"how": how, "typed": typed, "silent_s": round(silent_s, 1), "missed": missed, "said": said, "hit": hit}


def verify(trial: Trial, expected: Expected, case: Case) -> list[str]:
    """What isn't as in the undisturbed run, a line each."""
    missed = []
    if trial.weights() != expected.weights:
        missed.append(f"other weights ({len(trial.weights())} finished runs)")
    try:
        if trial.metrics() != expected.metrics:
            missed.append("other metrics")
    except (ValueError, KeyError, TypeError) as error:
        missed.append(f"metrics.jsonl is unreadable: {error}")
    runs = SWEEP_TRIALS if case.place == "sweep" else 1
    if trial.recorded() != ["FINISHED"] * runs:
        missed.append(f"MLflow has {trial.recorded()}")
    missed += [f"left behind: {line}" for line in trial.left()]
    return missed


def table(outcomes: list[dict[str, Any]]) -> None:
    """Kinds down, outcomes across, as Markdown."""
    ways = sorted({outcome["how"] for outcome in outcomes})
    print(f"\n| fault | n | moments | {' | '.join(ways)} | missed |\n|{' --- |' * (len(ways) + 4)}")
    for kind in KINDS:
        mine = [outcome for outcome in outcomes if outcome["kind"] == kind]
        if mine:
            counted = Counter(outcome["how"] for outcome in mine)
            moments = ", ".join(sorted({outcome["moment"] for outcome in mine}))
            cells = [str(counted[way] or "") for way in ways]
            missed = sum(bool(outcome["missed"]) for outcome in mine)
            print(f"| {kind} | {len(mine)} | {moments} | {' | '.join(cells)} | {missed or ''} |")
    hit = sum(outcome["hit"] for outcome in outcomes)
    missed = sum(bool(outcome["missed"]) for outcome in outcomes)
    longest = max(outcome["silent_s"] for outcome in outcomes)
    print(f"\n{hit} of {len(outcomes)} hit; {missed} missed; longest silence {longest} s")


def _typed(words: list[str], trial: Trial) -> list[str]:
    """What a person would type in a project whose folders are the trial's."""
    if words[0] != "doit":
        return words
    own = [word for word in trial.argv() if word.startswith(("paths.", "tracking."))]
    extra = [word for word in own if not any(typed.startswith(word.partition("=")[0]) for typed in words)]
    return [sys.executable, "-m", "doit", "--db-file", f"{trial.folder}/doit.db", *words[1:], *extra]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
