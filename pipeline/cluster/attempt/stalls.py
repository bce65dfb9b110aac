"""Judge an examination of all ranks: name the rank that holds the others up, or the connection between them. Pure.

``stall_watch.py`` calls ``judge`` when no rank moves any more, and ``slow_connection`` when ranks move but mostly wait.
The question is always which rank is not in the collective in which the others wait. Ranks on CPUs report collectives
themselves; of ranks on GPUs torch's flight recorder counts them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from pipeline.cluster.events import Verdict
from pipeline.core.tables import counted
from trainers.contract.beats import Collectives, Phase, RankExamination, Socket

BUSY_CORES = 0.5
"""Least number of cores that a computing rank keeps busy; a rank that waits over gloo uses a few hundredths."""

HOST_CAUSED = ("slow link", "dropped link", "stopped", "disk")
"""Kinds that the host causes, not the code, so a retry may succeed."""

_CODE_OF_RUN = re.compile(r"^/\S*/(?:[0-9a-f]{12}|node\d+)/(?:work/node\d+/above/above/)?code/")
"""The run's copy of the code, on this computer or on a host, with which paths of the project begin in frames."""
_TORCH_DISTRIBUTED = "/torch/distributed/"
_WAITS_IN_DDP = ("/torch/nn/parallel/distributed.py", " in _engine_run_backward")
"""Frames in which DistributedDataParallel waits in C++: for buffers and, in the backward pass, for gradients."""
_WAITS_FOR_WORKER = " in _try_get_data"  # of torch.utils.data.dataloader
_SLEEP_KINDS = {  # kind → parts of names of kernel functions in which the process sleeps (/proc/PID/wchan)
    "locked file": ("lock_inode_wait",),
    "lock": ("futex",),
    "connection": ("wait_woken", "unix_stream", "sk_wait", "inet_csk_accept", "wait_for_more_packets"),
}
_HANG_CAUSES = {  # kind of hang → text
    "stopped": "process {pid} is stopped (SIGSTOP, or a debugger holds it); it would go on with 'kill -CONT {pid}' "
    "there",
    "disk": "process {pid} waits for a disk or a network file system that doesn't answer",
    "spins": "it computes without end ({cpu:.1f} cores busy)",
    "lock": "it waits for a lock that nobody gives back",
    "locked file": "it waits for a file that another process has locked",
    "connection": "it waits for data from a connection, and none comes",
    "worker": "it waits for a worker process of its DataLoader, which sends nothing",
    "sleeps": "it sleeps{while_loading} ({sleeps_in})",
}
_UNREAD_LIMIT_BYTES = 16 << 10  # a receiver that leaves more unread is slow itself, and not the connection
_RESENT_LIMIT = 3  # times that the kernel has sent the same bytes again, which takes at least 1.5 s


class SlowSteps(NamedTuple):
    """Steps in which the ranks mostly waited for each other."""

    waiting_share: float  # of the steps' time that even the busiest rank spends in collectives, 0 to 1
    step_s: float


def judge(ranks: Sequence[RankExamination], hosts: Mapping[str, str], idle_s: float) -> Verdict:
    """Return which rank holds the run up, and why. ``ranks``: at least one. ``hosts``: address → label."""
    verdict = _judge(sorted(ranks, key=lambda rank: rank.beat.rank), hosts)
    return replace(verdict, text=f"no rank has moved for {idle_s:.0f} s: {verdict.text}")


def _judge(ranks: Sequence[RankExamination], hosts: Mapping[str, str]) -> Verdict:
    """Return the verdict on ranks in their order, by the most certain evidence first."""
    stopped = [rank for rank in ranks if _is_stopped(rank)]
    if stopped:
        return _hang(stopped[0], "stopped", ranks)
    # a rank outside of any collective holds the others up; of several, one with a hung disk, or the furthest behind
    nccl = _NcclCounts.of_ranks(ranks)
    not_waiting = [rank for rank in ranks if not nccl.waits(rank)]
    hanging = [rank for rank in not_waiting if not _is_in_collective(rank)]
    if hanging:
        culprit = min(hanging, key=lambda rank: (rank.state != "D", _position(rank), rank.beat.rank))
        return _hang(culprit, _kind_of_hang(culprit), ranks, waited_in=nccl.furthest)
    # a rank waits in another collective, as it has entered fewer of this process group
    if not_waiting and nccl.ranks_differ:
        return _left_out_nccl(not_waiting[0], ranks, nccl)
    # all wait: for a connection, or in different collectives
    slow = _slow_link(ranks, hosts, f"all ranks wait in a collective in {_where(ranks[0])}")
    return slow or (_all_in_nccl(ranks, nccl) if nccl.all_wait else _all_in_collectives(ranks))


def is_hang(ranks: Sequence[RankExamination]) -> bool:
    """Return whether idle ranks of a script certainly hang: one is stopped, or waits in a collective."""
    # others may wait for their user, or for a download
    return any(_is_stopped(rank) or _is_in_collective(rank) for rank in ranks)


def slow_connection(ranks: Sequence[RankExamination], hosts: Mapping[str, str], steps: SlowSteps) -> Verdict | None:
    """Return the connection that the ranks of a moving run mostly wait for; None if no bytes wait to be sent."""
    head = f"steps take {steps.step_s:.3g} s, {steps.waiting_share:.0%} of it waiting in collectives"
    return _slow_link(sorted(ranks, key=lambda rank: rank.beat.rank), hosts, head)


def stall_text(verdict: Verdict, log_dir: Path) -> str:
    """Return the message for the user about a run that was ended for a stall."""
    stack = "".join(f"\n  {_CODE_OF_RUN.sub('', frame)}" for frame in verdict.stack)
    where = f"\nits stack, innermost first:{stack}" if stack else ""
    return f"training failed on {verdict.host}: {verdict.text}{where}\nlogs: {log_dir}"


# ------------------------------------------------------------------------------------------------- what a rank does
def _is_stopped(rank: RankExamination) -> bool:
    return rank.state in ("T", "t")


def _is_in_collective(rank: RankExamination) -> bool:
    """Return whether a rank is in a collective: it reports that, or its stack shows one of a model or script."""
    if rank.beat.phase == Phase.WAITING or any(_TORCH_DISTRIBUTED in frame for frame in rank.stack[:3]):
        return True
    # in DDP a rank has the same frames while it computes gradients and while it waits for them, but then it is idle
    is_idle_script = rank.beat.phase == Phase.RUNNING_A_SCRIPT and rank.cpu < BUSY_CORES and rank.state != "R"
    return is_idle_script and any(place in frame for place in _WAITS_IN_DDP for frame in rank.stack[:2])


def _position(rank: RankExamination) -> tuple[int, int]:
    """Return how far a rank has got: (step, collectives entered so far)."""
    return rank.beat.step, rank.beat.collectives


def _kind_of_hang(rank: RankExamination) -> str:
    """Return a key of ``_HANG_CAUSES``."""
    if rank.state == "D":
        return "disk"
    if rank.cpu >= BUSY_CORES or rank.state == "R":  # state R: it may share a core
        return "spins"
    if any(frame.endswith(_WAITS_FOR_WORKER) for frame in rank.stack):
        return "worker"
    kinds = (kind for kind, names in _SLEEP_KINDS.items() if any(name in rank.sleeps_in for name in names))
    return next(kinds, "sleeps")


@dataclass(frozen=True, kw_only=True)
class _NcclCounts:
    """NCCL's counts of collectives in the first process group where ranks differ, else in the first where all wait."""

    by_rank: Mapping[int, Collectives]
    ranks_differ: bool = False  # some have entered fewer collectives than others
    all_wait: bool = False  # all have entered the same number, and none has completed the last one
    furthest: str = ""  # the collective of those ranks that have entered the most, in words

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankExamination]) -> _NcclCounts:
        groups: dict[str, dict[int, Collectives]] = {}
        for rank in ranks:
            for counts in rank.nccl:
                groups.setdefault(counts.group, {})[rank.beat.rank] = counts
        candidates = [cls._of_group(by_rank) for by_rank in groups.values() if len(by_rank) > 1]
        return min(candidates, key=lambda one: (not one.ranks_differ, not one.all_wait), default=cls(by_rank={}))

    @classmethod
    def _of_group(cls, by_rank: Mapping[int, Collectives]) -> _NcclCounts:
        furthest = max(by_rank.values(), key=lambda counts: (counts.enqueued, counts.enqueued - counts.completed))
        ranks_differ = any(counts.enqueued < furthest.enqueued for counts in by_rank.values())
        all_wait = not ranks_differ and all(counts.completed < counts.enqueued for counts in by_rank.values())
        words = furthest.next and f"NCCL's {_numbered(furthest)}"
        return cls(by_rank=by_rank, ranks_differ=ranks_differ, all_wait=all_wait, furthest=words)

    def waits(self, rank: RankExamination) -> bool:
        """Return whether a rank waits for others, by NCCL's counts if there are any, else as ``_is_in_collective``."""
        counts = self.by_rank.get(rank.beat.rank)
        if counts is None or not (self.ranks_differ or self.all_wait):
            return _is_in_collective(rank)
        return self.all_wait or counts.enqueued > min(other.enqueued for other in self.by_rank.values())


def _numbered(counts: Collectives) -> str:
    return f"{counts.next} (number {counts.completed + 1})"


# -------------------------------------------------------------------------------------------------------- verdicts
def _hang(culprit: RankExamination, kind: str, ranks: Sequence[RankExamination], *, waited_in: str = "") -> Verdict:
    """Return the verdict on a rank that hangs. ``waited_in``: the collective in which others wait for it, if known."""
    beat, host = culprit.beat, culprit.host
    cause = _HANG_CAUSES[kind].format(
        pid=beat.pid,
        cpu=culprit.cpu,
        while_loading=" in the loading of data" if beat.phase == Phase.LOADING else "",
        sleeps_in=culprit.sleeps_in or "nothing is known of what it waits for",
    )
    # torchrun may be the stopped process, in the place of several ranks: it is named once
    also_stopped = [rank for rank in ranks if _is_stopped(rank) and (rank.host, rank.beat.pid) != (host, beat.pid)]
    others = [rank for rank in ranks if rank is not culprit and rank not in also_stopped]
    rest = "".join(
        f"; rank {rank.beat.rank} on {rank.host} (process {rank.beat.pid}) is stopped, too" for rank in also_stopped
    )
    if others:
        rest += f"; {_names(others)} {_wait(others)} for it{f' in {waited_in}' if waited_in else ''}"
    text = f"rank {beat.rank} on {host} hangs in {_where(culprit)}: {cause}{_at(culprit)}{rest}"
    return Verdict(rank=beat.rank, host=host, kind=kind, text=text, stack=culprit.stack)


class _Connection(NamedTuple):
    """A connection of a rank to another host."""

    rank: RankExamination
    peer: str  # label of the other host, or its address
    socket: Socket


def _slow_link(ranks: Sequence[RankExamination], hosts: Mapping[str, str], head: str) -> Verdict | None:
    """Return the verdict on the worst connection where bytes wait; None if there is none. ``head`` begins its text."""
    connections = [
        _Connection(rank, hosts.get(socket.peer, socket.peer), socket)
        for rank in ranks
        for socket in rank.sockets
        if hosts.get(socket.peer) != rank.host
    ]
    # bytes that the receiver leaves unread show a slow process there, and not a slow connection
    unread_bytes = Counter[tuple[str, str]]()  # (sending host, receiving host) → bytes
    for receiver, sender, socket in connections:
        unread_bytes[sender, receiver.host] += socket.unread_bytes
    stuck = []
    for connection in connections:
        rank, peer, socket = connection
        is_down = socket.sent_again >= _RESENT_LIMIT
        has_waiting_bytes = bool(socket.unsent_bytes or socket.sent_again)
        if is_down or (has_waiting_bytes and unread_bytes[rank.host, peer] < _UNREAD_LIMIT_BYTES):
            stuck.append(connection)
    if not stuck:
        return None
    # the host with the most stuck connections is to blame: its own link is bad
    stuck_by_host = Counter(host for rank, peer, _ in stuck for host in (rank.host, peer))
    rank, peer, socket = max(
        stuck, key=lambda item: (stuck_by_host[item.rank.host], item.socket.sent_again, item.socket.unsent_bytes)
    )
    host = peer if stuck_by_host[peer] > stuck_by_host[rank.host] else rank.host
    ranks_there = [other.beat.rank for other in ranks if other.host == host]
    number = rank.beat.rank if host == rank.host else next(iter(ranks_there), None)
    is_down = socket.sent_again >= _RESENT_LIMIT
    how = f"sent {socket.sent_again} times in vain" if is_down else "not sent yet, or not received"
    text = (
        f"{head}, and the connection from {rank.host} to {peer} {'is down' if is_down else 'is too slow'}: "
        f"{socket.unsent_bytes:,} bytes are {how}"
    )
    return Verdict(rank=number, host=host, kind="dropped link" if is_down else "slow link", text=text)


def _left_out_nccl(culprit: RankExamination, ranks: Sequence[RankExamination], nccl: _NcclCounts) -> Verdict:
    others = [rank for rank in ranks if nccl.waits(rank)]
    return _skipped(
        culprit,
        f"went on without a collective that {_names(others)} {_wait(others)} in, {nccl.furthest}: it is in "
        f"{_where(culprit)}{_at(culprit)}; every rank must join every collective",
    )


def _all_in_nccl(ranks: Sequence[RankExamination], nccl: _NcclCounts) -> Verdict:
    """Return the verdict on ranks that have all entered equally many NCCL collectives, and don't complete the last."""
    ranks_in = Counter(counts.next for counts in nccl.by_rank.values())  # by name of the collective
    if len(ranks_in) == 1:
        return _same_collective(
            ranks,
            f", {nccl.furthest}: a GPU hangs in what it computes before, or what NCCL sends doesn't arrive "
            "(cluster.env.NCCL_DEBUG=INFO shows its connections)",
        )
    # they are in different collectives: the culprit is in the one with the fewest ranks, of two ranks the later one
    last_rank_in = {counts.next: number for number, counts in sorted(nccl.by_rank.items())}
    rarest = min(ranks_in, key=lambda name: (ranks_in[name], -last_rank_in[name]))
    counted_ranks = [rank for rank in ranks if rank.beat.rank in nccl.by_rank]
    culprits = [rank for rank in counted_ranks if nccl.by_rank[rank.beat.rank].next == rarest]
    others = [rank for rank in counted_ranks if rank not in culprits]
    of_culprit, of_others = nccl.by_rank[culprits[0].beat.rank], nccl.by_rank[others[0].beat.rank]
    where = f"in NCCL's {_numbered(of_culprit)}{_shortened(of_culprit.at)}"
    where_others = f" in {_numbered(of_others)}{_shortened(of_others.at)}"
    return _in_another_collective(culprits[0], where, others, where_others)


def _all_in_collectives(ranks: Sequence[RankExamination]) -> Verdict:
    """Return the verdict on the rank in another collective than most; of two ranks, on the one that is further on."""
    # (step, collectives entered, phase, line) → ranks
    groups: dict[tuple[int, int, int, str], list[RankExamination]] = {}
    for rank in ranks:
        # a script's steps aren't known, so the innermost line of its own code identifies the collective
        line = _at(rank) if rank.beat.phase == Phase.RUNNING_A_SCRIPT else ""
        groups.setdefault((*_position(rank), rank.beat.phase, line), []).append(rank)
    if len(groups) == 1:
        return _same_collective(ranks, f", and no connection between them has anything to send{_at(ranks[0])}")
    # the smallest group; of equal ones the furthest on
    smallest = min(groups, key=lambda key: (len(groups[key]), [-part for part in key[:3]], key[3]))
    culprit, others = groups[smallest][0], [rank for rank in ranks if rank not in groups[smallest]]
    other = max(others, key=_position)
    if culprit.beat.phase == Phase.RUNNING_A_SCRIPT:  # its position isn't known, so neither is the rank that went on
        return _in_another_collective(culprit, f"it is{_at(culprit)}", others, _at(other))
    went_on = (_position(culprit), culprit.beat.phase) > (_position(other), other.beat.phase)
    difference = "went on without a collective" if went_on else "is in a collective"
    return _skipped(
        culprit,
        f"{difference} that {_names(others)} {_wait(others) + ' in' if went_on else 'never came to'}: it is in "
        f"{_where(culprit)}{_at(culprit)}, {_names(others)} in {_where(other)}{_at(other)}; every rank must join every "
        "collective",
    )


def _same_collective(ranks: Sequence[RankExamination], why: str) -> Verdict:
    first = ranks[0]
    text = f"{_names(ranks)} wait in the same collective in {_where(first)}{why}"
    return Verdict(rank=None, host=first.host, kind="collective", text=text, stack=first.stack)


def _in_another_collective(
    culprit: RankExamination, where: str, others: Sequence[RankExamination], where_others: str
) -> Verdict:
    difference = f"is in another collective than {_names(others)}: {where}, {_names(others)}{where_others}"
    return _skipped(culprit, f"{difference}; every rank must join the same collectives in the same order")


def _skipped(culprit: RankExamination, difference: str) -> Verdict:
    number, host = culprit.beat.rank, culprit.host
    text = f"rank {number} on {host} {difference}"
    return Verdict(rank=number, host=host, kind="skipped", text=text, stack=culprit.stack)


# ----------------------------------------------------------------------------------------------------------- words
def _where(rank: RankExamination) -> str:
    """Return ``step 58 (loading data)``; ``the script`` for a script, whose steps aren't known."""
    if rank.beat.phase == Phase.RUNNING_A_SCRIPT:
        return "the script"
    step = f"step {rank.beat.step}" if rank.beat.step else "what comes before its first step"
    return f"{step} ({rank.beat.doing})"


def _at(rank: RankExamination) -> str:
    """Return `` at models/net.py:12 in forward``: the innermost frame in code of the user, not of Python or torch."""
    of_user = [frame for frame in rank.stack if "/torch/" not in frame and "/lib/python" not in frame]
    return _shortened(next(iter(of_user or rank.stack), ""))


def _shortened(frame: str) -> str:
    """Return `` at PATH:LINE in FUNCTION`` with a short path; '' without a frame."""
    path, _, line_and_function = frame.rpartition(":")
    in_project = _CODE_OF_RUN.sub("", path)
    shown = in_project if in_project != path else "/".join(PurePath(path).parts[-2:])
    return f" at {shown}:{line_and_function}" if frame else ""


def _wait(ranks: Sequence[RankExamination]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _names(ranks: Sequence[RankExamination]) -> str:
    """Return ``rank 0 on node0``, or ``15 ranks``."""
    if len(ranks) > 4:
        return counted(len(ranks), "rank")
    names = [f"rank {rank.beat.rank} on {rank.host}" for rank in ranks]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "nobody"
