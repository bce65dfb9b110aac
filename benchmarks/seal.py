"""How many of 100 hidden inputs the seal of a script's run finds, its false alarms, and what it costs.

    python benchmarks/seal.py [repeats]

Planted are files of a project that a run's key doesn't hold, each read by one line of a script in one of four ways: by
an absolute path, by one in a folder with an odd name, relative to the working directory, relative to the script. The
last two aren't there when the script runs from its snapshot. Four more are read in ways that the seal isn't told of;
they count among the 100. False alarms: a script that trains with torch and reads and writes what a run may. Both run
under `paceline train`, in a rank of a torchrun that was begun ahead where the system can (Linux); its cost is measured
under the script's own process alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from measure import ROOT, checked, surroundings
from seal_kinds import HELPER, SEEN, UNSEEN

PLANTS, TARGET = 100, 95
HEAD = """
import contextlib, importlib, importlib.util, os, shlex, sys
print("PARENT", open(f"/proc/{os.getppid()}/cmdline").read().replace(chr(0), " "))
import reading_helper
from reading_helper import quietly
"""
HONEST = """
import json, os, pathlib, sqlite3, subprocess, sys, tempfile, torch, numpy, paceline
import reading_helper
from torch.utils.data import DataLoader, TensorDataset
data, run = pathlib.Path(os.path.dirname(sys.argv[1])), paceline.run_dir()
reading_helper.load(pathlib.Path(__file__).with_name("config.json"))
reading_helper.load(os.path.join(os.environ["PACELINE_PROJECT"], "config.json"))
values = torch.from_numpy(numpy.load(data / "x.npy"))
model = torch.nn.Linear(4, 1)
if __name__ == "__main__":
    for (row,) in DataLoader(TensorDataset(values), batch_size=8, num_workers=1):
        model(row).sum().backward()
    for folder in (run, paceline.checkpoints(), pathlib.Path(), data.parent / "scratch"):
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "model.pt")
        torch.load(folder / "model.pt")
    sqlite3.connect(run / "own.db").close()
    with tempfile.NamedTemporaryFile("w+") as file:
        open(file.name).close()
    for absent in ("optional.yaml", "/etc/absent"):
        try: open(absent)
        except FileNotFoundError: pass
    try: import apex
    except ImportError: pass
    subprocess.run([sys.executable, "-c", "import json, torch"], check=True)
    subprocess.run(["git", "--version"], check=True, stdout=subprocess.DEVNULL)
    paceline.log(1, loss=0.5)
"""
COST = """
import subprocess, sys, time, torch
def per_open(path):
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        for _ in range(200): open(path).close()
        times.append(time.perf_counter() - begun)
    return min(times) / 200 * 1e9
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
torch.set_num_threads(1)
def step():
    optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(images), labels).backward(); optimizer.step()
for _ in range(50): step()
events = []
sys.addaudithook(lambda event, _: events.append(event))
for _ in range(100): step()
count = len(events)
def start():
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""])
    return time.perf_counter() - begun
print("COST", per_open(sys.argv[1]), per_open(__file__), min(start() for _ in range(10)) * 1e9, count)
"""


def new_project(top: Path) -> None:
    """What `paceline init` makes, with a data folder."""
    paceline(top.parent, "init", top.name)
    (top / "data").mkdir()


def paceline(folder: Path, *words: str) -> str:
    """What the command printed."""
    return checked([sys.executable, "-m", "pipeline.cli.main", *words], cwd=folder, env={"PYTHONPATH": str(ROOT)})


def train(project: Path, script: str, *words: str) -> tuple[list[str], str]:
    """Run the script by `paceline train`. Returns the files that it read beside its key, and what was printed."""
    (project / "train.py").write_text(script)
    (project / "reading_helper.py").write_text(HELPER)
    fixed = ["program.script=train.py", "program.data=data", "program.args=['{data}/x']", "cluster.nproc_per_node=1"]
    printed = paceline(project, "train", *fixed, "tracking=none", *words)
    (summary,) = project.glob("runs/*/summary.json")
    return list(json.loads(summary.read_text())["unkeyed"]), printed


class Project:
    """A checkout with a script and its run folder, made as the controller makes it."""

    def __init__(self, top: Path, script: str, keyed: Mapping[str, str], seal: str = "warn") -> None:
        self.top, self.run_dir = top, top / "runs" / "0123456789ab"
        for folder in (top, self.run_dir / "code"):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in {"train.py": script, "reading_helper.py": HELPER, **keyed}.items():
                (folder / name).write_text(text)
        program = {"name": "script", "script": "train.py", "args": ["{data}/x"], "data": "data", "seal": seal}
        (self.run_dir / "config.json").write_text(json.dumps({"seed": 0, "program": program}))

    def start(self, data: Path) -> tuple[list[str], str]:
        """Run the script. Returns the files that aren't in its key, and what it printed."""
        own = ["--config", str(self.run_dir / "config.json"), "--script", "train.py", "--node-rank", "0"]
        words = [sys.executable, "-m", "trainers.script.start", *own, "--data", str(data), "--", sys.executable]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PACELINE_PROJECT": str(self.top)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return list(json.loads((self.run_dir / "summary.json").read_text())["unkeyed"]), done.stdout


def planted() -> dict[str, tuple[str, str, str]]:
    """File → (kind, the expression of its path, the line that reads it)."""
    plants = {}
    for number, (kind, line) in enumerate([*SEEN.items(), *UNSEEN.items()]):
        name = f"plant_{number}.py"
        project = "os.environ['PACELINE_PROJECT'] + '/"
        ways = {
            f"a_{name}": project + f"a_{name}'",
            f"odd folder ü/b_{name}": project + f"odd folder ü/b_{name}'",
            f"configs/c_{name}": f"'configs/c_{name}'",
            f"d_{name}": f"os.path.join(os.path.dirname(os.path.abspath(__file__)), 'd_{name}')",
        }
        for path, expression in [*ways.items()][: 4 if kind in SEEN else 1]:
            plants[path] = kind, expression, line
    return plants


def hidden(top: Path) -> tuple[int, int, list[str], bool]:
    """(found, planted, kinds that were missed, whether torchrun was begun ahead)."""
    plants = planted()
    seen = sorted(path for path in plants if plants[path][0] in SEEN)[: PLANTS - len(UNSEEN)]  # all kinds in a way
    chosen = [*seen, *(path for path in plants if plants[path][0] in UNSEEN)]
    lines = [HEAD, "if __name__ == '__main__':"]
    for path in chosen:
        _, expression, line = plants[path]
        body = "\n".join(f"        {part}" for part in line.splitlines())  # what it reads need not be what it expects
        lines += [f"    PATH = {expression}", "    with contextlib.suppress(Exception):", body]
    new_project(top)
    for path in ("data/x", *chosen):
        (top / path).parent.mkdir(exist_ok=True)
        (top / path).write_text("x = 1\n")
    named, printed = train(top, "\n".join(lines))
    (code,) = top.glob("runs/*/code")  # files of code that the script names are in its key
    found = {path for path in chosen if path in named or (code / path).is_file()}
    missed = sorted({plants[path][0] for path in chosen if path not in found})
    return len(found), len(chosen), missed, "/dev/fd/" in printed


def false_alarms(top: Path) -> list[str]:
    """What an honest script is told."""
    import numpy

    new_project(top)
    numpy.save(top / "data" / "x.npy", numpy.zeros((64, 4), numpy.float32))
    (top / "config.json").write_text("{}")
    return train(top, HONEST, "program.inputs=[config.json]")[0]


def costs(top: Path, seal: str) -> tuple[float, float, float, float]:
    """ns of: opening a file of the data, a file of the run's copy (the quickest of 100 times 200: what else runs here
    makes them longer, never shorter), a Python process that does nothing. Then the audit events of 100 steps of a small
    network: where there is none, a step costs what it does without the seal."""
    (top / "data").mkdir(parents=True)
    (top / "data" / "x").touch()
    project = Project(top, COST, {}, seal)
    found = re.search(r"COST (\S+) (\S+) (\S+) (\d+)", project.start(top / "data")[1])
    assert found is not None
    return float(found[1]), float(found[2]), float(found[3]), float(found[4])


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(surroundings())
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary).resolve()
        found, count, missed, ahead = hidden(top / "hidden")
        print(f"hidden inputs: {found} of {count} found; {len(SEEN) + len(UNSEEN)} kinds; missed: {', '.join(missed)}")
        print(f"torchrun was {'' if ahead else 'not '}begun ahead")
        alarms = false_alarms(top / "honest")
        print(f"false alarms: {len(alarms)} {alarms}")
        rows = [(costs(top / f"off{n}", "off"), costs(top / f"on{n}", "warn")) for n in range(repeats)]
    for at, what in enumerate(("open of a data file", "open of a file of the copy", "Python process")):
        off, on = (min(row[side][at] for row in rows) for side in (0, 1))
        print(f"{what}: {off / 1e3:.2f} µs without, {on / 1e3:.2f} µs with ({on - off:+.0f} ns, {on / off - 1:+.1%})")
    events = max(row[1][3] for row in rows)
    print(f"audit events of 100 training steps: {events:.0f}")
    return int(found < TARGET or count != PLANTS or bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
