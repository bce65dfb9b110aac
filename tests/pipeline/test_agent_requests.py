"""Requests to the agents as records: what is sent is what is read, and each has a function that answers it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from pipeline.cluster import agent
from pipeline.cluster.agent.requests import (
    HANDLERS,
    Access,
    ClaimRequest,
    JobOrder,
    Request,
    RequestedContainer,
    StopRequest,
    WarmEnvironment,
    decode,
    encode,
)
from tests.agent_records import job_request, node_start, start_request
from trainers.contract.host_facts import Container
from trainers.contract.records import as_json, from_json

STOP = StopRequest(attempt_prefix="k-", registry="~/agents", access=Access(host_names=("a", "b")))
NODE = node_start(
    argv=("python", "x"),
    env={"A": "1"},
    container=Container("/usr/bin/podman", "torch", "sha256:0", gpus=True, mounts=("/data",)),
    claim=ClaimRequest(("gpu:0",), "k-", "g", "run k", refuses_others=True),
)
START = start_request(NODE, rendezvous=("10.0.0.1", 29500), masking_rules=(("hunter2", "***"),))
PROBE = job_request().probe._replace(
    container=RequestedContainer("torch", ("/data",), gpus=False), warm=WarmEnvironment({"B": "2"}, ranks_per_host=4)
)


@pytest.mark.parametrize("request_", [STOP, START, PROBE, job_request(probe=PROBE)], ids=lambda one: type(one).__name__)
def test_what_is_sent_is_what_is_read(request_: Request) -> None:
    assert decode(encode(request_, "f00d")) == (request_, "f00d")


def test_an_order_to_a_jobs_nodes_holds_the_whole_start() -> None:
    order = JobOrder(restart=2, start=START)
    assert from_json(JobOrder, json.loads(json.dumps(as_json(order)))) == order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registry": None}, "registry = None in place of str"),
        ({"refused": "k-1"}, "StopRequest has no field refused"),
        ({"access": {"is_local": "yes"}}, "access.is_local = 'yes' in place of bool"),
    ],
)
def test_a_wrong_or_unknown_field_is_named(change: dict[str, Any], message: str) -> None:
    value = json.loads(encode(STOP, "f00d"))
    value["fields"].update(change)
    with pytest.raises(ValueError, match=f"^{message}$"):
        decode(json.dumps(value).encode())


@pytest.mark.parametrize("handler", HANDLERS.values())
def test_each_request_has_a_function_that_answers_it(handler: str) -> None:
    module, _, function = handler.partition(":")
    assert callable(getattr(import_module(f"{agent.__name__}.{module}"), function))
