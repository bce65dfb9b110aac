"""From `doit train` to the first optimizer step on two lab hosts, against pssh + torchrun by hand.

    python benchmarks/launch.py [pairs]        (Linux, root; raises the lab, leaves it up)

By hand is one shell script: pssh starts torchrun with the same trainer, configuration and data on the
same two hosts, with the files there already. Each pair has an environment of its own, so no warm parent of an earlier
start is there. Both are timed from the start of the command to
``first_step_unix_time`` in summary.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, interleaved, surroundings, verdict

TARGET = 0.95
OVERRIDES = ["experiment=quickstart", "cluster=two_node", "trainer.max_steps=4"]
HOSTS = ("node0", "node1")
PLACE = "by-hand"  # in each host's home
BY_HAND = """\
exec "$1" -i -t 0 -H node0 -H node1 -x "-F .lab/ssh_config" 'cd {place} && {env} PYTHONPATH=code exec \
python3 -m torch.distributed.run --nnodes 2 --node-rank ${{HOSTNAME#node}} --nproc-per-node 1 \
--rdzv-backend static --master-addr node0 --master-port 29555 -m trainers.classifier --config config.json'
"""


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    pssh = shutil.which("parallel-ssh") or shutil.which("pssh")
    if pssh is None:
        sys.exit("pssh is not there; sudo apt-get install pssh")
    checked([*DOIT, "lab", "hosts=2"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)

        def paceline(index: int) -> float:
            started = time.time()
            return first_step(train(place, f"+cluster.env.PAIR='{index}'"), started)

        def by_hand(_: int) -> float:
            clean()
            started = time.time()
            checked(["sh", "-c", script, "sh", pssh], cwd=ROOT)
            return first_step(home("node0"), started)

        script = prepare(train(place))
        by_hand(0)
        a, b = interleaved(paceline, by_hand, pairs)
    for host in HOSTS:
        shutil.rmtree(home(host))
    print(f"launch on two hosts, start to first step; {surroundings()}")
    return verdict(("doit train", "pssh + torchrun by hand"), a, b, TARGET)


def train(place: Path, *words: str) -> Path:
    """Train; return the new run's folder. From the second time on, hosts have the data, and sources are parsed."""
    runs = place / "runs"
    known = set(runs.glob("*/result.json"))
    checked(
        [*DOIT, "train", *OVERRIDES, *words, f"paths.runs={runs}", f"tracking.uri=sqlite:///{place}/mlflow.db"],
        cwd=ROOT,
    )
    (result,) = {*runs.glob("*/result.json")} - known
    return result.parent


def prepare(run: Path) -> str:
    """Put the files of a finished run on both hosts; the script that starts it by hand."""
    for host in HOSTS:
        shutil.rmtree(home(host), ignore_errors=True)
        home(host).mkdir()
        shutil.copytree(run / "code", home(host) / "code")
        shutil.copytree(run / "data", home(host) / "data")
        shutil.copy(run / "config.json", home(host))
    node = json.loads((run / "plan.json").read_text())["nodes"][0]
    keep = {name: value for name, value in node["env"].items() if name.startswith(("OMP_", "GLOO_"))}
    return BY_HAND.format(place=PLACE, env=" ".join(f"{name}={value}" for name, value in keep.items()))


def clean() -> None:
    """Leave what was staged; remove what the last run wrote."""
    for host in HOSTS:
        for path in home(host).iterdir():
            if path.name not in ("code", "data", "config.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def home(host: str) -> Path:
    """The by-hand folder of a lab host, seen from here."""
    return ROOT / ".lab" / host / "scratch" / "home" / PLACE


def first_step(run: Path, started: float) -> float:
    return float(json.loads((run / "summary.json").read_text())["first_step_unix_time"]) - started


if __name__ == "__main__":
    sys.exit(main())
