"""The node agent's part of doit mesh, in a home of its own: its record, and what is wrong with ~/.ssh there."""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.host import mesh
from pipeline.cluster.agent.reasons import reason
from pipeline.cluster.launchers.transport.host_errors import agent_error

OURS = "ssh-ed25519 AAAAours root@node1 (doit mesh)"
OFFER = {"check": False}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ~/.ssh of a home that has none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ssh"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    monkeypatch.setattr(mesh, "say", fields.update)
    return fields


def test_undo_takes_lines_with_the_mark_and_no_others(ssh: Path, said: dict[str, Any]) -> None:
    ssh.mkdir()
    others = f"ssh-ed25519 AAAAown me\n# {OURS}\n"
    (ssh / "authorized_keys").write_text(f"{others}no-pty {OURS}\n{OURS.replace('ours', 'more')}\r\n")
    (ssh / "known_hosts").write_text("a ssh-ed25519 AAAAb\r\nb ssh-ed25519 AAAAb (doit mesh)\r\n")
    mesh.mesh_undo({})
    assert said == {"keys": 2, "hosts": 1, "key_removed": False}
    assert (ssh / "authorized_keys").read_text() == others
    assert (ssh / "known_hosts").read_bytes() == b"a ssh-ed25519 AAAAb\r\n"
    assert [file.name for file in sorted(ssh.iterdir())] == ["authorized_keys", "known_hosts"]


def test_undo_takes_the_key_pair_that_was_made_and_leaves_one_that_was_put_in_its_place(
    ssh: Path, said: dict[str, Any]
) -> None:
    ssh.mkdir()
    assert mesh.make_key()
    marked = (ssh / "id_ed25519.pub").read_text()
    mesh.mesh_undo({})
    assert said == {"keys": 0, "hosts": 0, "key_removed": True}
    assert list(ssh.iterdir()) == []
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "id_ed25519")], check=True)
    (ssh / "id_ed25519.pub").write_text(marked)
    mesh.mesh_undo({})
    assert said["key_removed"] is False
    assert (ssh / "id_ed25519").exists()


def test_there_is_nothing_to_undo_where_ssh_has_no_folder(ssh: Path, said: dict[str, Any]) -> None:
    ssh.write_text("")
    mesh.mesh_undo({})
    assert said == {"keys": 0, "hosts": 0, "key_removed": False}


@pytest.mark.parametrize(
    ("kind", "seen"), [("file", "is no folder"), ("link", "is a link to /nowhere, where no folder")]
)
def test_what_stands_where_the_folder_is_to_be_is_named(ssh: Path, kind: str, seen: str) -> None:
    if kind == "file":
        ssh.write_text("")
    else:
        ssh.symlink_to("/nowhere")
    with pytest.raises(SystemExit) as hit:
        mesh.mesh_offer(OFFER)
    what, command = agent_error(reason(hit.value), "ssh node1")
    assert f"~/.ssh there {seen}" in what
    assert command == "ssh node1 -t 'mv ~/.ssh ~/.ssh.old'"


@pytest.mark.parametrize("name", ["authorized_keys", "known_hosts"])
def test_a_folder_where_lines_are_to_be_added_is_named_before_anything_is(ssh: Path, name: str) -> None:
    (ssh / name).mkdir(parents=True)
    with pytest.raises(SystemExit) as hit:
        mesh.mesh_offer(OFFER)
    what, command = agent_error(reason(hit.value), "ssh node1")
    assert f"~/.ssh/{name} there is a folder" in what
    assert command == f"ssh node1 -t 'mv ~/.ssh/{name} ~/.ssh/{name}.old'"
    assert [path.name for path in ssh.iterdir()] == [name]


def test_a_key_that_ssh_would_not_use_has_its_own_words(ssh: Path) -> None:
    ssh.mkdir()
    key = ssh / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    key.chmod(0o644)
    with pytest.raises(SystemExit, match=r"open to others \(mode 644\).*chmod 600 ~/\.ssh/id_ed25519$"):
        mesh.public_key()
    key.chmod(0o600)
    assert mesh.public_key().startswith("ssh-ed25519 ")
    key.write_text("garbage\n")
    with pytest.raises(SystemExit, match=r"no private key that ssh can read \(.*mv ~/\.ssh/id_ed25519 ~/"):
        mesh.public_key()


def test_a_file_in_the_place_of_a_folder_is_named_with_the_command_that_shows_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError) as hit:
        (tmp_path / "file").mkdir()
    what, command = agent_error(reason(hit.value), "ssh node1")
    assert f"no folder is in the way of {tmp_path}/file there" in what
    assert command == f"ssh node1 -t 'ls -ld {tmp_path}/file'"


@pytest.mark.parametrize(
    ("port", "reached", "expected"),
    [
        (22, "both", ("", "")),
        (22, "plain", ("refused", "")),
        (22, "exact", ("`ssh 10.0.0.2`: refused", "")),
        (22, "none", ("refused", "")),
        (2222, "exact", ("", "`ssh 10.0.0.2`: refused")),
        (2222, "plain", ("refused", "")),
        (2222, "both", ("", "")),
    ],
)
def test_the_plain_name_has_to_do_where_port_and_user_are_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch, port: int, reached: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(mesh, "name_for_login", lambda target: target["address"])
    monkeypatch.setattr(
        mesh,
        "login_error",
        lambda *words: "" if reached in ("both", "exact" if "-p" in words else "plain") else "refused",
    )
    target = {"label": "b", "name": "b", "user": getpass.getuser(), "address": "10.0.0.2", "port": port}
    assert mesh.login_errors(target) == expected
