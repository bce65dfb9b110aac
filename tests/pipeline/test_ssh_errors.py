"""What a host's own answer becomes: ssh is not blamed for what the agent has told through it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster.agent import reasons, staging
from pipeline.cluster.launchers.pssh import remote_command
from pipeline.cluster.launchers.ssh_errors import explain
from pipeline.core.cluster import Host


def test_a_folder_that_the_login_cannot_write_is_no_matter_of_keys() -> None:
    failure = reasons.reason(PermissionError(13, "Permission denied", "/root/x"))
    why, hint = explain(Host(name="gpu1"), failure, None)
    assert why == failure
    assert why.startswith("can't write there ([Errno 13] Permission denied: '/root/x')")
    assert hint == "cluster.workdir=/path/to/a/folder/there"


def test_a_workdir_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as stream, pytest.raises(SystemExit) as ended:
        staging.unpack(stream, str(tmp_path / "file" / "runs" / "node0"))
    why, hint = explain(Host(name="gpu1"), reasons.reason(ended.value), None)
    assert why == f"can't make the folder {tmp_path}/file/runs there (Not a directory); set cluster.workdir"
    assert hint == "cluster.workdir=/path/to/a/folder/there"


def test_a_login_without_a_useful_path_is_told_with_the_path_and_where_it_is_set() -> None:
    """What the remote command itself says there."""
    words = shlex.split(remote_command(None))[1:]
    program = [*words[:-2], "/opt/none/python", words[-1]]
    done = subprocess.run(program, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    why, hint = explain(Host(name="gpu1"), f"{done.stderr}Exited with error code 127", None)
    controllers = "cluster.python=null (this controller's interpreter, else python3)"
    assert why == f"no such interpreter there: {controllers}; its login has PATH=/nowhere"
    assert hint == (
        "cluster.python=/path/to/python, or install Python there (ssh gpu1 ls /usr/bin/python3), or mend PATH in the "
        "start file of its login shell (~/.bashrc, ~/.profile, ~/.zshenv)"
    )
