"""Who is blamed for what, from what was seen of each rank while nothing moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.attempt.stalls import SlowSteps, is_hang, judge, slow_connection, stall_text
from trainers.contract.beats import Collectives, Phase, RankBeat, RankExamination, Socket

STARTING, LOADING, COMPUTING, WAITING, UPDATING, EVALUATING, SAVING, ENDING, SCRIPT = Phase

HOSTS = {f"10.0.0.{number}": f"node{number}" for number in range(8)}
IN_MODEL = (
    "/venv/lib/torch/distributed/distributed_c10d.py:9 in all_reduce",
    "/run/code/trainers/net.py:12 in forward",
)


def rank(number: int, *, step: int = 58, phase: int = WAITING, collectives: int = 60, **seen: Any) -> RankExamination:
    """A rank on a host of its own that waits for the others, unless something else is said."""
    own = {"rank": number, "pid": 1000 + number, "step": step, "phase": phase, "collectives": collectives}
    beat = RankBeat(**own, moves=7, for_s=300.0, own_s=1.0)
    return RankExamination(beat=beat, host=f"node{number}", **{"state": "S", "sleeps_in": "futex_do_wait", **seen})


def to(number: int, again: int = 0) -> tuple[Socket, ...]:
    return (Socket(peer=f"10.0.0.{number}", unsent_bytes=4096, sent_again=again),)


def nccl(given: int, ended: int = 15, name: str = "all_reduce of 1000 Float") -> tuple[Collectives, ...]:
    """A rank's record; by its own word a rank on a GPU is at anything while its GPU waits."""
    here = "/run/code/trainers/net.py:12 in forward"
    row = Collectives(group="0", enqueued=given, completed=ended, next=name if ended < given else "", at=here)
    return (Collectives(group="1", enqueued=3, completed=3), row)


CODE = "/runs/0123456789ab/work/node0/above/above/code"
IN_BACKWARD = ("/venv/lib/torch/autograd/graph.py:9 in _engine_run_backward", f"{CODE}/train.py:14 in <module>")
SCRIPTED: dict[str, Any] = {"phase": SCRIPT, "step": 0, "collectives": 0}
ASLEEP = {**SCRIPTED, "stack": (f"{CODE}/train.py:8 in load",), "sleeps_in": "hrtimer_nanosleep"}
IN_LOADER = "/venv/lib/torch/utils/data/dataloader.py:1276 in _try_get_data"
ON_GPU: dict[str, Any] = {"phase": COMPUTING, "state": "R", "cpu": 1.0}
SLEEPING: dict[str, Any] = {"phase": LOADING, "collectives": 59, "sleeps_in": "hrtimer_nanosleep"}
CASES = {
    "stopped in a step": (
        [rank(0), rank(1, phase=COMPUTING, collectives=59, state="T")], 1, "stopped", "kill -CONT 1001"),
    "a script's rank asleep": (
        [rank(0, **SCRIPTED, stack=IN_BACKWARD), rank(1, **ASLEEP)], 1, "sleeps",
        "rank 1 on node1 hangs in the script: it sleeps (hrtimer_nanosleep) at train.py:8 in load; rank 0 on"),
    "a script's rank in another collective": (
        [
            rank(0, **SCRIPTED, stack=IN_BACKWARD),
            rank(1, **SCRIPTED, stack=IN_MODEL),
            rank(2, **SCRIPTED, stack=IN_MODEL),
        ],
        0,
        "skipped",
        "rank 0 on node0 is in another collective than rank 1 on node1 and rank 2 on node2: it is at "
        "train.py:14 in <module>, rank 1 on node1 and rank 2 on node2 at trainers/net.py:12 in forward; every",
    ),
    "stopped in a collective": (
        [rank(0), rank(1), rank(2, state="T"), rank(3)], 2, "stopped", "process 1002 is stopped"),
    "held by a debugger": ([rank(0, state="t"), rank(1)], 0, "stopped", "rank 1 on node1 waits for it"),
    "all but one stopped": (
        [rank(0, state="T"), rank(1), rank(2, state="T")], 0, "stopped",
        "there; rank 2 on node2 (process 1002) is stopped, too; rank 1 on node1 waits for it"),
    "all stopped": ([rank(0, state="T"), rank(1, state="T")], 0, "stopped", "(process 1001) is stopped, too"),
    "their torchrun stopped": (
        [
            look._replace(host="node0", beat=look.beat._replace(pid=9))
            for look in (rank(0, state="T"), rank(1, state="T"))
        ],
        0, "stopped", "it would go on with 'kill -CONT 9' there; rank 1 on node0 waits for it"),
    "stopped beside a sleeper": ([rank(0, **SLEEPING), rank(1, state="T")], 1, "stopped", ""),
    "sleeps in the loader": ([rank(0), rank(1, **SLEEPING)], 1, "sleeps", "step 58 (loading data): it sleeps in the"),
    "rank 0 sleeps": ([rank(0, **SLEEPING), rank(1), rank(2)], 0, "sleeps", "rank 1 on node1 and rank 2 on node2 wait"),
    "spins": ([rank(0), rank(1, phase=COMPUTING, collectives=59, state="R", cpu=0.98)], 1, "spins", "1.0 cores busy"),
    "spins on a core that is taken": ([rank(0), rank(1, phase=LOADING, state="R", cpu=0.1)], 1, "spins", "rank 0"),
    "a lock": ([rank(0), rank(1, phase=COMPUTING, collectives=59)], 1, "lock", "a lock that nobody gives back"),
    "a locked file": (
        [rank(0, **SCRIPTED, stack=IN_BACKWARD), rank(1, **{**ASLEEP, "sleeps_in": "locks_lock_inode_wait"})], 1,
        "locked file", "it waits for a file that another process has locked at train.py:8 in load"),
    "a connection": (
        [rank(0, **SCRIPTED, stack=IN_BACKWARD), rank(1, **{**ASLEEP, "sleeps_in": "wait_woken"})], 1, "connection",
        "it waits for data from a connection, and none comes"),
    "a loader's worker": (
        [rank(0, **SCRIPTED, stack=IN_BACKWARD), rank(1, **{**ASLEEP, "stack": (IN_LOADER, *ASLEEP["stack"])})], 1,
        "worker", "it waits for a worker process of its DataLoader, which sends nothing"),
    "a disk": ([rank(0), rank(1, phase=LOADING, state="D"), rank(2, **SLEEPING)], 1, "disk", "network file system"),
    "the one behind": (
        [rank(0), rank(1, phase=UPDATING, cpu=1.0), rank(2, step=57, phase=UPDATING, collectives=59, cpu=1.0)], 2,
        "spins", "step 57"),
    "went on without the others": (
        [rank(0, collectives=60), rank(1, step=59, collectives=60)], 1, "skipped",
        "rank 1 on node1 went on without a collective that rank 0 on node0 waits in"),
    "left out a collective of the model": (
        [rank(0, phase=COMPUTING, collectives=59, stack=IN_MODEL), rank(1)], 1, "skipped",
        "at trainers/net.py:12 in forward"),
    "made a collective of its own": (
        [rank(0), rank(1), rank(2, phase=COMPUTING, collectives=59, stack=IN_MODEL)], 2, "skipped",
        "rank 2 on node2 is in a collective that rank 0 on node0 and rank 1 on node1 never came to"),
    "a slow link": ([rank(0), rank(1, sockets=to(0))], 1, "slow link", "from node1 to node0 is too slow: 4,096 bytes"),
    "a slow link of the host between": (
        [rank(0, sockets=to(1)), rank(1, sockets=to(2)), rank(2)], 1, "slow link", "node1"),
    "a link that ranks passed unevenly": ([rank(0, collectives=61), rank(1, sockets=to(0))], 1, "slow link", ""),
    "a dropped link": (
        [rank(0, sockets=to(1, 5)), rank(1)], 0, "dropped link", "is down: 4,096 bytes are sent 5 times"),
    "a GPU waits for a rank that sleeps": (
        [
            rank(0, step=60, **ON_GPU, nccl=nccl(20)),
            rank(1, phase=LOADING, sleeps_in="hrtimer_nanosleep", nccl=nccl(15)),
        ],
        1,
        "sleeps",
        "rank 0 on node0 waits for it in NCCL's all_reduce of 1000 Float (number 16)",
    ),
    "a GPU waits for a rank of which nothing is recorded": (
        [rank(0, nccl=nccl(20)), rank(1, nccl=nccl(20)), rank(2, phase=LOADING, state="D")], 2, "disk",
        "a network file system"),
    "a rank on a GPU that left out a collective": (
        [rank(0, nccl=nccl(30, 29)), rank(1, nccl=nccl(29, 29))], 1, "skipped",
        "without a collective that rank 0 on node0 waits in, NCCL's all_reduce of 1000 Float (number 30): it is in"),
    "ranks on GPUs in two collectives": (
        [rank(0, **ON_GPU, nccl=nccl(20)), rank(1, **ON_GPU, nccl=nccl(20, name="broadcast of 5×5 Half"))], 1,
        "skipped", "is in another collective than rank 0 on node0: in NCCL's broadcast of 5×5 Half (number 16) at "
        "trainers/net.py:12 in forward, rank 0 on node0 in all_reduce of 1000 Float (number 16) at "),
    "GPUs in one collective": (
        [rank(0, **ON_GPU, nccl=nccl(20)), rank(1, nccl=nccl(20))], None, "collective",
        "NCCL's all_reduce of 1000 Float (number 16): a GPU hangs in what it computes before, or what NCCL sends"),
    "GPUs with nothing to wait for": (
        [rank(0, nccl=nccl(20, 20)), rank(1, **{**ON_GPU, "collectives": 59}, nccl=nccl(20, 20))], 1, "spins",
        "rank 0 on node0 waits for it"),
    "a slow link between GPUs": (
        [rank(0, **ON_GPU, nccl=nccl(20)), rank(1, nccl=nccl(20), sockets=to(0))], 1, "slow link",
        "from node1 to node0 is too slow"),
    "nobody stands out": (
        [rank(0), rank(1)], None, "collective", "rank 0 on node0 and rank 1 on node1 wait in the same"),
    "one rank alone": ([rank(0, phase=COMPUTING, state="R", cpu=1.0)], 0, "spins", "step 58 (computing gradients)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_holds_the_others_up_is_named_with_its_kind(case: str) -> None:
    looks, number, kind, words = CASES[case]
    verdict = judge(looks, HOSTS, 300.0)
    assert (verdict.rank, verdict.kind) == (number, kind)
    assert words in verdict.text
    assert verdict.text.startswith("no rank has moved for 300 s: ")
    if number is not None:
        assert verdict.host == f"node{number}"
    assert judge(looks[::-1], HOSTS, 300.0) == verdict, "in whatever order the hosts have answered"


def test_a_connection_whose_other_side_does_not_read_is_not_the_one_to_blame() -> None:
    unread = (Socket(peer="10.0.0.1", unsent_bytes=0, sent_again=0, unread_bytes=60_000),)
    looks = [rank(0, sockets=unread), rank(1, sockets=to(0))]
    assert slow_connection(looks, HOSTS, SlowSteps(0.9, 2.0)) is None
    assert judge(looks, HOSTS, 300.0).kind == "collective"
    dropped = [rank(0, sockets=unread), rank(1, sockets=to(0, 5))]
    assert judge(dropped, HOSTS, 300.0).kind == "dropped link"


def test_many_ranks_are_counted_and_a_stack_shows_the_own_line_first() -> None:
    stack = ("/venv/lib/python3.11/queue.py:171 in get", "/run/code/trainers/data/gather.py:80 in take")
    looks = [rank(number) for number in range(7)] + [rank(7, **SLEEPING, stack=stack)]
    verdict = judge(looks, HOSTS, 12.3)
    assert "(hrtimer_nanosleep) at data/gather.py:80 in take; 7 ranks wait for it" in verdict.text
    text = stall_text(verdict, Path("/runs/1"))
    assert text.startswith("training failed on node7: no rank has moved for 12 s: rank 7 on node7 hangs in step 58")
    assert text.endswith(f"innermost first:\n  {stack[0]}\n  {stack[1]}\nlogs: /runs/1")


@pytest.mark.parametrize(
    ("looks", "held"),
    [
        ([rank(0, **SCRIPTED, stack=IN_BACKWARD), rank(1, **ASLEEP)], True),
        ([rank(0, **ASLEEP), rank(1, **ASLEEP, state="T")], True),
        ([rank(0, **ASLEEP), rank(1, **ASLEEP)], False),  # both wait for something that nobody knows
        ([rank(0, **SCRIPTED, stack=IN_BACKWARD, cpu=0.9), rank(1, **ASLEEP)], False),  # it computes
    ],
)
def test_a_script_that_does_nothing_hangs_only_if_a_rank_is_stopped_or_waits_for_another(
    looks: list[RankExamination], held: bool
) -> None:
    assert is_hang(looks) is held
