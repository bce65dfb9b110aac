"""The folder that hosts are said to share: what the first has written, each other one must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.cluster.launchers.transport.answers import Answer, Output
from pipeline.cluster.preflight import State, shared_folder_checks
from tests.pipeline.test_preflight_checks import ONE


class Folders:
    """Hosts that answer as the agents of two folders would."""

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        self.answer, self.acts = answer, list[str]()

    def ask(self, request: dict[str, Any], *, hosts: Any = None, timeout_s: Any = None) -> dict[str, Answer]:
        self.acts.append(request["act"])
        return {host.label: self.answer(request["act"], host.label) for host in hosts}


@pytest.mark.parametrize(
    ("look", "state", "seen"),
    [
        ({"there": True, "folder": True}, State.OK, "/nfs is the same as on node0"),
        ({"there": False, "folder": True}, State.FAILED, "/nfs there isn't the folder of that name on node0"),
        ({"there": False, "folder": False}, State.FAILED, "/nfs isn't there"),
        ({"error": "Permission denied"}, State.FAILED, "/nfs: Permission denied"),
        (None, State.FAILED, "/nfs: it broke"),
    ],
)
def test_each_other_host_must_see_what_the_first_has_written(look: Any, state: State, seen: str) -> None:
    broke = Output(note="it broke")
    hosts = Folders(lambda act, _: Answer(value=look if act == "look" else {"there": True}, output=broke))
    first, other = shared_folder_checks(ONE, hosts.ask, "/nfs")
    assert (first.host, first.state) == ("node0", State.OK)
    assert (other.host, other.state, other.seen) == ("node1", state, seen)
    assert hosts.acts == ["write", "look", "remove"]


def test_a_folder_that_the_first_host_cannot_write_is_named_and_nobody_else_is_asked() -> None:
    hosts = Folders(lambda *_: Answer(value={"error": "No such file or directory (/nfs/x)"}))
    (check,) = shared_folder_checks(ONE, hosts.ask, "/nfs")
    assert check.seen == "can't write into /nfs: No such file or directory (/nfs/x)"
    assert (check.state, hosts.acts) == (State.FAILED, ["write"])
