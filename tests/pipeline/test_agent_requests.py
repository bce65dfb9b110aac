"""Requests to the agents as records: what is sent is what is read, and each has a function that answers it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path
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
from pipeline.cluster.launchers.transport import payload
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP, TAKEN_FOR_COMMANDS, message, opening
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


STOP_NOTHING = StopRequest(attempt_prefix="none", registry="/nowhere")
AGENT = Path(agent.__file__).parent
MODULES = sorted(AGENT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(AGENT).as_posix())
def test_a_module_of_the_agent_needs_python_3_9_its_siblings_and_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    names: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module or "")
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(path.relative_to(AGENT).parts), "of a package that isn't sent"
    assert names <= sys.stdlib_module_names | {"__future__", "trainers"}
    assert {name for name in imported if name.startswith("trainers")} <= payload.module_texts().keys()


def test_a_python_that_is_too_old_says_so_with_its_path() -> None:
    ast.parse(BOOTSTRAP, feature_version=(3, 4))
    old = f"import sys; sys.version_info = (2, 7, 18); sys.version = '2.7.18 (default)'; {BOOTSTRAP}"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{sys.executable}: Python 2.7.18 is too old for the node agent\n"


def test_a_shell_that_takes_what_is_sent_for_commands_ends_at_once_and_runs_none(tmp_path: Path) -> None:
    """As after `exec zsh` in a start file of the login."""
    done = subprocess.run(["sh"], input=message(STOP_NOTHING, "f00d"), capture_output=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (97, b"")
    assert done.stdout.decode() == f"{TAKEN_FOR_COMMANDS}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_of_the_agent_shows_file_and_line_and_the_host_keeps_no_file(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    unknown = zlib.compress(encode(STOP_NOTHING, "f00d").replace(b"StopRequest", b"NoRequest"))
    done = subprocess.run(
        [sys.executable, "-c", BOOTSTRAP],
        input=opening() + b"%d\n%s" % (len(unknown), unknown),
        capture_output=True,
        cwd=home,
        env={**os.environ, "HOME": str(home), "TMPDIR": str(home)},
        check=False,
    )
    said = done.stderr.decode().splitlines()
    source = (Path(agent.__file__).parent / "requests.py").read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(source, 1) if "is no request" in line)
    shown = said.index(f'  File "pipeline/cluster/agent/requests.py", line {at}, in decode')
    assert said[shown + 1].strip() == source[at - 1].strip()
    assert said[-1] == "ValueError: NoRequest is no request"
    assert done.returncode == 1
    assert list(home.iterdir()) == []
