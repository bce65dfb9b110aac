"""Random kills of ranks, agents and hosts under cluster.max_restarts: some hosts and a spare, to the same weights?

    python benchmarks/restarts.py [kills] [seed] [hosts]        (Linux, root; raises lab hosts of its own)

One command trains on three lab hosts (``hosts``: two or three) while ranks, agents and, once a run, a whole host are
killed at random moments; it has to finish by itself with the weights of a run that nobody disturbed. The time that a
kill costs is what passes until the next attempt has done its first steps; what is allowed of it is what such steps came
after in the undisturbed run, and 3 s. A line for each kill goes to restarts.jsonl in the working directory.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from fault_trial import LONGEST_S, Command, Trial
from measure import DOIT, surroundings

from pipeline.lab import Lab, down, up

KINDS = ("rank", "rank", "agent", "agent", "host")
EACH = 10  # kills of one run
PLUS_S = 3.0
SETTLED_S = (1.0, 6.0)  # after an attempt's first steps, until the next kill
WORDS = (
    "experiment=quickstart",
    "trainer.epochs=150",
    "trainer.log_every_steps=5",
    "trainer.checkpoint_every_steps=50",
    "cluster=pssh",
    f"cluster.max_restarts={2 * EACH}",
    "cluster.checkpoint_fetch_s=0.5",
    "trainer.global_batch_size=96",
)


class Restarted(Trial):
    def argv(self) -> list[str]:
        assert self.lab is not None
        *hosts, spare = (f"{{name: {host.name}}}" for host in self.lab.hosts)
        where = [f"cluster.hosts=[{','.join(hosts)}]", f"cluster.spares=[{spare}]", "tracking=none"]
        where += [f"paths.runs={self.folder}/runs", f"paths.data={self.folder}/data"]
        where += [f"cluster.ssh_config='{self.lab.ssh_config}'"]
        return [*DOIT, "--db-file", f"{self.folder}/doit.db", "train", *WORDS, *where]

    def firsts(self) -> list[float]:
        """When each attempt logged its first step; an attempt begins where the controller says that all hosts run."""
        run_dir = self.run_dir()
        if run_dir is None:
            return []
        begun = [entry["time"] for entry in _rows(run_dir / "journal.jsonl") if entry["state"] == "RUNNING"]
        logged = [row["t"] for row in _rows(run_dir / "metrics.jsonl") if "train/loss" in row["metrics"]]
        after = [[time for time in logged if time >= start] for start in begun]
        return [min(times) for times in after if times]


def _rows(path: Path) -> list[dict[str, object]]:
    rows = []
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its hosts are taken down
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    hosts = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    print(f"kills under cluster.max_restarts; {surroundings()}")
    counted: Counter[str] = Counter()
    costs, bad, runs = list[float](), list[str](), 0
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        try:
            lab = up(place, hosts + 1)
            wanted, start_s = undisturbed(place, lab)
            print(f"{hosts} hosts; undisturbed: weights {wanted[:12]}, first steps after {start_s:.1f} s")
            while counted.total() < kills:
                runs += 1
                lab = up(place, hosts + 1)  # a host that was killed comes back
                found = disturbed(Restarted(place / f"run{runs}", "lab", lab), chance, counted, costs)
                if found != wanted:
                    bad.append(f"run {runs}: {found}")
                print(f"run {runs}: {counted.total()} kills {dict(counted)}, {found[:60]}", flush=True)
        finally:
            down(place)
    for line in bad:
        print(f"MISSED: {line}")
    lost_s = statistics.median(costs)
    print(
        f"{counted.total()} kills {dict(counted)} in {runs} runs; {runs - len(bad)} runs with the weights undisturbed"
    )
    print(f"lost by a kill: median {lost_s:.1f} s, most {max(costs):.1f} s; allowed: median {start_s + PLUS_S:.1f} s")
    return int(bool(bad) or lost_s > start_s + PLUS_S)


def undisturbed(place: Path, lab: Lab) -> tuple[str, float]:
    """The sha256 of the weights, and the seconds from the command to the first logged step."""
    trial = Restarted(place / "undisturbed", "lab", lab)
    began = time.time()
    if trial.start().wait() != 0:
        sys.exit("\n".join(trial.command.lines[-10:] if trial.command else []))
    return trial.weights()[0], trial.firsts()[0] - began


def disturbed(trial: Restarted, chance: random.Random, counted: Counter[str], costs: list[float]) -> str:
    """The weights, or how it ended."""
    command, host_lost = trial.start(), False
    _until(command, lambda: bool(trial.firsts()))
    for _ in range(EACH):
        time.sleep(chance.uniform(*SETTLED_S))
        kind = chance.choice([kind for kind in KINDS if not (kind == "host" and host_lost)])
        killed = time.time()
        if command.child.poll() is not None or not strike(trial, kind, chance):
            break
        host_lost |= kind == "host"
        counted[kind] += 1
        if not _until(command, lambda killed=killed: trial.firsts()[-1] > killed):  # type: ignore[misc]
            break
        cost_s = trial.firsts()[-1] - killed
        costs.append(cost_s)
        with Path("restarts.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "lost_s": round(cost_s, 2)}) + "\n")
    if command.wait() != 0:
        Path(f"restarts-kept-{trial.folder.name}.txt").write_text("\n".join(command.lines))
        return f"ended badly: {' / '.join(command.lines[-4:])}"
    return next(iter(trial.weights()), "no weights")


def strike(trial: Restarted, kind: str, chance: random.Random) -> bool:
    """False: there was nothing to kill."""
    assert trial.lab is not None
    if kind == "host":
        busy = {_network(process.pid) for process in trial.ranks()}
        hosts = [host for host in trial.lab.hosts if _network(host.init_pid) in busy]
        found = [psutil.Process(host.init_pid) for host in hosts if host.init_pid is not None]
    else:
        found = trial.ranks() if kind == "rank" else trial.supervisors()
    if found:
        chance.choice(found).send_signal(signal.SIGKILL)
    return bool(found)


def _network(pid: int | None) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


def _until(command: Command, reached: Callable[[], bool]) -> bool:
    """False: the command ended before."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and command.child.poll() is None:
        if reached():
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    sys.exit(main())
