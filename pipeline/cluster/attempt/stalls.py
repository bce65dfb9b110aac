"""Detect stalls: whether the ranks of an attempt still move, and which one holds the others up. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from pipeline.cluster.events import Verdict
from pipeline.core.tables import counted
from trainers.contract.beats import Collectives, NodeBeat, NodeLook, Phase, RankBeat, RankLook

LOOK_S = 8.0
"""How long the nodes have to answer a look (a request to describe their ranks); then judge without the rest."""

_PAUSE_FACTOR = 10  # times the second longest pause so far (of steps, evaluations, checkpoints)
_PATIENT_FACTOR = 4  # times stall_s, before the first step and while files are written
_MAX_TICK_S = 2.0  # longest time between two checks that counts; if it was longer, this process was stopped itself
_SHORTEST_PAUSE_S = 2.0  # beats come each second, so a shorter time is no pause
_WINDOW_S = 20.0  # over which the share of waiting in the steps' time is measured
_MAX_WAITING_SHARE = 0.8  # a larger share makes the network be examined
_MAX_TRIES = 5  # windows, because at a single moment no bytes may wait to be sent
_BEFORE_TIMEOUT = 0.9  # of collective_timeout_s, when ranks would give up without naming the culprit


@dataclass(kw_only=True)
class Watch:
    """The state of an attempt's ranks. ``hosts``: address → label of every node; times in seconds."""

    hosts: Mapping[str, str]
    stall_s: float
    collective_timeout_s: float
    nodes: dict[str, NodeBeat] = field(default_factory=dict)
    last: dict[int, tuple[str, RankBeat]] = field(default_factory=dict)  # by rank; ended ranks stay
    idle_s: float = 0.0
    _looks: dict[str, NodeLook] = field(default_factory=dict)
    _pauses_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # the two longest; one may be an accident
    _checked_at: float = 0.0
    _moved: bool = False  # since the last check
    _look_at: float | None = None  # time of the request for looks that wasn't judged yet
    _window: tuple[float, dict[int, RankBeat]] | None = None
    _window_pause_s: float = 0.0  # the longest since the window began
    _slow: tuple[float, float] | None = None  # share of waiting, seconds of a step; set while the network is examined
    _tries: int = 0

    def take_beat(self, node: NodeBeat) -> None:
        """Take a node's report on its ranks."""
        before, has_begun = self.nodes.get(node.host), self._has_begun()
        self.nodes[node.host] = node
        self.last.update({beat.rank: (node.host, beat) for beat in node.ranks})
        if before is None or _progress(before) != _progress(node):
            self._window_pause_s = max(self._window_pause_s, self.idle_s)
            if has_begun and self.idle_s > _SHORTEST_PAUSE_S:
                self._pauses_s = sorted([*self._pauses_s, self.idle_s])[-2:]
            self.idle_s, self._moved, self._look_at = 0.0, True, None

    def remove(self, host: str) -> None:
        """Forget a node that has ended."""
        self.nodes.pop(host, None)

    def take_look(self, look: NodeLook) -> None:
        """Take a node's answer to a look."""
        self._looks[look.host] = look

    def check(self, now: float, ask: Callable[[], None]) -> Verdict | None:
        """Call ``ask`` for looks once no rank moves any more, and return the verdict on them when they have arrived.

        To be called about once a second, with ``now`` from a monotonic clock.
        """
        passed_s = min(now - self._checked_at, _MAX_TICK_S) if self._checked_at else 0.0
        self._checked_at = now
        self.idle_s += 0.0 if self._moved else passed_s
        self._moved = False
        beats = self._beats()
        if not beats or self.idle_s < self._limit_s(beats):
            return None
        if self._look_at is None:
            self._look_at, self._looks = now, {}
            self._slow = self._window = None  # its looks are gone
            ask()
        looks = self._rank_looks()
        if len(self._looks) == len(self.nodes) or (now - self._look_at > LOOK_S and looks):
            if _is_script(beats) and not is_hang(looks):
                self.idle_s, self._look_at = 0.0, None  # look again after another stall_s
                return None
            return judge(looks, self.hosts, self.idle_s) if looks else None
        return None

    def slow_network(self, now: float, ask: Callable[[], None]) -> Verdict | None:
        """Call ``ask`` for looks if the ranks of a moving run mostly wait, and return the connection that is too slow.

        None: the ranks don't wait, the looks haven't arrived, or no bytes wait to be sent. ``now`` as in ``check``.
        """
        if self._tries >= _MAX_TRIES or self._look_at is not None or not self._has_begun():
            return None
        if self._slow is not None and len(self._looks) == len(self.nodes):
            return self._judge_network(*self._slow)
        if self._slow is None:
            self._slow = self._waiting_share(now)
            if self._slow is not None:
                self._looks = {}
                ask()
        return None

    def _judge_network(self, waiting: float, step_s: float) -> Verdict | None:
        """Return the connection that is too slow by the looks that were asked for; None: none of them."""
        verdict = slow_connection(self._rank_looks(), self.hosts, waiting, step_s)
        self._slow = self._window = None
        self._tries = _MAX_TRIES if verdict else self._tries + 1
        return verdict

    def _waiting_share(self, now: float) -> tuple[float, float] | None:
        """Return the share of waiting in the steps' time and the seconds of a step, if the share is large.

        None: the window isn't over, or a pause in it was far longer than its steps, as of a connection that was cut.
        """
        beats = {beat.rank: beat for beat in self._beats()}
        if self._window is None or self._window[1].keys() != beats.keys():
            self._begin_window(now, beats)
            return None
        since, before = self._window
        passed_s, pause_s = now - since, max(self._window_pause_s, self.idle_s)
        if passed_s < _WINDOW_S:
            return None
        self._begin_window(now, beats)
        steps = min(beat.step - before[rank].step for rank, beat in beats.items())
        if steps < 1 or len(self.nodes) == 1:
            return None
        if pause_s > max(_SHORTEST_PAUSE_S, _PAUSE_FACTOR * (passed_s - pause_s) / steps):
            return None
        own_s = max(beat.own_s - before[rank].own_s for rank, beat in beats.items())
        waiting = 1 - own_s / passed_s
        return (waiting, passed_s / steps) if waiting >= _MAX_WAITING_SHARE else None

    def _begin_window(self, now: float, beats: dict[int, RankBeat]) -> None:
        self._window, self._window_pause_s = (now, beats), 0.0

    def _limit_s(self, beats: list[RankBeat]) -> float:
        if _is_script(beats):
            return self.stall_s
        waits = any(beat.phase == Phase.WAITING for beat in beats)
        if not self._has_begun() and not waits:  # imports, compilation, measurements: these have no limit
            return math.inf
        patient = not self._has_begun() or any(beat.phase in (Phase.SAVING, Phase.ENDING) for beat in beats)
        limit_s = max(self.stall_s * (_PATIENT_FACTOR if patient else 1), _PAUSE_FACTOR * self._pauses_s[0])
        if waits:
            limit_s = min(limit_s, max(self.stall_s, _BEFORE_TIMEOUT * self.collective_timeout_s))
        return limit_s

    def _has_begun(self) -> bool:
        """True if every rank has begun its first step."""
        beats = self._beats()
        return bool(beats) and all(beat.step for beat in beats)

    def _beats(self) -> list[RankBeat]:
        return [beat for node in self.nodes.values() for beat in node.ranks]

    def _rank_looks(self) -> list[RankLook]:
        return [look for node in self._looks.values() for look in node.ranks]


def _is_script(beats: list[RankBeat]) -> bool:
    return any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in beats)


def _progress(node: NodeBeat) -> list[tuple[int, int]]:
    return [(beat.pid, beat.moves) for beat in node.ranks]


BUSY_CORES = 0.5
"""Least number of cores that a computing rank keeps busy; a rank that waits over gloo uses a few hundredths."""

HOST_CAUSED = ("slow link", "dropped link", "stopped", "disk")
"""Kinds that the host causes, not the code, so a retry may succeed."""

_CODE_OF_RUN = re.compile(r"^/\S*/(?:[0-9a-f]{12}|node\d+)/(?:work/node\d+/above/above/)?code/")
"""What stands before a path of the project in a frame: the run's copy of the code, on this computer or on a host."""
_TORCH_DISTRIBUTED = "/torch/distributed/"
_WAITS_IN_DDP = ("/torch/nn/parallel/distributed.py", " in _engine_run_backward")
"""Frames in which DistributedDataParallel waits in C++: for buffers and, in the backward pass, for gradients."""
_WAITS_FOR_WORKER = " in _try_get_data"  # of torch.utils.data.dataloader
_SLEEP_KINDS = {  # kind → parts of names of kernel functions in which the process sleeps (/proc/PID/wchan)
    "locked file": ("lock_inode_wait",),
    "lock": ("futex",),
    "connection": ("wait_woken", "unix_stream", "sk_wait", "inet_csk_accept", "wait_for_more_packets"),
}
_UNREAD_LIMIT_BYTES = 16 << 10
_RESENT_LIMIT = 3  # times that the kernel has sent the same bytes again, which takes at least 1.5 s


def judge(looks: Sequence[RankLook], hosts: Mapping[str, str], idle_s: float) -> Verdict:
    """Return the verdict: which rank holds the run up, and why.

    Args:
        looks: one for each rank that answered, at least one.
        hosts: address → label, of every node.
        idle_s: seconds since a rank has moved.
    """
    verdict = _judge(sorted(looks, key=lambda look: look.beat.rank), hosts)
    return replace(verdict, text=f"no rank has moved for {idle_s:.0f} s: {verdict.text}")


def _judge(ranked: Sequence[RankLook], hosts: Mapping[str, str]) -> Verdict:
    stopped = [look for look in ranked if _is_stopped(look)]
    if stopped:
        return _describe_hang(stopped[0], "stopped", ranked)
    nccl = _Nccl.of_ranks(ranked)
    busy = [look for look in ranked if not nccl.waits(look)]
    hung = [look for look in busy if not _is_in_collective(look)]
    if hung:
        culprit = min(hung, key=lambda look: (look.state != "D", _position(look), look.beat.rank))
        return _describe_hang(culprit, _kind(culprit), ranked, waited_in=nccl.next)
    if busy and nccl.differs:
        return _describe_skipped(busy[0], ranked, nccl)
    link = _describe_link(ranked, hosts, f"all ranks wait in a collective in {_where(ranked[0])}")
    if link is not None:
        return link
    return _describe_pending(ranked, nccl) if nccl.pending else _describe_mismatch(ranked)


def is_hang(looks: Sequence[RankLook]) -> bool:
    """True if idle ranks of a script hang: one is stopped, or one waits in a collective.

    Otherwise the script may wait for its user, a licence or a download, and go on by itself.
    """
    return any(_is_stopped(look) or _is_in_collective(look) for look in looks)


def slow_connection(
    looks: Sequence[RankLook], hosts: Mapping[str, str], waiting: float, step_s: float
) -> Verdict | None:
    """Return the connection that the ranks of a moving run mostly wait for; None if no bytes wait to be sent.

    Args:
        waiting: the share of the steps' time that even the busiest rank spends in collectives, 0 to 1.
        step_s: seconds that a step takes.
    """
    head = f"steps take {step_s:.3g} s, {waiting:.0%} of it waiting in collectives"
    return _describe_link(sorted(looks, key=lambda look: look.beat.rank), hosts, head)


def stall_text(verdict: Verdict, log_dir: Path) -> str:
    """Return the message for the user about a run that was ended for a stall."""
    stack = "".join(f"\n  {_CODE_OF_RUN.sub('', frame)}" for frame in verdict.stack)
    where = f"\nits stack, innermost first:{stack}" if stack else ""
    return f"training failed on {verdict.host}: {verdict.text}{where}\nlogs: {log_dir}"


@dataclass(frozen=True, kw_only=True)
class _Nccl:
    """NCCL's counts of collectives in the first process group where ranks differ, else in the first where all wait.

    ``rows`` maps ranks to counts. ``differs``: some ranks have entered fewer collectives than others. ``pending``: all
    have entered the same number, and none has finished the last one. ``next``: the collective in which the ranks that
    are farthest wait.
    """

    rows: Mapping[int, Collectives]
    differs: bool = False
    pending: bool = False
    next: str = ""

    @classmethod
    def of_ranks(cls, looks: Sequence[RankLook]) -> _Nccl:
        groups: dict[str, dict[int, Collectives]] = {}
        for look in looks:
            for row in look.nccl:
                groups.setdefault(row.group, {})[look.beat.rank] = row
        records = [cls._of_group(rows) for rows in groups.values() if len(rows) > 1]
        return min(records, key=lambda one: (not one.differs, not one.pending), default=cls(rows={}))

    @classmethod
    def _of_group(cls, rows: Mapping[int, Collectives]) -> _Nccl:
        most = max(rows.values(), key=lambda row: (row.given, row.given - row.ended))
        differs = any(row.given < most.given for row in rows.values())
        pending = not differs and all(row.ended < row.given for row in rows.values())
        return cls(rows=rows, differs=differs, pending=pending, next=most.next and f"NCCL's {_numbered(most)}")

    def waits(self, look: RankLook) -> bool:
        """True if a rank waits for others: by NCCL's counts if they cover the rank, else by its report or stack."""
        row = self.rows.get(look.beat.rank)
        if row is None or not (self.differs or self.pending):
            return _is_in_collective(look)
        return self.pending or row.given > min(other.given for other in self.rows.values())


def _numbered(row: Collectives) -> str:
    return f"{row.next} (number {row.ended + 1})"


def _is_stopped(look: RankLook) -> bool:
    return look.state in ("T", "t")


def _is_in_collective(look: RankLook) -> bool:
    """True if a rank is in a collective by its report, or by its stack (a collective of the model or a script)."""
    if look.beat.phase == Phase.WAITING or any(_TORCH_DISTRIBUTED in frame for frame in look.stack[:3]):
        return True
    # a rank that computes its gradients has the same frames as one that waits for them in DDP, but keeps a core busy; a
    # training reports its waiting itself
    is_idle_script = look.beat.phase == Phase.RUNNING_A_SCRIPT and look.cpu < BUSY_CORES and look.state != "R"
    return is_idle_script and any(place in frame for place in _WAITS_IN_DDP for frame in look.stack[:2])


def _position(look: RankLook) -> tuple[int, int]:
    return look.beat.step, look.beat.collectives


def _own_line(look: RankLook) -> str:
    """Return the innermost line of a script's own code, which identifies the collective; '' for other programs."""
    return _at(look) if look.beat.phase == Phase.RUNNING_A_SCRIPT else ""


def _kind(look: RankLook) -> str:
    if look.state == "D":
        return "disk"
    if look.cpu >= BUSY_CORES or look.state == "R":  # state R: it may share a core
        return "spins"
    if any(frame.endswith(_WAITS_FOR_WORKER) for frame in look.stack):
        return "worker"
    return next(
        (kind for kind, names in _SLEEP_KINDS.items() if any(name in look.sleeps_in for name in names)), "sleeps"
    )


def _describe_hang(culprit: RankLook, kind: str, looks: Sequence[RankLook], *, waited_in: str = "") -> Verdict:
    beat, host = culprit.beat, culprit.host
    waits_for = culprit.sleeps_in or "nothing is known of what it waits for"
    why = {
        "stopped": f"process {beat.pid} is stopped (SIGSTOP, or a debugger holds it); it would go on with "
        f"'kill -CONT {beat.pid}' there",
        "disk": f"process {beat.pid} waits for a disk or a network file system that doesn't answer",
        "spins": f"it computes without end ({culprit.cpu:.1f} cores busy)",
        "lock": "it waits for a lock that nobody gives back",
        "locked file": "it waits for a file that another process has locked",
        "connection": "it waits for data from a connection, and none comes",
        "worker": "it waits for a worker process of its DataLoader, which sends nothing",
        "sleeps": f"it sleeps{' in the loading of data' if beat.phase == Phase.LOADING else ''} ({waits_for})",
    }[kind]
    stopped = [look for look in looks if _is_stopped(look) and (look.host, look.beat.pid) != (host, beat.pid)]
    others = [look for look in looks if look is not culprit and look not in stopped]
    inside = f" in {waited_in}" if waited_in else ""
    also = "".join(
        f"; rank {look.beat.rank} on {look.host} (process {look.beat.pid}) is stopped, too" for look in stopped
    )
    wait = f"{also}; {_in_words(others)} {_wait(others)} for it{inside}" if others else also
    text = f"rank {beat.rank} on {host} hangs in {_where(culprit)}: {why}{_at(culprit)}{wait}"
    return Verdict(rank=beat.rank, host=host, kind=kind, text=text, stack=culprit.stack)


def _describe_link(looks: Sequence[RankLook], hosts: Mapping[str, str], head: str) -> Verdict | None:
    """Describe the connection on which bytes wait to be sent, and blame the host that has most such connections.

    Ignore connections whose receiver has many unread bytes: its process is slow, not the connection.
    """
    connections = [
        (look, hosts.get(item.peer, item.peer), item)
        for look in looks
        for item in look.sockets
        if hosts.get(item.peer) != look.host
    ]
    unread = Counter[tuple[str, str]]()
    for look, peer, item in connections:
        unread[peer, look.host] += item.unread_bytes
    pairs = [
        (look, peer, item)
        for look, peer, item in connections
        if item.sent_again >= _RESENT_LIMIT
        or ((item.unsent_bytes or item.sent_again) and unread[look.host, peer] < _UNREAD_LIMIT_BYTES)
    ]
    if not pairs:
        return None
    ends = Counter(host for look, peer, _ in pairs for host in (look.host, peer))
    look, peer, item = max(pairs, key=lambda one: (ends[one[0].host], one[2].sent_again, one[2].unsent_bytes))
    if ends[peer] > ends[look.host]:
        host, rank = peer, next((one.beat.rank for one in looks if one.host == peer), None)
    else:
        host, rank = look.host, look.beat.rank
    dropped = item.sent_again >= _RESENT_LIMIT
    why = f"sent {item.sent_again} times in vain" if dropped else "not sent yet, or not received"
    text = (
        f"{head}, and the connection from {look.host} to {peer} {'is down' if dropped else 'is too slow'}: "
        f"{item.unsent_bytes:,} bytes are {why}"
    )
    return Verdict(rank=rank, host=host, kind="dropped link" if dropped else "slow link", text=text)


def _describe_skipped(culprit: RankLook, looks: Sequence[RankLook], nccl: _Nccl) -> Verdict:
    """Describe a rank that skipped a collective, by NCCL's counts, and waits for something else."""
    others = [look for look in looks if nccl.waits(look)]
    text = (
        f"went on without a collective that {_in_words(others)} {_wait(others)} in, {nccl.next}: it is in "
        f"{_where(culprit)}{_at(culprit)}; every rank must join every collective"
    )
    return _skipped(culprit, text)


def _skipped(culprit: RankLook, what: str) -> Verdict:
    text = f"rank {culprit.beat.rank} on {culprit.host} {what}"
    return Verdict(rank=culprit.beat.rank, host=culprit.host, kind="skipped", text=text, stack=culprit.stack)


def _in_another(culprit: RankLook, where: str, others: Sequence[RankLook], where_others: str) -> Verdict:
    what = f"is in another collective than {_in_words(others)}: {where}, {_in_words(others)}{where_others}"
    return _skipped(culprit, f"{what}; every rank must join the same collectives in the same order")


def _describe_pending(looks: Sequence[RankLook], nccl: _Nccl) -> Verdict:
    """Describe ranks that have entered equally many NCCL collectives: the same ones, or different ones."""
    first = looks[0]
    kinds = Counter(row.next for row in nccl.rows.values())
    if len(kinds) == 1:
        text = (
            f"{_in_words(looks)} wait in the same collective in {_where(first)}, {nccl.next}: a GPU hangs in what it "
            "computes before, or what NCCL sends doesn't arrive (cluster.env.NCCL_DEBUG=INFO shows its connections)"
        )
        return Verdict(rank=None, host=first.host, kind="collective", text=text, stack=first.stack)
    rarest = min(kinds, key=lambda name: (kinds[name], -max(n for n, row in nccl.rows.items() if row.next == name)))
    known = [look for look in looks if look.beat.rank in nccl.rows]
    apart = [look for look in known if nccl.rows[look.beat.rank].next == rarest]
    others = [look for look in known if look not in apart]
    culprit, own, theirs = apart[0], nccl.rows[apart[0].beat.rank], nccl.rows[others[0].beat.rank]
    where = f"in NCCL's {_numbered(own)}{_shortened(own.at)}"
    return _in_another(culprit, where, others, f" in {_numbered(theirs)}{_shortened(theirs.at)}")


def _describe_mismatch(looks: Sequence[RankLook]) -> Verdict:
    """Describe ranks that are all in collectives: blame the one in another than most (of two, the one further on)."""
    groups: dict[tuple[int, int, int, str], list[RankLook]] = {}
    for look in looks:
        groups.setdefault((*_position(look), look.beat.phase, _own_line(look)), []).append(look)
    first = looks[0]
    if len(groups) == 1:
        text = (
            f"{_in_words(looks)} wait in the same collective in {_where(first)}, and no connection between them has "
            f"anything to send{_at(first)}"
        )
        return Verdict(rank=None, host=first.host, kind="collective", text=text, stack=first.stack)
    place = min(groups, key=lambda key: (len(groups[key]), [-part for part in key[:3]], key[3]))
    culprit, others = groups[place][0], [look for look in looks if look not in groups[place]]
    other = max(others, key=_position)
    if culprit.beat.phase == Phase.RUNNING_A_SCRIPT:  # its position isn't known, so neither is the rank that went on
        return _in_another(culprit, f"it is{_at(culprit)}", others, _at(other))
    went_on = (_position(culprit), culprit.beat.phase) > (_position(other), other.beat.phase)
    what = "went on without a collective" if went_on else "is in a collective"
    text = (
        f"{what} that {_in_words(others)} {_wait(others) + ' in' if went_on else 'never came to'}: it is in "
        f"{_where(culprit)}{_at(culprit)}, {_in_words(others)} in {_where(other)}{_at(other)}; every rank must join "
        "every collective"
    )
    return _skipped(culprit, text)


def _where(look: RankLook) -> str:
    """Return ``step 58 (loading data)``; ``the script`` for a script, whose steps aren't known."""
    if look.beat.phase == Phase.RUNNING_A_SCRIPT:
        return "the script"
    step = f"step {look.beat.step}" if look.beat.step else "what comes before its first step"
    return f"{step} ({look.beat.doing})"


def _at(look: RankLook) -> str:
    """Return `` at models/net.py:12 in forward``: the innermost line of neither Python's nor torch's own code."""
    own = [frame for frame in look.stack if "/torch/" not in frame and "/lib/python" not in frame]
    return _shortened(next(iter(own or look.stack), ""))


def _shortened(frame: str) -> str:
    path, _, rest = frame.rpartition(":")
    inside = _CODE_OF_RUN.sub("", path)
    shown = inside if inside != path else "/".join(PurePath(path).parts[-2:])
    return f" at {shown}:{rest}" if frame else ""


def _wait(looks: Sequence[RankLook]) -> str:
    return "waits" if len(looks) == 1 else "wait"


def _in_words(looks: Sequence[RankLook]) -> str:
    """Return ``rank 0 on node0``, or ``15 ranks``."""
    if len(looks) > 4:
        return counted(len(looks), "rank")
    names = [f"rank {look.beat.rank} on {look.host}" for look in looks]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "nobody"
