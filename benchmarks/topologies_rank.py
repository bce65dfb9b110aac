"""One rank of benchmarks/topologies.py: trains each run folder that it is given, over the ports in PORTS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainers.entry import leave
from trainers.training.session import run

for port, run_dir in zip(os.environ["PORTS"].split(), sys.argv[1:], strict=True):
    os.environ["MASTER_PORT"] = port
    run(Path(run_dir) / "config.json")
leave()
