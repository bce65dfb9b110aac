"""What a host answers to its probe: a field of a wrong type is one error with the host and what it answered."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from pipeline.cluster.agent.host import probe as agent
from pipeline.cluster.earlier import leftovers
from pipeline.cluster.launchers.transport.answers import node_facts
from pipeline.core.errors import HostError

LEFT = {"name": "k-1-a/node0", "idle_s": 1.5, "holds_outputs": True, "bytes": 10}
CLAIM = {
    "attempts": "a-",
    "resources": ["gpu:0"],
    "words": "alice's run",
    "group": "",
    "user": "alice",
    "what": "run",
    "since": 1.5,
}
PORT = {
    **dict.fromkeys(("device", "state", "phys_state", "rate", "link_layer", "gid", "netdev"), "x"),
    "port": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """That of the agent on this computer, with a row of everything that it may tell."""
    told: dict[str, Any] = {}
    request = {"workdir": str(tmp_path_factory.mktemp("workdir")), "local": True, "modules": ["torch"]}
    agent.probe(request, lambda **fields: told.update(fields))
    whole: dict[str, Any] = json.loads(json.dumps(told))
    whole["extra"]["left"] = [LEFT]
    whole["extra"]["system"].update(claims=[CLAIM], infiniband=[PORT], gpus={"list": "0, x"})
    return whole


def test_the_answer_of_an_agent_is_taken_as_it_is(answer: dict[str, Any]) -> None:
    facts = node_facts("node0", answer)
    assert (facts.host, facts.hostname, facts.extra) == ("node0", os.uname().nodename, answer["extra"])
    assert [left.bytes for left in leftovers([facts])] == [10]


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("cpus", "eight", "cpus = 'eight' in place of int"),
        ("home", None, "home = None in place of str"),
        ("extra", "x" * 999, f"extra = '{'x' * 59} in place of Mapping[str, Any]"),
    ],
)
def test_the_error_shows_the_field_what_it_was_and_what_is_wanted(
    answer: dict[str, Any], name: str, wrong: Any, said: str
) -> None:
    with pytest.raises(HostError) as caught:
        node_facts("node0", {**answer, name: wrong})
    assert caught.value.what == f"probe: node0 can't take part: its answer has {said}"
    assert caught.value.hosts == ("node0",)
