"""Environments that an agent makes of a lock file: one maker at a time."""

from __future__ import annotations

import fcntl
import re
import sys
import threading
from pathlib import Path

import pytest

from pipeline.cluster.agent.host.environments import environment_path, make_environment
from pipeline.cluster.agent.requests import MakeEnvironmentRequest
from tests.waiting import wait_until


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/locks tells who waits")
def test_who_waits_for_another_maker_leaves_the_lock_file_to_its_installer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = MakeEnvironmentRequest(str(tmp_path), lock_sha256="0" * 64, lock="from the second")
    place = Path(environment_path(request))
    place.parent.mkdir()
    lock = place.with_name(f"{place.name}.txt")
    lock.write_text("from the first", encoding="ascii")
    with Path(f"{place}.lock").open("w", encoding="ascii") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        inode = Path(mutex.name).stat().st_ino
        second = threading.Thread(target=make_environment, args=(request,), daemon=True)
        second.start()
        wait_until(lambda: re.search(rf"-> FLOCK .*:{inode} ", Path("/proc/locks").read_text(encoding="ascii")))
        assert lock.read_text(encoding="ascii") == "from the first"
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").touch()
    second.join()
    assert f'"python": "{place}/bin/python"' in capsys.readouterr().out
    assert lock.read_text(encoding="ascii") == "from the first"
