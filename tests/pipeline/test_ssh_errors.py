"""What a host's own answer becomes: ssh is not blamed for what the agent has told through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.agent import reasons, staging
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
