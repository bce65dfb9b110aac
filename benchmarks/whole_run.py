"""What a training costs beside its steps, on CPU ranks over gloo: whole run, evaluation, checkpoints, memory.

    python benchmarks/whole_run.py [runs]

- whole run ÷ steps: images/s from the first step to the test metrics (all epochs, evaluations, checkpoints, metric
  lines) ÷ images_per_s of the same run, the median over its steps; small_cnn, 2 ranks.
- evaluation: images/s on 2 ranks ÷ on 1 rank, one thread each, pair by pair; small_cnn.
- checkpoint: how long saving keeps the training thread, and how much of that is the copy of the tensors; ResNet-18.
- memory: a rank's peak (VmHWM) − model − optimizer − activations − data − what the process has once torch is imported
  (in a build with CUDA more than 500 MB); ResNet-18, 2 ranks. Activations are what autograd keeps for the backward
  pass, each tensor once. Gradients and what the ranks share count as ours.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from measure import ROOT, checked, interleaved, spread, surroundings
from training import write_pack

WHOLE_LEAST, EVALUATION_LEAST, STALL_MOST_MS, MEMORY_MOST_MB = 0.95, 1.8, 5.0, 300.0


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(surroundings())
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_pack(place / "data", count=24000, val=2000, test=2000)
        verdicts = [whole(place, runs), evaluation(place, runs), checkpoints(place), memory(place)]
    return 0 if all(verdicts) else 1


def whole(place: Path, runs: int) -> bool:
    shares = []
    for _ in range(runs):
        result = ranks(place, "whole", 2)
        shares.append(result["whole_images_per_s"] / result["images_per_s"])
    return told("whole run ÷ its steps", shares, min, WHOLE_LEAST)


def evaluation(place: Path, runs: int) -> bool:
    two, one = interleaved(
        lambda _: ranks(place, "evaluation", 2)["s"], lambda _: ranks(place, "evaluation", 1)["s"], runs
    )
    return told("evaluation on 2 ranks ÷ on 1", [b / a for a, b in zip(two, one, strict=True)], min, EVALUATION_LEAST)


def checkpoints(place: Path) -> bool:
    result = ranks(place, "checkpoints", 1)
    print(f"saving: {spread(result['save_ms'], 'ms')}; of that the copy: {spread(result['copy_ms'], 'ms')}")
    beside = [save - copy for save, copy in zip(result["save_ms"], result["copy_ms"], strict=True)]
    return told("a checkpoint keeps the training beside the copy, ms", beside, max, STALL_MOST_MS)


def memory(place: Path) -> bool:
    result = ranks(place, "memory", 2)
    print(", ".join(f"{name} {value:.0f} MB" for name, value in result.items()))
    parts = sum(result[name] for name in ("torch imported", "model", "optimizer", "activations", "data"))
    return told("a rank's peak beside these, MB", [result["peak"] - parts], max, MEMORY_MOST_MB)


def told(what: str, values: list[float], side: object, target: float) -> bool:
    import statistics

    middle = statistics.median(values)
    kept = middle >= target if side is min else middle <= target
    bound = "at least" if side is min else "at most"
    print(f"{what}: {spread(values)}; target {bound} {target}: {'kept' if kept else 'MISSED'}", flush=True)
    return kept


def ranks(place: Path, what: str, count: int) -> dict:  # type: ignore[type-arg]
    """The JSON line of rank 0 of benchmarks/whole_run_rank.py."""
    for leftover in ("checkpoints", "predictions.json", "summary.json", "metrics.jsonl"):
        path = place / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "benchmarks" / "whole_run_rank.py")
    output = checked([*torchrun, script, what, str(place)], cwd=ROOT, env=environment)
    found: dict = json.loads(next(line for line in output.splitlines() if line.startswith("{")))  # type: ignore[type-arg]
    return found


if __name__ == "__main__":
    sys.exit(main())
