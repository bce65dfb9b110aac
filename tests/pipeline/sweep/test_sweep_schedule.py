"""Slots take the next trial when they are free; what may pass is tried again, what can't is not."""

from __future__ import annotations

import errno
import heapq
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.cluster.attempt.failures import cause
from pipeline.cluster.events import NodeExit, NodeLost, RankError
from pipeline.core.errors import DataError, HostError, PacelineError, TrainingError
from pipeline.core.specs import State
from pipeline.sweep.expand import Grid
from pipeline.sweep.trial import Outcome, Schedule, Settled, Start, Trial, cause_of

GOOD, BAD = Outcome(state=State.FINISHED), Outcome(state=State.FAILED, detail="broken")


def trials(count: int) -> list[Trial]:
    return cast("list[Trial]", [SimpleNamespace(number=number, key=f"key{number}") for number in range(count)])


def schedule(count: int, *, slots: int = 2, retries: int = 1, settled: Any = lambda _: None) -> Schedule:
    return Schedule(Grid(trials(count)), slots=slots, retries=retries, settled=settled)


def drained(plan: Schedule) -> list[Start]:
    return list(iter(plan.next, None))


def idle_share(durations: Sequence[float], slots: int) -> float:
    """Simulated: the share of slot seconds until the last end in which a slot had nothing to do."""
    plan, clock, running = schedule(len(durations), slots=slots), 0.0, []
    while not plan.done:
        for start in drained(plan):
            heapq.heappush(running, (clock + durations[start.trial.number], start.trial.number, start))
        clock, _, ended = heapq.heappop(running)
        plan.end_trial(ended, GOOD)
        drained_again = plan.next()
        if drained_again is not None:
            number = drained_again.trial.number
            heapq.heappush(running, (clock + durations[number], number, drained_again))
    return 1 - sum(durations) / (clock * slots)


def test_one_slow_and_three_fast_trials_leave_two_slots_idle_for_less_than_a_tenth() -> None:
    assert idle_share([6.0, 2.0, 2.0, 2.0], slots=2) < 0.1
    assert idle_share([3.0, 1.0, 1.1, 0.9], slots=2) < 0.1


def test_a_slot_that_is_free_before_its_trial_is_complete_takes_the_next_one() -> None:
    plan = schedule(3, slots=1)
    (first,) = drained(plan)
    plan.free_slot(first.slot)
    (second,) = drained(plan)
    assert (second.trial.number, second.slot) == (1, first.slot)
    plan.end_trial(first, GOOD)
    assert plan.next() is None  # the slot is the second one's now
    plan.end_trial(second, GOOD)
    assert [start.trial.number for start in drained(plan)] == [2]


def test_trouble_with_a_host_or_memory_is_tried_again_once_and_broken_code_is_not() -> None:
    for reason, tries in (("memory", 2), ("host", 2), ("code", 1)):
        plan, count = schedule(1, slots=1), 0
        while (start := plan.next()) is not None:
            count += 1
            plan.end_trial(start, replace(BAD, cause=reason))
        assert (count, plan.done, plan.ended[0].outcome) == (tries, True, replace(BAD, cause=reason)), reason


def test_a_slot_whose_host_failed_is_given_up_while_there_is_another() -> None:
    plan = schedule(4, slots=2)
    first, second = drained(plan)
    assert plan.end_trial(first, replace(BAD, cause="host"))
    assert plan.next() is None
    plan.end_trial(second, GOOD)
    again = plan.next()
    assert again is not None
    assert (again.trial.number, again.slot, again.tried) == (0, second.slot, 1)
    assert plan.next() is None


def test_what_is_settled_takes_no_slot() -> None:
    plan = schedule(
        1000, settled=lambda trial: None if trial.number == 999 else Settled(trial=trial, outcome=GOOD, was_known=True)
    )
    assert [start.trial.number for start in drained(plan)] == [999]
    assert len(plan.ended) == 999


def test_after_a_halt_nothing_starts() -> None:
    plan = schedule(3, slots=1)
    (start,) = drained(plan)
    plan.halt()
    plan.end_trial(start, GOOD)
    assert plan.next() is None
    assert plan.done


def test_a_trial_whose_very_run_is_under_way_waits_for_what_becomes_of_it() -> None:
    drawn = cast("list[Trial]", [SimpleNamespace(number=number, key=key) for number, key in enumerate("aab")])
    pruned: list[Trial] = []
    outcome = Outcome(state=State.PRUNED)

    def settled(trial: Trial) -> Settled | None:
        return (
            Settled(trial=trial, outcome=outcome, was_known=True)
            if trial.key in {item.key for item in pruned}
            else None
        )

    plan = Schedule(Grid(drawn), slots=2, retries=1, settled=settled)
    (first,) = drained(plan)
    plan.free_slot(first.slot)
    assert plan.next() is None
    pruned.append(first.trial)
    plan.end_trial(first, outcome)
    (third,) = drained(plan)
    assert [(item.trial.number, item.was_known) for item in plan.ended] == [(0, False), (1, True)]
    plan.end_trial(third, GOOD)
    assert plan.next() is None
    assert plan.done


def test_only_so_many_trials_are_started_whether_or_not_they_are_tried_again_and_the_finished_ones_count_for_none() -> (
    None
):
    known = Settled(trial=trials(1)[0], outcome=GOOD, was_known=True)
    plan = Schedule(
        Grid(trials(5)), slots=1, retries=1, settled=lambda trial: known if trial.number == 0 else None, max_trials=2
    )
    begun: list[tuple[int, int]] = []
    while (start := plan.next()) is not None:
        begun.append((start.trial.number, start.tried))
        plan.end_trial(start, replace(BAD, cause="memory"))
    assert (begun, plan.done) == ([(1, 0), (1, 1), (2, 0), (2, 1)], True)


def ended(message: str, host: str = "a") -> NodeExit:
    return NodeExit(host=host, code=1, errors=(RankError(rank=0, unix_time=1.0, message=message, traceback=""),))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([ended("TrainerError: the loss is nan at step 3")], "code"),
        ([ended("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")], "memory"),
        ([ended("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory")], "memory"),
        ([NodeExit(host="a", code=1, reason="rank 1 was killed by SIGKILL")], "memory"),
        ([NodeExit(host="a", code=-9, reason="the warm parent of the ranks (trainers/ranks.py) ended")], "memory"),
        ([NodeLost(host="b", reason="no longer answers"), ended("Connection closed by peer")], "host"),
        ([ended("TrainerError: /r/final.pt could not be written (No space left on device): needs 2 bytes")], "disk"),
        ([NodeLost(host="b", reason="no longer answers"), ended("ValueError: broken")], "code"),
        ([NodeLost(host="b", reason="no longer answers"), ended("ConfigError: seed=-1 must be at least 0")], "config"),
    ],
)
def test_the_ends_of_an_attempt_tell_its_cause(ends: list[NodeExit | NodeLost], expected: str) -> None:
    assert cause({end.host: end for end in ends}) == expected


def test_every_error_has_a_cause() -> None:
    full = PacelineError("run can't go on")
    report = PacelineError("the evaluation report of 1234 failed: [Errno 28] No space left on device: '/r/x.png'")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert [
        cause_of(error) for error in (HostError("x"), TrainingError("x", cause="memory"), DataError("x"), full, report)
    ] == ["host", "memory", "code", "disk", "disk"]
