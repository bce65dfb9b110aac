"""A secret on the hosts of a run and in a reproduction: it reaches the ranks and stands nowhere else."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from pipeline.lab import Lab, LabHost
from tests.integration.commands import Project
from tests.integration.test_provenance import A, copied
from tests.integration.test_secrets import command_lines
from tests.lab_fixture import on

PRINTS = """
import os, sys
print("the token is", os.environ.get("API_TOKEN"), flush=True)
print("and on stderr", os.environ.get("API_TOKEN"), file=sys.stderr, flush=True)
"""


def holding(secret: bytes, *folders: Path) -> Iterator[Path]:
    """The files below the folders in which it stands; what vanishes meanwhile is left out."""
    paths = (Path(place, name) for folder in folders for place, _, names in os.walk(folder) for name in names)
    for path in paths:
        try:
            if path.is_file() and not path.is_symlink() and secret in path.read_bytes():
                yield path
        except OSError:
            continue


def all_of(host: LabHost) -> list[Path]:
    """What a host has as its own: home, /tmp, /var/tmp, and the memory disks that only it sees."""
    return [host.folder, *(Path(f"/proc/{host.init_pid}/root/{name}") for name in ("run", "dev/shm", "var/log"))]


def is_own_output(path: Path) -> bool:
    """What ranks and torchrun write themselves, in the agent's folder, which is its user's alone."""
    agents = [parent for parent in path.parents if parent.name == "agent"]
    try:
        return bool(agents) and agents[0].stat().st_mode & 0o077 == 0 and (agents[0] / "log") != path
    except FileNotFoundError:  # the run has ended, and its folder on the host with it
        return True


@pytest.mark.lab
@pytest.mark.long
def test_a_secret_stands_on_no_host_of_a_run(project: Project, lab: Lab) -> None:
    token = f"t{secrets.token_hex(12)}"
    for host in lab.hosts:
        done = on(lab, host.name, f"mkdir -p ~/own && cat >~/own/sitecustomize.py <<'END'\n{PRINTS}\nEND")
        assert done.returncode == 0, done.stderr
    hosts = ["cluster=two_node", "cluster.hosts=[{name: node1}]", f"cluster.ssh_config='{lab.ssh_config}'"]
    project.words = [*hosts, "tracking=none"]
    child = project.start(
        "train",
        "experiment=quickstart",
        "trainer.epochs=5",
        f"++cluster.env.API_TOKEN={token}",
        f"++cluster.env.PYTHONPATH='{Path.home()}/own'",
    )
    typed, raw = "".join(f"{word}\0" for word in cast("list[str]", child.args)).encode(), set()
    places = [folder for host in lab.hosts for folder in all_of(host)]
    while child.poll() is None:
        assert [line for line in command_lines(but=typed) if token.encode() in line] == []
        found = {path for path in holding(token.encode(), *places) if path.exists()}
        raw |= {path for path in found if is_own_output(path)}
        assert found - raw == set()
        time.sleep(0.2)
    output = child.communicate()[0]
    for host in lab.hosts:
        on(lab, host.name, "rm -r ~/own")
    assert child.returncode == 0, output
    assert {path.name for path in raw} >= {"stdout.log", "stderr.log"}  # the search does find it where it may stand
    assert "the token is ***" in output
    assert token not in output
    assert list(holding(token.encode(), *places, project.folder)) == []


@pytest.mark.long
def test_a_run_with_a_secret_is_made_again_with_the_secret_told_anew(
    tmp_path: Path, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, another = (f"t{secrets.token_hex(12)}" for _ in range(2))
    monkeypatch.delenv("API_TOKEN", raising=False)
    checkout = copied(tmp_path / "project", fetched)
    said = checkout.doit("train", *A, f"++cluster.env.API_TOKEN={token}")
    ((key, _),) = checkout.runs().items()
    refused = checkout.doit("reproduce", f"run={key}", code=1)
    assert "got secrets, which no file keeps; to be given again: ++cluster.env.API_TOKEN=***" in refused
    assert f"try: doit reproduce {key} ++cluster.env.API_TOKEN='${{oc.env:API_TOKEN}}', with the value" in refused
    monkeypatch.setenv("API_TOKEN", another)
    child = checkout.start("reproduce", f"run={key}")
    while child.poll() is None:
        shown = [line for line in command_lines(but=b"") if token.encode() in line or another.encode() in line]
        assert shown == []
        time.sleep(0.05)
    again = child.communicate()[0]
    assert child.returncode == 0, again
    assert f"REPRODUCED {key}: " in again
    assert "its key is the same" in again
    assert not [text for text in (token, another) if text in said + refused + again]
    assert not [*holding(token.encode(), tmp_path), *holding(another.encode(), tmp_path)]
