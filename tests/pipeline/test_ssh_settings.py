"""Whether somebody's ssh configuration shares connections: asked of the real ssh, which connects to nobody for that."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster.launchers.pssh import shares_already
from pipeline.core.specs import Host

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")

Shares = Callable[[str], tuple[bool, int]]


@pytest.fixture
def shares(tmp_path: Path) -> Shares:
    """Whether hosts a, b and c share with that configuration, and how often ssh ran."""

    def shared(config: str) -> tuple[bool, int]:
        (tmp_path / "config").write_text(config.replace("INCLUDED", str(tmp_path / "included")))
        calls: list[str] = []

        def settings_of(host: Host, *options: str) -> tuple[str, str]:
            calls.append(host.name)
            argv = ["ssh", "-F", str(tmp_path / "config"), *options, "-G", "--", host.name]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            return done.stdout, done.stderr

        return shares_already([Host(name=name) for name in "abc"], settings_of), len(calls)

    return shared


def test_one_host_is_asked_where_no_file_mentions_it(shares: Shares) -> None:
    assert shares("Host *\n  User me\n") == (False, 1)


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("Host *\n  ControlMaster auto\n  ControlPath ~/%C\n", True),
        ("Host c\n  controlpath=~/%C\n", True),
        ("Host *\n  ControlPath none\n", False),
        ("Host elsewhere\n  ControlPath ~/%C\n", False),
        ("Host c\n  Include INCLUDED\n", True),
    ],
)
def test_all_hosts_are_asked_where_a_file_mentions_it(shares: Shares, tmp_path: Path, config: str, own: bool) -> None:
    (tmp_path / "included").write_text("ControlPath ~/%C\n")
    shared, calls = shares(config)
    assert shared is own
    assert calls > 1


def test_all_hosts_are_asked_where_ssh_does_not_say_what_it_reads() -> None:
    """Another program of that name, or one without any configuration."""
    hosts = [Host(name="a"), Host(name="b")]
    assert shares_already(hosts, lambda host, *_: (f"controlpath {'/x' if host.name == 'b' else 'none'}\n", ""))
    assert not shares_already(hosts, lambda *_: ("controlpath none\n", ""))
