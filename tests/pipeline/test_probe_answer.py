"""What a host answers to its probe: a field of a wrong type is one error with the host and what it answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.cluster.agent.host.probe import facts
from pipeline.cluster.agent.requests import ProbeRequest
from pipeline.cluster.launchers.transport.answers import host_facts
from pipeline.core.errors import HostError
from tests.agent_records import HERE
from tests.pipeline.test_preflight_checks import PORT
from trainers.contract.host_facts import Container, HeldClaim, HostFacts, LeftFolder, NvidiaSmi
from trainers.contract.records import as_json


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    """Those of the agent on this computer, with a row of everything that it may find."""
    request = ProbeRequest(workdir=str(tmp_path_factory.mktemp("workdir")), access=HERE, modules=("torch",))
    return facts(request)._replace(
        host="node0",
        left_folders=(LeftFolder("k-1-a/node0", idle_s=1.5, holds_outputs=True, bytes=10),),
        claims=(HeldClaim(("gpu:0",), "a-", "", "run", 1.5, "alice", "alice's run"),),
        infiniband=(PORT,),
        nvidia_smi=NvidiaSmi(devices="0, x"),
        container=Container("podman", "torch", "sha256:0", gpus=False),
    )


@pytest.fixture(scope="module")
def answer(found: HostFacts) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(json.dumps(as_json(found)))
    return sent


def test_the_answer_of_an_agent_is_taken_as_it_is(found: HostFacts, answer: dict[str, Any]) -> None:
    assert host_facts("node0", answer) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cpus": "eight"}, "cpus = 'eight' in place of int"),
        ({"home": None}, "home = None in place of str"),
        ({"gpus": True}, "gpus = True in place of int"),
        ({"packages": "x" * 999}, f"packages = '{'x' * 59} in place of object"),
        ({"limits": {"open_files": {"soft": "x", "hard": None}}}, "limits.open_files.soft = 'x' in place of int"),
        ({"infiniband": [{"device": 5}]}, "infiniband.0.device = 5 in place of str"),
    ],
)
def test_the_error_shows_the_field_what_it_was_and_what_is_wanted(
    answer: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(HostError) as caught:
        host_facts("node0", {**answer, **change})
    assert caught.value.what == f"probe: node0 can't take part: its answer has {said}"
    assert caught.value.hosts == ("node0",)


def test_a_field_without_a_default_may_not_be_missing(answer: dict[str, Any]) -> None:
    lacking = {name: value for name, value in answer.items() if name != "home"}
    with pytest.raises(HostError, match="its answer has home = None in place of str"):
        host_facts("node0", lacking)
