"""How soon a lost process, host or controller is noticed, and how soon nothing of the run is left on any host.

    python benchmarks/noticed.py [times]        (Linux, root; raises its own two lab hosts)

Two lab hosts train; once steps are made one thing is struck. "Noticed" is when the command says what is wrong
(for a killed controller nobody is left to say it); "gone" is when no torchrun and no rank is left on a host that can be
reached, and on the one whose link is down, whose agent has to end it by its lease (LEASE_S).
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fault_trial import Trial
from measure import DOIT, surroundings

from pipeline.lab import cut, down, restore, up

LEASE_S, STALL_S, NOTICED_S, GONE_S = 20, 6, 10.0, 15.0
LONGEST_S = 90.0
WORDS = (
    "experiment=quickstart",
    "trainer.epochs=2000",
    "tracking=none",
    "cluster=two_node",
    f"cluster.lease_s={LEASE_S}",
    f"cluster.stall_s={STALL_S}",
    "cluster.connect_timeout_s=3",
)
SAID = re.compile(r"failed(:| on)|was lost|is gone|nothing was heard|no rank has moved|can't be reached|hangs in step")


class Struck(Trial):
    def argv(self) -> list[str]:
        assert self.lab is not None
        where = [f"paths.runs={self.folder}/runs", f"paths.data={self.folder}/data"]
        where += [f"cluster.ssh_config='{self.lab.ssh_config}'"]
        seed = sum(self.folder.name.encode())  # another run: the hosts keep what is left of one
        return [*DOIT, "--db-file", f"{self.folder}/doit.db", "train", *WORDS, f"seed={seed}", *where]


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its hosts are taken down
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    chance = random.Random(0)
    print(f"noticed and gone after a fault; {surroundings()}")
    kinds: dict[str, Callable[[Struck], object]] = {
        "SIGKILL of a rank": lambda trial: chance.choice(trial.ranks()).kill(),
        "SIGKILL of a torchrun": lambda trial: chance.choice(trial.torchruns()).kill(),
        "SIGKILL of an agent": lambda trial: chance.choice(trial.supervisors()).kill(),
        "SIGKILL of the controller": lambda trial: trial.command and trial.command.child.kill(),
        "link of a host down": lambda trial: trial.lab and cut(trial.lab, "node1"),
        "SIGSTOP of a rank": lambda trial: chance.choice(trial.ranks()).suspend(),
    }
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        try:
            lab = up(place, 2)
            for name, strike in kinds.items():
                folders = [place / f"{name} {turn}".replace(" ", "-") for turn in range(times)]
                found = [once(Struck(folder, "lab", lab), strike) for folder in folders]
                missed += told(name, found)
        finally:
            down(place)
    return int(missed > 0)


def told(name: str, found: list[tuple[float | None, float | None]]) -> int:
    """Print a line for the kind; how many of its figures missed their target."""
    allowed_s = STALL_S + 5 if "SIGSTOP" in name else NOTICED_S
    gone_s = LEASE_S + GONE_S if name in ("link of a host down", "SIGKILL of the controller") else GONE_S + STALL_S
    parts = []
    for what, values, most in (("noticed", [a for a, _ in found], allowed_s), ("gone", [b for _, b in found], gone_s)):
        if what == "noticed" and "controller" in name:
            continue
        seconds = [value if value is not None else LONGEST_S for value in values]
        verdict = "kept" if max(seconds) <= most else "MISSED"
        shown = f"{min(seconds):.1f} / {statistics.median(seconds):.1f} / {max(seconds):.1f} s"
        parts.append(f"{what} {shown} (at most {most:g} s: {verdict})")
    print(f"{name}, n={len(found)}: {'; '.join(parts)}", flush=True)
    return sum("MISSED" in part for part in parts)


def once(trial: Struck, strike: Callable[[Struck], object]) -> tuple[float | None, float | None]:
    """Seconds from the strike until the command said it, and until nothing was left; None: neither within LONGEST_S."""
    command = trial.start()
    if not trial.wait_for("steps"):
        sys.exit("\n".join(command.lines[-10:]))
    time.sleep(2.0)
    before, began = len(command.lines), time.monotonic()
    strike(trial)
    noticed = gone = None
    while time.monotonic() - began < LONGEST_S and (noticed is None or gone is None):
        passed_s = time.monotonic() - began
        if noticed is None and any(SAID.search(line) for line in command.lines[before:]):
            noticed = passed_s
        if gone is None and not trial.ranks() and not trial.torchruns():
            gone = passed_s
        if gone is not None and command.child.poll() is not None and command.child.returncode == -signal.SIGKILL:
            break
        time.sleep(0.05)
    _tidy(trial)
    return noticed, gone


def _tidy(trial: Struck) -> None:
    if trial.lab is not None:
        restore(trial.lab, "node1")
    for process in [*trial.ranks(), *trial.torchruns()]:
        process.send_signal(signal.SIGCONT)
        process.kill()
    if trial.command is not None:
        trial.command.child.send_signal(signal.SIGTERM)
        trial.command.wait()


if __name__ == "__main__":
    sys.exit(main())
