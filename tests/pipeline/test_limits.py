"""Limits of a host that end a run: what is said names them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.agent.running.rank_ends import OutOfMemory, memory_events_file, oom_kills
from pipeline.cluster.agent.wire import reason, room_in
from pipeline.cluster.attempt.failures import failure_text
from pipeline.cluster.events import NodeExit, RankError
from pipeline.core.files import room_needed, write_hint
from tests.pipeline.test_launch_first_error import PLAN
from tests.small_disk import mounted
from trainers.core.files import could_not_write

ROOT = Path(__file__).resolve().parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which may give rights away")
AS_NOBODY = """
import os, resource, subprocess, sys, threading
from pipeline.cluster.agent.wire import reason
from pipeline.core.processes import unexpected
os.setgid(65534); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
for start in (threading.Thread(target=print).start, lambda: subprocess.run(["true"])):
    try:
        start()
    except Exception as error:
        print(unexpected.error_message(error)); print(reason(error))
"""
EATER = """
import os, signal, subprocess, sys
from pathlib import Path
from pipeline.cluster.agent.running.rank_ends import OutOfMemory
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
memory = OutOfMemory()
code = subprocess.run([sys.executable, "-c", "bytearray(512 << 20)"]).returncode
assert code == -signal.SIGKILL, code
print(memory.explained("ended with signal 9 (SIGKILL)"))
"""


@needs_root
def test_a_limit_of_processes_is_named_and_no_defect_of_paceline() -> None:
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], cwd=ROOT, capture_output=True, text=True, check=True)
    here = [line for line in done.stdout.splitlines() if line.startswith("no further process or thread can be started")]
    there = [line for line in done.stdout.splitlines() if "a limit of processes and threads of its login" in line]
    assert (len(here), len(there)) == (2, 2), done.stdout + done.stderr
    assert all("ulimit -u" in line for line in here + there)
    assert "defect" not in done.stdout


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB, of the kind that this machine has."""
    for kind, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        folder = Path("/sys/fs/cgroup", kind, f"paceline-test-{os.getpid()}")
        try:
            folder.mkdir()
            (folder / limit).write_text(str(64 << 20))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group of memory can be made here")


@needs_root
def test_what_the_kernel_ended_for_want_of_memory_is_told_so(small_group: Path) -> None:
    argv = [sys.executable, "-c", EATER, str(small_group)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    why = "ended with signal 9 (SIGKILL): the kernel ended it, as its control group had no memory left; fewer ranks"
    assert done.stdout.startswith(why)


def test_a_sigkill_is_laid_to_want_of_memory_only_where_a_counter_has_risen(tmp_path: Path) -> None:
    memory, killed = OutOfMemory(), "train.py was ended by SIGKILL"
    assert memory.explained("ended with exit code 1") == "ended with exit code 1"
    group, host = tmp_path / "group", tmp_path / "host"
    memory.group, memory.host, memory.before = str(group), str(host), (2, 5)
    assert memory.explained(killed) == killed, "nothing counts here"
    host.write_text("oom_kill 5\n")
    assert memory.explained(killed) == f"{killed}; the kernel has counted no out-of-memory kill on that host"
    host.write_text("oom_kill 6\n")
    assert memory.explained(killed).startswith(f"{killed}: the kernel ended a process there, as the host had no memory")
    group.write_text("oom_kill 2\n")
    assert memory.explained(killed) == f"{killed}; the kernel has counted no out-of-memory kill in its control group"
    group.write_text("oom_kill 3\n")
    assert memory.explained(killed).startswith(f"{killed}: the kernel ended it, as its control group had no memory")


def test_the_counters_of_both_versions_of_control_groups_are_read(tmp_path: Path) -> None:
    own, table = tmp_path / "cgroup", tmp_path / "table"
    own.write_text("0::/user.slice\n")
    assert memory_events_file(str(own), "/sys/fs/cgroup") == "/sys/fs/cgroup/user.slice/memory.events"
    own.write_text("5:cpu:/\n4:memory:/docker/a\n")
    assert memory_events_file(str(own), "/sys/fs/cgroup") == "/sys/fs/cgroup/memory/docker/a/memory.oom_control"
    table.write_text("oom 3\noom_kill 2\noom_kill_disable 1\n")
    assert (oom_kills(str(table)), oom_kills("")) == (2, None)


def test_a_disk_without_inodes_is_told_so_by_everybody(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "nr_inodes=8") as small:
        with pytest.raises(OSError, match="No space left on device") as caught:
            [(small / str(number)).touch() for number in range(9)]
        assert f"of {small}, which has no inodes left for new files (df -i), though " in room_needed(small)
        error = could_not_write(small / "a", caught.value, 5)
        for text in (reason(caught.value), room_in(str(small)), str(error)):
            assert "no inodes are left there for new files (df -i), though " in text


def test_ranks_that_their_agent_ended_are_told_of_with_its_reason() -> None:
    why, host = "the controller has not been heard of for 600 s", PLAN.nodes[0].host
    tail = "paceline: error: train.py was ended by SIGTERM"

    def said(*messages: str) -> str:
        errors = tuple(RankError(rank=0, unix_time=5.0, message=message, traceback="") for message in messages)
        end = NodeExit(host=host, code=1, reason=f"{why}\n{tail}", errors=errors)
        return failure_text(PLAN, {host: end}, Path("logs"))

    assert said().startswith(f"training failed on {host}: {why}\n")
    assert said("ended with signal 15 (SIGTERM)").startswith(f"training failed on {host}: {why}\n")
    assert said("ValueError: broken").startswith(f"training failed on {host}, rank 0: ValueError: broken")


def test_on_a_read_only_file_system_another_folder_alone_helps(tmp_path: Path) -> None:
    hint = write_hint(OSError(errno.EROFS, "Read-only file system"), tmp_path)
    assert hint.startswith("name another folder")
    assert "paths.runs=" in hint
    assert "make room" not in hint
