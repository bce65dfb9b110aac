"""Runs in podman: what a container adds to a start, and whether kills leave one.

    python benchmarks/containers.py [kills] [seed]        (Linux, root, podman)

Each kill is of the command, its agent, podman, podman's monitor or torchrun, at a moment drawn from the seed while two
ranks run. Start: seconds from the command to both ranks, bare and in the container, in turn.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measure import surroundings

from tests.container_fixture import made
from tests.contract.conftest import Bench
from tests.integration.test_containers import KILLS, bench, kill_and_wait

PAIRS = 5
PROGRAM = "print('up', flush=True); time.sleep(600)"


def started_s(own: Bench) -> float:
    """Return the seconds from the command to both ranks; ends them."""
    stub = own.stub(PROGRAM, stand_in=True)
    began = time.monotonic()
    with own.spawn(stub) as command:
        own.see_both_up(command)
        took = time.monotonic() - began
        command.terminate()
        command.communicate()
    return took


def main() -> None:
    words = [*sys.argv[1:], *["50", "0"][len(sys.argv) - 1 :]]
    chance, kinds = random.Random(int(words[1])), [*KILLS]
    print(surroundings())
    with made() as image, tempfile.TemporaryDirectory() as folder:
        ends = []
        for number in range(int(words[0])):
            what = kinds[number % len(kinds)]
            own = bench(image, Path(folder, f"kill{number}"))
            own.folder.mkdir()
            ends.append(kill_and_wait(own, image, own.stub(PROGRAM, stand_in=True), what, chance.uniform(0, 2)))
            print(f"{number:>3} {what}: nothing left after {ends[-1]:.1f} s", flush=True)
        if ends:
            print(f"{len(ends)} kills; nothing left after {statistics.median(ends):.1f} s (at most {max(ends):.1f} s)")
        bare, inside = [], []
        for number in range(PAIRS):
            own = bench(image, Path(folder, f"start{number}"))
            own.folder.mkdir()
            inside.append(started_s(own))
            own = bench(image, Path(folder, f"bare{number}"))
            own.folder.mkdir()
            cluster = dataclasses.replace(own.cluster, container=None, container_mounts=(), asks_environment=False)
            bare.append(started_s(dataclasses.replace(own, cluster=cluster)))
        for name, times in (("bare", bare), ("in podman", inside)):
            print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, n={len(times)})")


if __name__ == "__main__":
    main()
