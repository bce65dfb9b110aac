"""What a run on one computer listens on: the loopback alone, so that nobody on the network can speak to it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.agent.running.processes import find_processes
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S

LISTENS = "0A"

GLOO = """
import paceline, torch, torch.distributed as dist, pathlib, time
dist.init_process_group("gloo")
weight = torch.ones(3)
dist.all_reduce(weight)
dist.all_reduce(weight, group=dist.new_group())
paceline.log(1, weight=float(weight[0]))
while not pathlib.Path("GO").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


def processes_of(key: str) -> Iterator[psutil.Process]:
    """torchrun, ranks and whatever these have started, with what has started them."""
    for pid in find_processes(f"{key}-"):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            yield from (process, *process.parents()[:-1])


def listened_on(processes: Iterable[psutil.Process]) -> list[str]:
    """address:port of every TCP socket that one of them listens on, as the kernel's table has it."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(link.readlink()))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in inodes:
                found.append(readable(local))
    return found


def readable(place: str) -> str:
    digits, _, port = place.partition(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, struct.pack(f'={len(words)}I', *words))}:{int(port, 16)}"


def test_what_listens_on_everything_is_seen() -> None:
    with socket.create_server(("", 0)) as anywhere, socket.create_server(("::1", 0), family=socket.AF_INET6) as here:
        wanted = {f"0.0.0.0:{anywhere.getsockname()[1]}", f"::1:{here.getsockname()[1]}"}
        assert wanted <= set(listened_on([psutil.Process()]))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("what", ["trainer", pytest.param("script", marks=[pytest.mark.long, pytest.mark.ci])])
def test_a_run_of_two_ranks_on_this_computer_listens_on_the_loopback_alone(
    project: Project, tmp_path: Path, what: str
) -> None:
    go = tmp_path / "GO"
    (tmp_path / "train.py").write_text(GLOO.replace("GO", str(go)))
    script = (f"program.script={tmp_path}/train.py", "cluster.nproc_per_node=2")
    words = ("experiment=quickstart", "trainer.epochs=30") if what == "trainer" else script
    project.whole = True
    child = project.start("train", *words, "tracking=none")
    try:
        wait_for_step(project, 1, child)
        controller = psutil.Process(child.pid)
        run = [*processes_of(project.only_run().name), controller, *controller.children(recursive=True)]
        found = listened_on(set(run))
    finally:
        go.touch()
        if what == "trainer":
            child.terminate()
        said, _ = child.communicate(timeout=HANG_S)
    assert len(found) >= 3, said  # the store, and gloo of each rank
    assert [place for place in found if not place.startswith(("127.0.0.1:", "::1:"))] == []
    assert child.returncode == 0 or what == "trainer", said
