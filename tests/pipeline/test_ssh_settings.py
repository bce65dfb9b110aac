"""Whether somebody's ssh configuration shares connections: asked of the real ssh, which connects to nobody for that."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.cluster.launchers.ssh_settings import shares_already

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")

Shares = Callable[[str], tuple[bool, int]]


@pytest.fixture
def shares(tmp_path: Path) -> Shares:
    """The answer for hosts a, b and c with that configuration, and how often ssh was asked."""

    def found(config: str) -> tuple[bool, int]:
        (tmp_path / "config").write_text(config.replace("INCLUDED", str(tmp_path / "included")))
        asked: list[str] = []

        def told(label: str, more: Sequence[str]) -> tuple[str, str]:
            asked.append(label)
            argv = ["ssh", "-F", str(tmp_path / "config"), *more, "-G", "--", label]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            return done.stdout, done.stderr

        return shares_already(["a", "b", "c"], told, at_once=1), len(asked)

    return found


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
    found, asked = shares(config)
    assert found is own
    assert asked > 1


def test_all_hosts_are_asked_where_ssh_does_not_say_what_it_reads() -> None:
    """Another program of that name, or one without any configuration."""
    assert shares_already(
        ["a", "b"], lambda label, _: (f"controlpath {'/x' if label == 'b' else 'none'}\n", ""), at_once=1
    )
    assert not shares_already(["a", "b"], lambda *_: ("controlpath none\n", ""), at_once=1)
