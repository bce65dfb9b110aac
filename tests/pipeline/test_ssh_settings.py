"""Whether somebody's ssh configuration shares connections: asked of the real ssh, which connects to nobody for that."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.cluster.launchers.pssh import PsshConfig, PsshTransport
from pipeline.core.processes import process
from pipeline.core.specs import Cluster, Host

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("Host *\n  User me\n", False),
        ("Host *\n  ControlMaster auto\n  ControlPath ~/%C\n", True),
        ("Host c\n  controlpath=~/%C\n", True),
        ("Host *\n  ControlPath none\n", False),
        ("Host elsewhere\n  ControlPath ~/%C\n", False),
        ("Host c\n  Include INCLUDED\n", True),
    ],
)
def test_connections_that_are_shared_already_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, own: bool
) -> None:
    monkeypatch.setattr(process, "find", lambda *names: names[0])  # pssh isn't needed for that
    (tmp_path / "included").write_text("ControlPath ~/%C\n")
    (tmp_path / "config").write_text(config.replace("INCLUDED", str(tmp_path / "included")))
    hosts = tuple(Host(name=name) for name in "abc")
    cluster = Cluster(launcher="pssh", hosts=hosts, ssh_config=str(tmp_path / "config"), settings=PsshConfig())
    with closing(PsshTransport(cluster)) as transport:
        assert ("ControlPath" not in " ".join(transport.stream_argv(hosts[0]))) is own
