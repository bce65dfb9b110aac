"""A script under `doit train` beside the same script under torchrun by hand: to its first step, and for each step.

    python benchmarks/scripts_overhead.py [pairs] [hosts]

``hosts`` is 1 (two ranks here; default) or 2 (a rank on each of two lab hosts: Linux, root; the lab is left up). Both
sides run the same file with the same interpreter and threads; by hand it lies on the hosts already. Timed is from the
start of the command to the end of the first optimizer step, on one clock.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from launch import HOSTS
from measure import DOIT, ROOT, checked, interleaved, spread, surroundings, verdict
from noop import cpu_seconds

LATER_S, TIMES, PER_STEP = 0.3, 1.3, 1.01
STEPS = 300
SCRIPT = f"""\
import json, os, statistics, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3136, 10)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
times = [time.time()]
for _ in range({STEPS}):
    optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(images), labels).backward(); optimizer.step()
    times.append(time.time())
steps = [after - before for before, after in zip(times[50:], times[51:])]
if dist.get_rank() == 0:
    with open(os.path.join(sys.argv[1], "told.json"), "w") as file:
        json.dump({{"first": times[1], "step_s": statistics.median(steps)}}, file)
dist.barrier()  # or a rank that ends first may abort the other in gloo's threads
dist.destroy_process_group()
"""
BY_HAND = """\
exec "$1" -i -t 0 -H node0 -H node1 -x "-F .lab/ssh_config" 'cd by-hand && {env} exec python3 \
-m torch.distributed.run --nnodes 2 --node-rank ${{HOSTNAME#node}} --nproc-per-node 1 --rdzv-backend static \
--master-addr node0 --master-port 29556 train.py .'
"""


class Told(NamedTuple):
    """Seconds to the end of the first step, of a step (the median), and of the processor in what has ended: by hand the
    ranks are in it, under doit they are daemons'."""

    first_s: float
    step_s: float
    cpu_s: float


class Sides:
    """The two ways of starting the script; ``told`` holds what each start of either has told."""

    def __init__(self, place: Path, hosts: int) -> None:
        self.place, self.hosts = place, hosts
        self.script = place / "train.py"
        self.script.write_text(SCRIPT)
        self.told: dict[str, list[Told]] = {"paceline": [], "by hand": []}
        self.env: dict[str, str] = {}

    def paceline(self, index: int) -> float:
        runs = self.place / f"runs{index}"
        cluster = ["cluster=two_node"] if self.hosts > 1 else ["cluster.nproc_per_node=2"]
        program = [f"program.script={self.script}", "program.args=['{run}']", f"seed={index + 1}"]
        words = [*DOIT, "train", *program, *cluster, f"paths.runs={runs}", "tracking=none"]
        seconds = self._timed("paceline", words, lambda: next(runs.glob("*/outputs/told.json")))
        plan = json.loads(next(runs.glob("*/plan.json")).read_text())["nodes"][0]["env"]
        self.env = {name: value for name, value in plan.items() if name.startswith(("OMP_", "GLOO_", "PYTHONHASH"))}
        return seconds

    def by_hand(self, _: int) -> float:
        if self.hosts == 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            words = [*torchrun, str(self.script), str(self.place)]
            return self._timed("by hand", words, lambda: self.place / "told.json")
        pssh = shutil.which("parallel-ssh") or shutil.which("pssh") or sys.exit("pssh is not there: apt install pssh")
        for host in HOSTS:
            home(host).mkdir(exist_ok=True)
            shutil.copy(self.script, home(host))
        script = BY_HAND.format(env=" ".join(f"{name}={value}" for name, value in self.env.items()))
        return self._timed("by hand", ["sh", "-c", script, "sh", str(pssh)], lambda: home(HOSTS[0]) / "told.json")

    def _timed(self, side: str, words: list[str], written: Callable[[], Path]) -> float:
        cpu, started = cpu_seconds(), time.time()
        checked(words, cwd=ROOT, env=self.env)
        found = json.loads(written().read_text())
        self.told[side].append(Told(found["first"] - started, found["step_s"], cpu_seconds() - cpu))
        return self.told[side][-1].first_s


def home(host: str) -> Path:
    """The by-hand folder of a lab host, seen from here."""
    return ROOT / ".lab" / host / "scratch" / "home" / "by-hand"


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    hosts = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling the sources at each call is no part of a start
    if hosts > 1:
        checked([*DOIT, "lab", "hosts=2"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        sides = Sides(Path(temporary), hosts)
        sides.paceline(-1)  # byte code and the page cache are warm after it
        sides.by_hand(-1)
        for told in sides.told.values():
            told.clear()
        a, b = interleaved(sides.paceline, sides.by_hand, pairs)
    print(f"a script on {hosts} host{'s' if hosts > 1 else ''}, start to first step; {surroundings()}")
    later = [x - y for x, y in zip(a, b, strict=True)]
    print(f"later than by hand: {spread(later, 's')}")
    print(f"processor time of doit alone: {spread([told.cpu_s for told in sides.told['paceline']], 's')}")
    steps = [x.step_s / y.step_s for x, y in zip(*sides.told.values(), strict=True)]
    print(f"a step, ratio: {spread(steps)}; target at most {PER_STEP}")
    missed = verdict(("doit train program.script=…", "torchrun by hand"), a, b, TIMES)
    if hosts == 1:
        missed = int(statistics.median(later) > LATER_S)
        print(f"target at most {LATER_S} s later: {'MISSED' if missed else 'kept'}")
    return int(bool(missed) or statistics.median(steps) > PER_STEP)


if __name__ == "__main__":
    sys.exit(main())
