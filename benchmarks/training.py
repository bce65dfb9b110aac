"""Paceline's training step against other loops, on CPU ranks of this machine over gloo, in interleaved pairs.

    python benchmarks/training.py [model] [pairs] [against] [precision]

``model`` is small_cnn (global batch 64), resnet18 (global batch 128) or another; ``against`` is tuned, guide, lightning
or accelerate: see benchmarks/plain_loop.py (the guide's loop stays in fp32); ``precision`` is bf16 where the processor
computes in it, else fp32. 3×32×32 images, random crop and flip. Each launch is new and leaves out its first steps.
Besides wall time it prints processor seconds, which other load on the machine touches less. --pack takes the images
of a data pack (data/NAME-…) in place of noise.
Lightning and Accelerate are installed into an environment of their own (benchmarks/.peers), in the newest release.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import venv
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import torch
from measure import ROOT, checked, interleaved, spread, surroundings
from plain_loop import LOOPS

from trainers.training.model_setup import computes_in_bf16

SIZES = {"small_cnn": (64, 120), "resnet18": (128, 5)}  # global batch, steps of a launch
OTHER_SIZE = (128, 10)
TARGETS = {
    ("small_cnn", "tuned"): 1.2,
    ("small_cnn", "lightning"): 1.8,
    ("small_cnn", "accelerate"): 1.6,
    ("resnet18", "tuned"): 1.0,
    ("resnet18", "guide"): 1.9,
}
PEERS = ("lightning", "accelerate")


def main() -> int:
    given = arguments()
    batch, steps = SIZES.get(given.model, OTHER_SIZE)
    batch, against, pairs = given.batch or batch, given.against, given.pairs
    pythons = {"paceline": sys.executable, against: peers_python() if against in PEERS else sys.executable}
    cpu: dict[str, list[float]] = {"paceline": [], against: []}
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = Path(temporary)
        if given.pack is None:
            write_pack(run_dir / "data")
        else:
            (run_dir / "data").symlink_to(given.pack.resolve())

        def seconds(style: str) -> float:
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # each launch begins at the first step
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
            words = [style, given.model, str(batch), str(steps), given.precision, str(run_dir)]
            result = launch(pythons[style], words, ranks=given.ranks)
            cpu[style].append(result["cpu_s"])
            return result["wall_s"]

        ours, theirs = interleaved(lambda _: seconds("paceline"), lambda _: seconds(against), pairs)
    rates = {"paceline": [batch / value for value in ours], against: [batch / value for value in theirs]}
    print(
        f"{given.model}, {given.ranks} ranks, global batch {batch}, {given.precision}, {steps} steps a launch; ", end=""
    )
    print(surroundings())
    for name, found in rates.items():
        print(f"{name}: {spread(found, 'images/s')}")
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    loads = [b / a for a, b in zip(cpu["paceline"], cpu[against], strict=True)]
    print(f"times as fast as {against}, wall time: {spread(ratios)}")
    print(f"times as fast as {against}, processor seconds: {spread(loads)}")
    target = TARGETS.get((given.model, against))
    if target is None:
        return 0
    kept = statistics.median(ratios) >= target
    print(f"target at least {target} of wall time: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def arguments() -> argparse.Namespace:
    best = "bf16" if computes_in_bf16(torch.device("cpu")) else "fp32"
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="small_cnn")
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("against", nargs="?", choices=LOOPS, default="tuned")
    parser.add_argument("precision", nargs="?", choices=("fp32", "bf16"), default=best)
    parser.add_argument("--batch", type=int, help="global batch size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pack", type=Path, help="a data pack instead of noise")
    return parser.parse_args()


def peers_python() -> str:
    """The interpreter of an environment with both libraries and this environment's torch."""
    folder = ROOT / "benchmarks" / ".peers"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        wanted = [f"{name}=={metadata.version(name)}" for name in ("torch", "torchvision", "numpy", "pillow")]
        checked([str(python), "-m", "pip", "install", "--quiet", *wanted, *PEERS], cwd=ROOT)
    return str(python)


def launch(python: str, words: list[str], *, ranks: int) -> dict[str, float]:
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = str(ROOT / "benchmarks" / "training_rank.py")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = checked([*torchrun, script, *words], cwd=ROOT, env=environment)
    results = [line for line in output.splitlines() if line.startswith('{"wall_s"')]
    found: dict[str, float] = json.loads(results[-1])
    return found


def write_pack(folder: Path, count: int = 4096, val: int = 0, test: int = 256) -> None:
    """Noise: what the images show has no influence on the time."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    (folder / "images.bin").write_bytes(images.numpy().tobytes())
    (folder / "labels.bin").write_bytes(labels.numpy().tobytes())
    content = {
        "version": 1, "name": "noise", "synthetic": True, "count": count, "channels": 3, "height": 32, "width": 32,
        "num_classes": 10, "classes": [str(number) for number in range(10)],
        "splits": {"train": [0, count - test - val], "val": [count - test - val, count - test],
                   "test": [count - test, count]},
        "mean": [0.5] * 3, "std": [0.25] * 3, "source": "benchmarks/training.py", "source_files": {},
        "sha256": {name: sha256((folder / name).read_bytes()).hexdigest() for name in ("images.bin", "labels.bin")},
    }  # fmt: skip
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["digest"] = sha256(canonical.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


if __name__ == "__main__":
    sys.exit(main())
