"""What ended a trial decides whether another try may help."""

from __future__ import annotations

import errno

import pytest

from pipeline.cluster.attempt.failures import cause
from pipeline.cluster.events import NodeExit, NodeLost, RankError
from pipeline.core.errors import DataError, HostError, PacelineError, TrainingError
from pipeline.sweep.trial import cause_of


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
