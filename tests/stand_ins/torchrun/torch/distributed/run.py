"""torchrun as the node agent sees it: ranks in sessions of their own, their output in files, all ended with one.

It stands for torch.distributed.run where that isn't what is tested: importing the real one costs a node seconds. To
import it is to run it.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

try:
    import forked_ranks  # type: ignore[import-not-found]  # only where tests/stand_ins is on the path
    from forked_ranks import ForkedRank
except ImportError:
    forked_ranks = None

options, argv = {}, sys.argv[1:]
while argv[0].startswith("--"):
    name, _, options[name] = argv.pop(0).partition("=")
if argv[:2] == ["-m", "--"]:
    argv.remove("--")
nnodes, nproc = int(options["--nnodes"]), int(options["--nproc-per-node"])
node = int(options.get("--node-rank", "0"))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: sys.exit(1))


def environment(local_rank: int, folder: pathlib.Path) -> dict[str, str]:
    """What torchrun tells a rank, of that which ours read."""
    return {
        "RANK": str(node * nproc + local_rank),
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nnodes),
        "MASTER_ADDR": options.get("--master-addr", "127.0.0.1"),
        "MASTER_PORT": options.get("--master-port", "0"),
        "TORCHELASTIC_RUN_ID": options["--rdzv-id"],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }


def start(local_rank: int) -> "subprocess.Popen[bytes] | ForkedRank":
    folder = pathlib.Path(options["--log-dir"], options["--rdzv-id"], "attempt_0", str(local_rank))
    folder.mkdir(parents=True)
    env = os.environ | environment(local_rank, folder)
    if forked_ranks is not None and forked_ranks.can_fork(argv, env):
        return forked_ranks.ForkedRank(argv, env, str(folder / "stdout.log"), str(folder / "stderr.log"))
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        return subprocess.Popen([sys.executable, "-u", *argv], env=env, stdout=out, stderr=err, start_new_session=True)


def alive() -> "list[subprocess.Popen[bytes] | ForkedRank]":
    return [rank for rank in ranks if rank.poll() is None]


def leave_after_a_failure() -> None:
    for local_rank, rank in enumerate(ranks):
        if rank.poll():
            sys.exit(f"failed (exitcode: {rank.returncode}) local_rank: {local_rank} (pid: {rank.pid})")


ranks: "list[subprocess.Popen[bytes] | ForkedRank]" = []
try:
    for local_rank in range(nproc):
        ranks.append(start(local_rank))
    while alive():
        leave_after_a_failure()
        time.sleep(0.05)
    leave_after_a_failure()
finally:
    for end in ("terminate", "kill"):
        for rank in ranks:
            getattr(rank, end)()
        until = time.monotonic() + float(os.environ["PET_SHUTDOWN_TIMEOUT"])
        while alive() and time.monotonic() < until:
            time.sleep(0.05)
sys.exit()
