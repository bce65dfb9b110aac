"""A no-op of `doit train` beside `dvc repro` and `snakemake` on a pipeline of the same shape: fetch, then train.

    python benchmarks/peers.py [rounds] [folder of the peers' environment]

The peers are installed into an environment of their own (made where the folder has none; default: a temporary one).
Each side has its two steps finished and is asked again, in turns, the order turned round each time. Theirs are two
steps of one `cp` each with a parameter file: the smallest pipeline that these tools can be asked for, while ours is a
real run with its data pack, code closure and results.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

PEERS = ("dvc", "snakemake")
TARGETS = {"dvc": 0.25, "snakemake": 0.28}
OVERRIDES = ["experiment=quickstart", "trainer.max_steps=2", "tracking=none"]
DVC_YAML = """\
stages:
  fetch:
    cmd: cp source.txt data.txt
    deps: [source.txt]
    outs: [data.txt]
  train:
    cmd: cp data.txt result.txt
    deps: [data.txt, train.py]
    params: [lr]
    outs: [result.txt]
"""
SNAKEFILE = """\
configfile: "params.yaml"

rule train:
    input: "data.txt", "train.py"
    output: "result.txt"
    params: lr=config["lr"]
    shell: "cp data.txt result.txt"

rule fetch:
    input: "source.txt"
    output: "data.txt"
    shell: "cp source.txt data.txt"
"""
Sample = tuple[float, float]
"""Wall seconds and processor seconds."""


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling the sources at each call is no part of a no-op
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else folder / "peers"
        bin_dir = installed(environment)
        sides = {"paceline": paceline(folder), "dvc": dvc(folder, bin_dir), "snakemake": snakemake(folder, bin_dir)}
        for side in sides.values():
            side()  # byte code and page cache are warm after it
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
                samples[name].append(sides[name]())
            shown = ", ".join(f"{name} {samples[name][-1][0]:.3f} s" for name in sides)
            print(f"  round {number + 1}/{rounds}: {shown}", flush=True)
        versions = ", ".join(
            f"{peer} {checked([str(bin_dir / peer), '--version'], cwd=folder).strip()}" for peer in PEERS
        )
    print(f"no-op of two finished steps; {surroundings()}; {versions}")
    return verdict(samples)


def verdict(samples: dict[str, list[Sample]]) -> int:
    """Print times and ratios of each round; 0 if all median ratios keep their targets."""
    missed = 0
    for at, what in enumerate(("wall", "processor")):
        for name, taken in samples.items():
            print(f"{name}, {what}: {spread([sample[at] for sample in taken], 's')}")
        for peer in PEERS:
            pairs = zip(samples["paceline"], samples[peer], strict=True)
            ratios = [ours[at] / theirs[at] for ours, theirs in pairs]
            kept = statistics.median(ratios) <= TARGETS[peer]
            missed += not kept
            end = "kept" if kept else "MISSED"
            print(f"paceline ÷ {peer}, {what}: {spread(ratios)}; target at most {TARGETS[peer]}: {end}")
    return 1 if missed else 0


def installed(environment: Path) -> Path:
    """The bin folder of an environment that has the peers; it is made where it is missing."""
    bin_dir = environment / "bin"
    if not all((bin_dir / peer).exists() for peer in PEERS):
        uv = shutil.which("uv")
        python = str(bin_dir / "python")
        make = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        install = (
            [uv, "pip", "install", "--quiet", "--python", python] if uv else [python, "-m", "pip", "install", "-q"]
        )
        checked([*make, str(environment)], cwd=ROOT)
        checked([*install, *PEERS], cwd=ROOT)
    return bin_dir


def paceline(folder: Path) -> Callable[[], Sample]:
    words = [*DOIT, "train", *OVERRIDES]
    words += [f"paths.runs={folder}/runs", f"paths.data={folder}/data"]
    checked(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    return lambda: timed(words, ROOT, {"PYTHONPATH": str(ROOT)}, "is finished")


def dvc(folder: Path, bin_dir: Path) -> Callable[[], Sample]:
    project = pipeline_in(folder / "dvc")
    (project / "dvc.yaml").write_text(DVC_YAML)
    env = {"DVC_NO_ANALYTICS": "1", "PYTHONPATH": ""}
    checked(["git", "init", "--quiet"], cwd=project)  # as it is used: dvc's own default is a git repository
    checked([str(bin_dir / "dvc"), "init", "--quiet"], cwd=project, env=env)
    checked([str(bin_dir / "dvc"), "config", "core.check_update", "false"], cwd=project, env=env)
    checked([str(bin_dir / "dvc"), "repro"], cwd=project, env=env)
    return lambda: timed([str(bin_dir / "dvc"), "repro"], project, env, "up to date")


def snakemake(folder: Path, bin_dir: Path) -> Callable[[], Sample]:
    project = pipeline_in(folder / "snakemake")
    (project / "Snakefile").write_text(SNAKEFILE)
    words, env = [str(bin_dir / "snakemake"), "--cores", "1"], {"PYTHONPATH": ""}
    checked(words, cwd=project, env=env)
    return lambda: timed(words, project, env, "Nothing to be done")


def pipeline_in(project: Path) -> Path:
    project.mkdir()
    (project / "source.txt").write_text("data\n")
    (project / "params.yaml").write_text("lr: 0.1\n")
    (project / "train.py").write_text("print('train')\n")
    return project


def timed(words: list[str], cwd: Path, env: dict[str, str], must_say: str) -> Sample:
    """One no-op. Ends the benchmark when the tool did something instead."""
    before, started = processor_s(), time.perf_counter()
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    taken = time.perf_counter() - started
    if done.returncode != 0 or must_say not in done.stdout:
        sys.exit(f"{' '.join(words)} was no no-op:\n{done.stdout}")
    return taken, processor_s() - before


def processor_s() -> float:
    """User and system time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
