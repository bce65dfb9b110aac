"""Detect from heartbeats that the ranks of an attempt don't move any more, or mostly wait for their network. Pure.

``running.py`` passes all heartbeats in, calls the checks each second, and sends the examinations that they request.
``stalls.py`` judges the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.cluster.agent.requests import ExamineOrder
from pipeline.cluster.attempt.stalls import SlowSteps, is_hang, judge, slow_connection
from pipeline.cluster.events import Verdict
from trainers.contract.beats import NodeBeat, NodeExamination, Phase, RankBeat, RankExamination

ANSWERS_S = 8.0
"""How long the nodes have to examine their ranks; then a stall is judged by the answers that have come."""

_PAUSE_FACTOR = 10  # a stall lasts longer than so many times the second longest pause so far (evaluations, checkpoints)
_PATIENT_FACTOR = 4  # times stall_s: the limit before the first step and while files are written
_MAX_TICK_S = 2.0  # longest time between two checks that counts; if it was longer, this process was stopped itself
_SHORTEST_PAUSE_S = 2.0  # beats come each second, so a shorter time is no pause
_WINDOW_S = 20.0  # over which the share of waiting in the steps' time is measured
_MAX_WAITING_SHARE = 0.8  # from this share on the network is examined
_MAX_TRIES = 5  # examinations of the network, because at a single moment no bytes may wait to be sent
_BEFORE_TIMEOUT = 0.9  # of collective_timeout_s, at which ranks would give up without naming the culprit


@dataclass(kw_only=True)
class _Examination:
    """An examination under way, and the answers so far by host."""

    asked_at: float  # monotonic
    slow_steps: SlowSteps | None  # the slow steps to be explained; None: a stall
    answers: dict[str, NodeExamination] = field(default_factory=dict)

    @property
    def ranks(self) -> list[RankExamination]:
        return [rank for answer in self.answers.values() for rank in answer.ranks]


@dataclass(kw_only=True)
class _Window:
    """The time over which the ranks' waiting is measured, and their beats at its beginning, by rank."""

    began_at: float
    first_beats: Mapping[int, RankBeat]
    longest_pause_s: float = 0.0


class StallWatch:
    """Watches an attempt's ranks. Call ``check_network`` and ``check`` each second. ``hosts``: address → label."""

    def __init__(self, *, hosts: Mapping[str, str], stall_s: float, collective_timeout_s: float) -> None:
        self._hosts, self._stall_s, self._collective_timeout_s = hosts, stall_s, collective_timeout_s
        self.nodes: dict[str, NodeBeat] = {}  # newest beat of each node that hasn't ended, by host
        self.newest_beats: dict[int, tuple[str, RankBeat]] = {}  # rank → its host and beat; ended ranks stay
        self._idle_s = 0.0  # since a rank has moved
        self._moved = False  # since the last check
        self._checked_at = 0.0
        self._longest_pauses_s = [0.0, 0.0]  # the second longest counts, as one may be an accident
        self._examination: _Examination | None = None
        self._window: _Window | None = None
        self._network_tries = 0

    def take_beat(self, node: NodeBeat) -> None:
        before, has_begun = self.nodes.get(node.host), self._has_begun()
        self.nodes[node.host] = node
        self.newest_beats.update({beat.rank: (node.host, beat) for beat in node.ranks})
        if before is not None and _progress(before) == _progress(node):
            return
        # a rank moved, so the pause is over, and an examination of a stall has become pointless
        if self._window is not None:
            self._window.longest_pause_s = max(self._window.longest_pause_s, self._idle_s)
        if has_begun and self._idle_s > _SHORTEST_PAUSE_S:
            self._longest_pauses_s = sorted([*self._longest_pauses_s, self._idle_s])[-2:]
        self._idle_s, self._moved = 0.0, True
        if self._examines_stall:
            self._examination = None

    def take_examination(self, answer: NodeExamination) -> None:
        if self._examination is not None:
            self._examination.answers[answer.host] = answer

    def remove(self, host: str) -> None:
        self.nodes.pop(host, None)

    def check(self, now: float) -> ExamineOrder | Verdict | None:
        """Return the order for an examination once no rank moves any more, and later the verdict on its answers."""
        passed_s = min(now - self._checked_at, _MAX_TICK_S) if self._checked_at else 0.0
        self._checked_at = now
        self._idle_s += 0.0 if self._moved else passed_s
        self._moved = False
        beats = self._beats()
        if not beats or self._idle_s < self._limit_s(beats):
            return None
        examination = self._examination
        if examination is None or examination.slow_steps is not None:
            self._examination, self._window = _Examination(asked_at=now, slow_steps=None), None
            return ExamineOrder()
        ranks = examination.ranks
        if not ranks or (len(examination.answers) < len(self.nodes) and now - examination.asked_at <= ANSWERS_S):
            return None
        if _is_script(beats) and not is_hang(ranks):  # it may wait for something else: examine again after stall_s
            self._idle_s, self._examination = 0.0, None
            return None
        return judge(ranks, self._hosts, self._idle_s)

    def check_network(self, now: float) -> ExamineOrder | Verdict | None:
        """Return the order for an examination if moving ranks mostly wait, and later the verdict if bytes wait then."""
        if self._network_tries >= _MAX_TRIES or self._examines_stall or not self._has_begun():
            return None
        if self._examination is None:
            slow_steps = self._slow_steps(now)
            if slow_steps is None:
                return None
            self._examination = _Examination(asked_at=now, slow_steps=slow_steps)
            return ExamineOrder(with_stacks=False)
        examination = self._examination
        if examination.slow_steps is None or len(examination.answers) < len(self.nodes):  # answers are to come
            return None
        verdict = slow_connection(examination.ranks, self._hosts, examination.slow_steps)
        self._examination = self._window = None
        self._network_tries = _MAX_TRIES if verdict else self._network_tries + 1
        return verdict

    @property
    def _examines_stall(self) -> bool:
        return self._examination is not None and self._examination.slow_steps is None

    def _slow_steps(self, now: float) -> SlowSteps | None:
        """Return the steps of the last window if ranks mostly waited in them, and None else."""
        beats = {beat.rank: beat for beat in self._beats()}
        window = self._window
        if window is None or window.first_beats.keys() != beats.keys():
            self._window = _Window(began_at=now, first_beats=beats)
            return None
        passed_s, pause_s = now - window.began_at, max(window.longest_pause_s, self._idle_s)
        if passed_s < _WINDOW_S:
            return None
        self._window = _Window(began_at=now, first_beats=beats)
        steps = min(beat.step - window.first_beats[rank].step for rank, beat in beats.items())
        if steps < 1 or len(self.nodes) == 1:
            return None
        # a pause as long as many steps was something else, such as an evaluation: this window says nothing of steps
        if pause_s > max(_SHORTEST_PAUSE_S, _PAUSE_FACTOR * (passed_s - pause_s) / steps):
            return None
        # what even the busiest rank doesn't spend on its own work is spent waiting by all
        busiest_s = max(beat.own_s - window.first_beats[rank].own_s for rank, beat in beats.items())
        waiting_share = 1 - busiest_s / passed_s
        return SlowSteps(waiting_share, passed_s / steps) if waiting_share >= _MAX_WAITING_SHARE else None

    def _limit_s(self, beats: list[RankBeat]) -> float:
        """Return how long no rank may move until the ranks are examined."""
        if _is_script(beats):
            return self._stall_s
        waits = any(beat.phase == Phase.WAITING for beat in beats)
        if not self._has_begun() and not waits:  # imports, compilation and measurements may take any time
            return math.inf
        is_patient = not self._has_begun() or any(beat.phase in (Phase.SAVING, Phase.ENDING) for beat in beats)
        limit_s = self._stall_s * (_PATIENT_FACTOR if is_patient else 1)
        limit_s = max(limit_s, _PAUSE_FACTOR * self._longest_pauses_s[0])
        if waits:
            limit_s = min(limit_s, max(self._stall_s, _BEFORE_TIMEOUT * self._collective_timeout_s))
        return limit_s

    def _has_begun(self) -> bool:
        """Return whether all ranks are in their first step or further on."""
        beats = self._beats()
        return bool(beats) and all(beat.step for beat in beats)

    def _beats(self) -> list[RankBeat]:
        return [beat for node in self.nodes.values() for beat in node.ranks]


def _is_script(beats: list[RankBeat]) -> bool:
    return any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in beats)


def _progress(node: NodeBeat) -> list[tuple[int, int]]:
    return [(beat.pid, beat.moves) for beat in node.ranks]
