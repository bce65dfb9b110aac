"""One attempt in a process of its own, for tests that send it signals: ``python -m … SPEC.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeline.cluster.attempt import run_attempt
from pipeline.core.errors import Killed, PacelineError
from pipeline.core.specs import Cluster, Host


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    hosts = tuple(Host(**host) for host in spec["cluster"].pop("hosts"))
    spec["cluster"] = Cluster(hosts=hosts, **spec["cluster"])
    try:
        run_attempt(
            **{**spec, "run_dir": Path(spec["run_dir"]), "pack_dir": Path(spec["pack_dir"])},
            trainer="trainers.classifier",
            on_line=lambda line: print(f"{line.host}:{line.rank} | {line.text}", flush=True),
            on_start=lambda: print("started", flush=True),
        )
    except Killed as error:
        print(f"KILLED {error}", flush=True)
        return 1
    except PacelineError as error:
        print(f"FAILED {error}", flush=True)
        return 1
    print("FINISHED", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
