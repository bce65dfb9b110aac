"""What a host answers to its probe: each field of a wrong type is one error with the host and what it answered."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.agent.host import probe as agent
from pipeline.cluster.earlier import leftovers, why_kept
from pipeline.cluster.launchers.transport import shapes
from pipeline.cluster.launchers.transport.answers import node_facts
from pipeline.cluster.preflight import occupation
from pipeline.core.errors import HostError
from pipeline.core.specs import NodeFacts
from pipeline.runs import provenance
from tests.pipeline.test_plan import cluster

WRONG: tuple[Any, ...] = (None, True, "x", -1, 1.5, 10**40, float("nan"), [], [None], {}, {"a": None}, [["x"]])
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


def test_a_mapping_of_names_of_its_own_may_hold_objects_with_any_fields() -> None:
    assert shapes.wrong({"a": {}, "b": {"c": 1}}, {"*": {}}) == ""
    assert shapes.wrong({"a": 1}, {"*": {}}) == "a = 1 in place of an object"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a value."""
    if path:
        yield path
    rows = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, item in rows:
        yield from places(item, (*path, name))


def taken(value: dict[str, Any]) -> tuple[list[NodeFacts], HostError | None]:
    try:
        return [node_facts("node0", value)], None
    except HostError as error:
        return [], error


def test_the_answer_of_an_agent_is_taken_as_it_is(answer: dict[str, Any]) -> None:
    facts = node_facts("node0", answer)
    assert (facts.host, facts.hostname, facts.extra) == ("node0", os.uname().nodename, answer["extra"])
    assert [left.bytes for left in leftovers([facts])] == [10]


@pytest.mark.ci
@pytest.mark.long
def test_a_wrong_type_in_any_place_is_an_error_that_names_host_and_field_or_harms_nothing(
    answer: dict[str, Any], tmp_path: Path
) -> None:
    refused = 0
    for path in places(answer):
        for wrong in WRONG:
            value = copy.deepcopy(answer)
            inner = value
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = wrong
            facts, error = taken(value)
            if error is not None:
                refused += 1
                assert error.hosts == ("node0",)
                assert error.what.startswith("probe: node0 can't take part: its answer has "), path
                assert str(path[-1] if isinstance(path[-1], str) else path[-2]) in error.what, path
                assert len(error.what) < 250
                continue
            hosts = cluster(2, device="cuda")  # what has passed is taken by all who read it
            preflight.judge(hosts, facts)
            occupation.occupied(hosts, facts, "")
            provenance.environment(facts[0])
            [why_kept(left, tmp_path) for left in leftovers(facts)]
    assert refused > 500


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (("cpus",), "eight", "cpus = 'eight' in place of a whole number from 0"),
        (("extra", "left", 0, "idle_s"), "long", "extra.left[0].idle_s = 'long' in place of a number"),
        (("extra", "left", 0), {"name": "a"}, "no extra.left[0].idle_s"),
        (("extra", "left"), "x" * 999, f"extra.left = '{'x' * 59}… in place of a list"),
        (("extra", "interfaces"), None, "extra.interfaces = None in place of an object"),
        (("extra", "free_ports"), [1], "extra.free_ports = [1] in place of a list of 4"),
    ],
)  # fmt: skip
def test_the_error_shows_the_field_what_it_was_and_what_is_wanted(
    answer: dict[str, Any], path: tuple[Any, ...], wrong: Any, said: str
) -> None:
    inner = value = copy.deepcopy(answer)
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = wrong
    with pytest.raises(HostError) as caught:
        node_facts("node0", value)
    assert caught.value.what == f"probe: node0 can't take part: its answer has {said}"
