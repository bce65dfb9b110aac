"""`doit mcp` as an agent's client speaks to it: each tool answers with the JSON of its verb."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration import preloaded
from tests.integration.commands import ALONE, ROOT, Project
from tests.waiting import HANG_S

TINY = ("experiment=quickstart", "trainer.max_steps=2", "tracking=none", *ALONE)


def answers(calls: list[tuple[str, dict[str, Any]]], log: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The names of the tools with their descriptions, and what each call is answered, by the SDK's own client."""
    mcp = pytest.importorskip("mcp", reason="an extra that is not in requirements.lock: pip install 'mcp>=2'")
    from mcp.client.stdio import stdio_client

    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "pipeline.cli.main", "mcp"], env={**os.environ}, cwd=ROOT
    )

    async def ask() -> tuple[dict[str, str], list[dict[str, Any]]]:
        with log.open("w") as errors:
            async with mcp.Client(stdio_client(server, errlog=errors)) as client:
                listed = await client.list_tools()
                said = [(await client.call_tool(name, arguments)).structured_content for name, arguments in calls]
                return {tool.name: tool.description for tool in listed.tools}, said

    return asyncio.run(asyncio.wait_for(ask(), HANG_S))


@pytest.mark.ci
def test_an_agent_trains_lists_compares_and_asks_what_failed(project: Project, tmp_path: Path) -> None:
    where = project.overrides[:2]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("train", {"overrides": [*TINY, *where]}),
        ("train", {"overrides": [*TINY, *where, "optimizer.lr=1e38"], "budget": "5m"}),
        ("runs", {"overrides": where, "state": "FINISHED"}),
        ("compare", {"what": where}),
        ("show", {"key": "0000"}),
        ("triage", {"key": "last; ls"}),
        ("train", {"overrides": ["clean", "yes=1"]}),
        ("train", {"overrides": [*TINY, *where, "optimizer.lrr=1"]}),
        ("train", {"overrides": [*TINY, *where], "budget": "5"}),
    ]
    tools, said = answers(calls, tmp_path / "log")
    assert [*tools] == ["runs", "show", "compare", "train", "triage"]
    assert all("Args:" in text for text in tools.values())
    trained, failed, listed, compared, unknown, odd, other, slip, budget = said
    assert (trained["schema"], trained["ok"], trained["error"]) == ("paceline.train/1", True, None)
    assert "test/accuracy" in trained["data"]["metrics"]
    assert (failed["ok"], failed["error"]["code"]) == (False, "training.code")
    assert [row["key"] for row in listed["data"]] == [trained["data"]["key"]]
    assert compared["schema"] == "paceline.compare/1"
    assert (unknown["schema"], unknown["error"]["code"]) == ("paceline.status/1", "usage")
    assert odd["error"]["message"] == "'last; ls' is no run's key; runs lists them"
    assert other["error"]["message"] == "'clean' is no override; overrides look like optimizer.lr=0.1"
    assert "did you mean optimizer.lr=1?" in slip["error"]["message"]
    assert budget["error"]["hint"] == "--budget 90s, 30m, 1h30m or 2d"
    assert "finished: test accuracy" in (tmp_path / "log").read_text()  # a person can read along


def test_without_the_package_the_command_says_how_to_install_it() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError:
        done = preloaded.doit("mcp")
        assert (done.returncode, done.stdout) == (
            3,
            "ERROR: doit mcp needs the package mcp (2.0 or newer)\n  try: pip install 'mcp>=2'\n",
        )
