"""A PostgreSQL server of Debian's package, as long as a test wants it.

Its folder lies in /tmp: its user may not enter the folders of the tests.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

USER, PASSWORD = "team", 'pw-$x@/:"é'


class Postgres(NamedTuple):
    """``uri`` holds no password."""

    uri: str
    port: int


@contextmanager
def running() -> Iterator[Postgres]:
    """Listens on loopback and asks for a password; skips the test where there is no PostgreSQL, or no root."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs or os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs Debian's package postgresql, and root to start it as another user")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="paceline-pg-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "password").write_text(PASSWORD + "\n", encoding="utf-8")
        shutil.chown(folder, "postgres", "postgres")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -F"
        data = str(folder / "data")
        _run(programs[-1], "initdb", "-D", data, "-A", "scram-sha-256", f"--pwfile={folder}/password", "-U", USER, "-N")
        _run(programs[-1], "pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield Postgres(f"postgresql://{USER}@127.0.0.1:{port}/postgres", port)
        finally:
            _run(programs[-1], "pg_ctl", "-D", data, "-m", "immediate", "stop")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _run(programs: Path, name: str, *arguments: str) -> None:
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    command = [*as_user, str(programs / name), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", env={**os.environ, "LC_ALL": "C.UTF-8"})
