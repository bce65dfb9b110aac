"""Compressed gradients on a slow link: two lab hosts with 1 Gb/s between them, `doit benchmark` on them.

    python benchmarks/slow_link.py [compression] [pairs] [override …]

The reference loop of the benchmark sends fp32 as DistributedDataParallel does; the ratio is that of compression and all
else. So none is measured too. ResNet-18 at a global batch of 8: what a step computes takes less than what it sends,
as on two GPU hosts with a slow link. Linux, root, `tc`; raises the lab and takes it down again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from measure import DOIT, ROOT, checked, spread, surroundings

from pipeline import lab

MBIT, TARGET = 1000.0, 1.3


def main() -> int:
    compression = sys.argv[1] if len(sys.argv) > 1 else "fp16"
    pairs = sys.argv[2] if len(sys.argv) > 2 else "5"
    overrides = sys.argv[3:] or ["model=resnet18", "trainer.global_batch_size=8", "optimizer.lr=0.01"]
    hosts = lab.up(ROOT, 2)
    try:
        for host in hosts.hosts:
            lab.limit(hosts, host.name, MBIT)
        rates = {name: measured(name, pairs, overrides) for name in dict.fromkeys(("none", compression))}
    finally:
        lab.down(ROOT)
    print(f"{MBIT:.0f} Mbit/s, {' '.join(overrides)}; {surroundings()}")
    for name, (own, plain) in rates.items():
        print(f"{name}: {spread(own, 'images/s')}; reference loop in fp32: {spread(plain, 'images/s')}")
    for name, (own, plain) in rates.items():
        print(f"{name} ÷ reference loop: {spread([a / b for a, b in zip(own, plain, strict=True)])}")
    gain = statistics.median([a / b for a, b in zip(*rates[compression], strict=True)])
    gain /= statistics.median([a / b for a, b in zip(*rates["none"], strict=True)])
    kept = gain >= TARGET
    print(f"{compression} ÷ none: {gain:.3f}; target at least {TARGET}: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def measured(compression: str, pairs: str, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Images/s of Paceline and of the reference loop on two hosts, pair by pair."""
    with tempfile.TemporaryDirectory() as place:
        words = [*overrides, "cluster=two_node", "dataset=synthetic", f"strategy.compression={compression}"]
        words += [f"pairs={pairs}", f"paths.runs={place}/runs", f"paths.data={place}/data"]
        print(checked([*DOIT, "benchmark", *words], cwd=ROOT), flush=True)
        whole = json.loads(next(Path(place).glob("runs/diagnostics/*/benchmark.json")).read_text())
    last = whole["points"][-1]
    return tuple([pair[f"{who}_images_per_s"] for pair in last["pairs"]] for who in ("paceline", "plain"))  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
