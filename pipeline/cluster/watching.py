"""Whether the ranks of an attempt still move, and the words for it where they don't."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeline.cluster.stalls import Verdict, is_held_up, judge, slow_network
from trainers.contract.beats import NodeBeat, NodeLook, Phase, RankBeat

LOOK_S = 8.0
"""How long the nodes have to answer a look; what those said that did is judged then."""

_LONGER = 10  # times what steps, evaluations and checkpoints have taken so far without a sign of life
_PATIENCE = 4  # times stall_s, where a rank waits before the first step, and while files are written
_TICK_S = 2.0  # of one look at the beats to the next: what is beyond, this process was stopped itself
_WINDOW_S = 20.0  # over which the part of the steps' time is taken that ranks wait for each other
_MOSTLY = 0.8  # from this part on the network is looked at
_TRIES = 5  # windows: that nothing waits to be sent at one moment says little
_BEFORE_TIMEOUT = 0.9  # of the time after which a rank gives a collective up, which names nobody


@dataclass(kw_only=True)
class Watch:
    """What is known of an attempt's ranks. ``hosts``: address → label of every node; times in seconds."""

    hosts: Mapping[str, str]
    stall_s: float
    collective_timeout_s: float
    nodes: dict[str, NodeBeat] = field(default_factory=dict)
    last: dict[int, tuple[str, RankBeat]] = field(default_factory=dict)  # by rank, also of those that have ended
    idle_s: float = 0.0
    _looks: dict[str, NodeLook] = field(default_factory=dict)
    _pauses_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # the two longest so far: one may be a mishap
    _looked: float = 0.0
    _moved: bool = False  # since then
    _asked: float | None = None
    _window: tuple[float, dict[int, RankBeat]] | None = None
    _slow: tuple[float, float] | None = None  # part of the time, seconds of a step; once the network is looked at
    _tries: int = 0

    def heard(self, told: NodeBeat) -> None:
        """A node has told where its ranks stand."""
        before, begun = self.nodes.get(told.host), self._begun()
        self.nodes[told.host] = told
        self.last.update({beat.rank: (told.host, beat) for beat in told.ranks})
        if before is None or _moves(before) != _moves(told):
            if begun and self.idle_s > _TICK_S:  # a beat comes each second: what is less is none
                self._pauses_s = sorted([*self._pauses_s, self.idle_s])[-2:]
            self.idle_s, self._moved, self._asked = 0.0, True, None

    def ended(self, host: str) -> None:
        """Nothing more will be heard of this node."""
        self.nodes.pop(host, None)

    def seen(self, look: NodeLook) -> None:
        """A node has answered a look."""
        self._looks[look.host] = look

    def check(self, now: float, ask: Callable[[], None]) -> Verdict | None:
        """Once a second or so: ``ask`` for a look where nothing moves any more, and judge the answers.

        ``now`` is of a clock that only goes forward.
        """
        passed_s = min(now - self._looked, _TICK_S) if self._looked else 0.0
        self._looked = now
        self.idle_s += 0.0 if self._moved else passed_s
        self._moved = False
        ranks = self._ranks()
        if not ranks or self.idle_s < self._limit_s(ranks):
            return None
        if self._asked is None:
            self._asked, self._looks = now, {}
            ask()
        looks = [rank for look in self._looks.values() for rank in look.ranks]
        if len(self._looks) == len(self.nodes) or (now - self._asked > LOOK_S and looks):
            if _of_script(ranks) and not is_held_up(looks):
                self.idle_s, self._asked = 0.0, None  # looked at again after another stall_s
                return None
            return judge(looks, self.hosts, self.idle_s) if looks else None
        return None

    def slow_network(self, now: float, ask: Callable[[], None]) -> Verdict | None:
        """Of a run that moves: the connection that it mostly waits for, once. ``ask`` is for a look without stacks."""
        if self._tries >= _TRIES or self._asked is not None or not self._begun():
            return None
        beats = {rank.rank: rank for rank in self._ranks()}
        if self._slow is not None and len(self._looks) == len(self.nodes):
            looks = [rank for look in self._looks.values() for rank in look.ranks]
            found = slow_network(looks, self.hosts, *self._slow)
            self._slow, self._window = None, None
            self._tries = _TRIES if found else self._tries + 1
            return found
        if self._window is None or self._window[1].keys() != beats.keys():
            self._window = now, beats
        since, before = self._window
        if self._slow is None and now - since >= _WINDOW_S:
            steps = min(beat.step - before[rank].step for rank, beat in beats.items())
            own_s = max(beat.own_s - before[rank].own_s for rank, beat in beats.items())
            self._window = now, beats
            if steps >= 1 and len(self.nodes) > 1 and 1 - own_s / (now - since) >= _MOSTLY:
                self._slow, self._looks = (1 - own_s / (now - since), (now - since) / steps), {}
                ask()
        return None

    def _limit_s(self, ranks: list[RankBeat]) -> float:
        if _of_script(ranks):
            return self.stall_s
        waits = any(rank.phase == Phase.WAITING for rank in ranks)
        if not self._begun() and not waits:  # imports, compilation, an entry that measures: nobody can say how long
            return math.inf
        patient = not self._begun() or any(rank.phase in (Phase.SAVING, Phase.ENDING) for rank in ranks)
        limit_s = max(self.stall_s * (_PATIENCE if patient else 1), _LONGER * self._pauses_s[0])
        if waits:
            limit_s = min(limit_s, max(self.stall_s, _BEFORE_TIMEOUT * self.collective_timeout_s))
        return limit_s

    def _begun(self) -> bool:
        """Whether every rank has begun its first step."""
        ranks = self._ranks()
        return bool(ranks) and all(rank.step for rank in ranks)

    def _ranks(self) -> list[RankBeat]:
        return [rank for node in self.nodes.values() for rank in node.ranks]


def _of_script(ranks: list[RankBeat]) -> bool:
    return any(rank.phase == Phase.RUNNING_A_SCRIPT for rank in ranks)


def _moves(told: NodeBeat) -> list[tuple[int, int]]:
    return [(rank.pid, rank.moves) for rank in told.ranks]
