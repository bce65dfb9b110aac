"""One attempt in a process of its own, for tests that send it signals: ``python -m … SPEC.json``."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.core.errors import Killed, PacelineError
from pipeline.core.specs import Cluster, Host
from tests.contract.listening import listener
from tests.contract.stub import Stub


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    cluster, told = spec["cluster"], spec["stub"]
    stub = Stub(run_dir=Path(told["run_dir"]), pack_dir=Path(told["pack_dir"]), digest=told["digest"])
    settings = LAUNCHERS.settings(cluster["launcher"])(**cluster["settings"])
    of_cluster = tuple(Host(**host) for host in cluster["hosts"])
    hosts = Hosts(Cluster(**{**cluster, "hosts": of_cluster, "settings": settings}))
    listening = listener(
        on_line=lambda line: print(f"{line.host}:{line.rank} | {line.text}", flush=True),
        on_notice=lambda text: print(text, flush=True),
        on_start=lambda _: print("started", flush=True),
    )
    try:
        run_attempt(stub.spec(), closing(hosts), listening)
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
