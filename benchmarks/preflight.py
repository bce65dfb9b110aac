"""`doit preflight` of many lab hosts, beside a bare parallel-ssh of ``true``.

    python benchmarks/preflight.py [times] [--hosts 16]                  (Linux, root; raises its own lab hosts)

Lab hosts share this computer's cores, which real ones don't: what they need to answer counts in full.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measure import DOIT, ROOT, checked, interleaved, spread, surroundings
from start import bare_s, lab_hosts

TARGET_S = 10.0


def main() -> int:
    """0 where the median keeps the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=int, nargs="?", default=3)
    parser.add_argument("--hosts", type=int, default=16)
    asked = parser.parse_args()
    print(surroundings(), flush=True)
    with lab_hosts(asked.hosts) as (hosts, ssh_config, env), tempfile.TemporaryDirectory() as folder:
        a, b = interleaved(
            lambda _: preflight_s(hosts, str(ssh_config), Path(folder)),
            lambda _: bare_s(hosts, ssh_config, env),
            asked.times,
        )
    print(f"{asked.hosts} hosts: doit preflight {spread(a, 's')}; parallel-ssh of true {spread(b, 's')}")
    print(f"target at most {TARGET_S:g} s; {surroundings().rpartition('; ')[2]}")
    return int(statistics.median(a) > TARGET_S)


def preflight_s(hosts: list[str], ssh_config: str, folder: Path) -> float:
    """One call that finds all hosts fit."""
    words = [
        "cluster=pssh", f"cluster.hosts=[{','.join(hosts)}]", f"cluster.ssh_config={ssh_config}",
        f"paths.runs={folder}/runs", f"paths.data={folder}/data", f"trainer.global_batch_size={len(hosts)}",
    ]  # fmt: skip
    began = time.perf_counter()
    said = checked([*DOIT, "preflight", *words], cwd=ROOT)
    seconds = time.perf_counter() - began
    if f"{len(hosts)} hosts can take part" not in said:
        sys.exit(said)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
