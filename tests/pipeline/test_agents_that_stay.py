"""Agents that stay for further requests, with a program in pssh's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.launchers import live_agents
from pipeline.cluster.launchers.live_agents import Group, LiveAgents, may_run_programs

# begins its one ssh late, which takes a moment to answer, and stays
PSSH = """
mkdir "$0/out" "$0/err"; sleep 1.6; exec 3<"$0/requests-0/0"; head -c 7 <&3 >"$0/read"; sleep 0.3
printf '@paceline f00d {"told": 1}\\n' >"$0/out/one"; read -r more <&3
"""


@pytest.mark.slow
def test_agents_that_begin_late_stay_as_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_agents, "_SILENT_S", 1.5)  # five times what the agent takes: this computer may be busy
    folder = tmp_path / "pssh"
    folder.mkdir()
    assert may_run_programs(folder)
    agents = LiveAgents([Group(argv=["sh", "-c", PSSH, str(folder)], names={"one": "one"})], "ssh", folder)
    with (tmp_path / "request").open("w+b") as request:
        request.write(b"request")
        request.flush()
        answered = agents.ask(request, 0, "f00d", 60.0, last=False)
    assert answered["one"].stdout == b'@paceline f00d {"told": 1}\n'
    assert agents.usable(), "they were told that nothing more will come, before they could answer"
    agents.close()
