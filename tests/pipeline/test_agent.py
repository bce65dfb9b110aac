"""The node agent by itself: what it sees, and which processes it ends."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cluster.agent import wire
from pipeline.cluster.agent.files import folders, leftovers
from pipeline.cluster.agent.host import hardware
from pipeline.cluster.agent.requests import Lines, ProbeRequest, PutPackRequest, Request, StopRequest
from pipeline.cluster.agent.running import follow, output, processes
from pipeline.cluster.launchers.transport.answers import agent_error, parse_answer
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP, message
from pipeline.core import redact
from tests.agent_records import node_start, start_request
from tests.contract.stub import make
from tests.small_disk import mounted
from trainers.contract import run_folder, variables


def ask(request: Request, cwd: Path, **env: str) -> dict[str, object]:
    """As a launcher asks: by BOOTSTRAP, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", BOOTSTRAP],
        input=message(request, "f00d"),
        capture_output=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    return parse_answer(done.stdout, "f00d") or {"stderr": done.stderr.decode()}


def test_what_a_login_script_asks_and_prints_without_an_end_of_line_hides_no_answer(tmp_path: Path) -> None:
    login = 'printf "Your name? "; read name; printf "Welcome @paceline"; exec "$0" -c "$1"'
    done = subprocess.run(
        ["sh", "-c", login, sys.executable, BOOTSTRAP],
        input=message(StopRequest(attempt_prefix="none", registry=str(tmp_path)), "f00d"),
        capture_output=True,
        check=False,
    )
    assert parse_answer(done.stdout, "f00d") is not None, done


def test_probe_sees_address_interpreter_and_what_is_set(tmp_path: Path) -> None:
    request = ProbeRequest(
        workdir=str(tmp_path / "not" / "yet"),
        env_names=("NCCL_SOCKET_IFNAME", "NOT_SET"),
        env_families=("NCCL_*",),
        env_passed=("NCCL_SOCKET_IFNAME",),
    )
    own = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "Tree"}
    answer = ask(request, tmp_path, SSH_CONNECTION="10.0.0.9 5 127.0.0.1 2222", **own)
    assert (answer["address"], answer["interface"]) == ("127.0.0.1", "lo")
    assert answer["identity"] == f"{answer['hostname']} 127.0.0.1:2222 uid {os.getuid()}"
    assert answer["python"] == sys.executable
    assert answer["network_variables"] == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert answer["not_passed"] == {"NCCL_ALGO": "Tree"}
    ports = answer["free_ports"]
    assert isinstance(ports, list)
    assert len(set(ports)) == 4


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    assert "identity" in ask(ProbeRequest(workdir="~"), tmp_path)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,1,2", 3), ("GPU-ab, GPU-cd", 2)])
def test_gpus_are_those_that_cuda_may_see(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("shutil.which", lambda _: None)
    for devices, there in (("/dev/nvidia0", True), ("/dev/kfd", True), ("/dev/null", False)):
        monkeypatch.setattr("glob.glob", lambda pattern, device=devices: fnmatch.filter([device], pattern))
        assert hardware.count_gpus() == (count if there else 0)


def test_a_disk_that_is_full_while_the_run_is_unpacked_is_named(tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("large")
        member.size = 4 << 20
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    content.seek(0)
    with mounted(tmp_path / "small") as disk:
        with pytest.raises(OSError, match="No space left on device") as caught:
            folders.unpack(content, str(disk / "runs" / "run"))
        told = wire.reason(caught.value)
        assert f"'{disk}/runs/run', " in told
        assert "bytes are free there" in told
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_told_with_the_setting_that_mends_it(number: int) -> None:
    text = wire.reason(OSError(number, os.strerror(number), "/w/run"))
    assert text.startswith(f"can't write there ([Errno {number}] {os.strerror(number)}: '/w/run'); set cluster.workdir")


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ReadError: invalid header"):
        folders.unpack(io.BytesIO(b"no tar" * 999), str(tmp_path / "run" / "node0"))
    assert list(tmp_path.iterdir()) == []


def test_truncated_pack_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    stub = make(tmp_path, "")
    assert folders.holds_pack(str(stub.pack_dir), stub.digest)
    assert not folders.holds_pack(str(stub.pack_dir), "0" * 64)
    (stub.pack_dir / "images.bin").write_bytes(bytes(15))
    assert not folders.holds_pack(str(stub.pack_dir), stub.digest)


def test_a_pack_with_another_digest_than_its_manifest_names_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = make(tmp_path, "")
    manifest = json.loads((stub.pack_dir / "manifest.json").read_text())
    right = hashlib.sha256((stub.pack_dir / "images.bin").read_bytes()).hexdigest()
    workdir = tmp_path / "workdir"
    request = PutPackRequest(workdir=str(workdir), pack_digest=stub.digest)

    def put(sha256: str) -> None:
        (stub.pack_dir / "manifest.json").write_text(json.dumps({**manifest, "sha256": {"images.bin": sha256}}))
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            archive.add(stub.pack_dir, arcname=".")
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(tar.getvalue())))
        folders.put_pack(request)

    with pytest.raises(SystemExit, match="the data pack arrived damaged in"):
        put("0" * 64)
    assert not list(workdir.rglob("*.bin"))
    put(right)
    assert (workdir / "data" / stub.digest / "images.bin").is_file()


@pytest.mark.slow
def test_end_tree_takes_the_marked_and_their_sessions_and_nothing_else() -> None:
    mark = uuid.uuid4().hex
    # ignores TERM, and has a child that dropped the mark
    program = "trap '' TERM; env -i /bin/sleep 60 & echo up; wait; sleep 60"
    ours = subprocess.Popen(
        ["sh", "-c", program], env={**os.environ, variables.NODE: mark}, start_new_session=True, stdout=subprocess.PIPE
    )
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, variables.NODE: mark + "0"}, start_new_session=True)
    try:
        assert ours.stdout is not None
        ours.stdout.readline()
        while len(processes.find_processes(mark)) < 2:
            time.sleep(0.01)
        assert processes.end_tree(mark, 0.2)
        assert ours.wait() < 0
        assert processes.find_processes(mark) == set()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


ADOPTS = """
import os, subprocess, sys, time
from pipeline.cluster.agent.running.processes import Orphans, end_tree, find_processes, start_time
if sys.argv[1] == "adopts":
    Orphans.adopt()
shell = subprocess.Popen(["sh", "-c", sys.argv[2]], start_new_session=True, stdout=subprocess.PIPE, text=True)
child = int(shell.stdout.readline())
if "wait" not in sys.argv[2]:
    shell.wait()
print(child in find_processes(os.environ["PACELINE_NODE"] if sys.argv[1] == "marks" else "nobody's"))
if sys.argv[1] == "adopts":
    print(end_tree("nobody's", 0.2), start_time(child))
    Orphans.reap(shell.pid)
    print(os.path.exists(f"/proc/{child}"))
os.path.exists(f"/proc/{child}") and os.kill(child, 9)
"""


@pytest.mark.skipif(not processes.LINUX, reason="needs /proc and prctl")
@pytest.mark.parametrize(
    ("who", "then", "said"),
    [("adopts", "", "True\nTrue None\nFalse\n"), ("ignores", "", "False\n"), ("marks", "wait", "True\n")],
)
def test_a_child_without_the_mark_and_with_a_session_of_its_own_is_found_by_its_parents(
    who: str, then: str, said: str
) -> None:
    """``adopts``: its parent is gone, and it has become the agent's child; ``marks``: its parent carries the mark."""
    program = f"setsid env -i sleep 60 >/dev/null & echo $!; {then}"
    env = {**os.environ, variables.NODE: uuid.uuid4().hex} if who == "marks" else os.environ
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS, who, program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == said


def test_start_time_tells_a_recycled_pid_from_ours() -> None:
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid()) != processes.start_time(1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert processes.start_time(gone.pid) is None


def test_tail_gives_whole_lines_and_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = output.Tail(str(path))
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n10%\r50%\r100%\nlast \xff")
    assert tail.lines() == ["two", "100%"]
    assert tail.lines(last=True) == ["last \ufffd"]


def test_tail_shows_now_and_then_how_far_a_progress_bar_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    tail = output.Tail(str(path), output.Rules(redact.rules(["hunter2-hunter2"])), shows_bars=True)
    path.write_bytes(b"\r10%\r50% hunter2-hunter2\r70")
    assert tail.lines() == []  # half a minute is not over
    monkeypatch.setattr(output, "BAR_S", 0.0)
    assert tail.lines() == ["50% ***" + run_folder.UNFINISHED]
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b"%\r100%\n")
    assert tail.lines() == ["100%"]


def test_tail_cuts_what_is_too_long_for_one_line_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = output.Tail(str(path))
    long = "ä" * 400_000
    path.write_bytes(f"{long}\nshort\n".encode() + b"x" * 200_000)
    seen = tail.lines()
    while more := tail.lines():
        seen += more
    assert all(len(text.encode()) <= output.LONGEST_LINE_BYTES + len(output.CUT) for text in seen)
    assert "\ufffd" not in "".join(seen), "cut in the middle of a character"
    at = seen.index("short")
    assert "".join(text.removesuffix(output.CUT) for text in seen[:at]) == long
    assert [text.endswith(output.CUT) for text in seen[:at]] == [True] * (at - 1) + [False]
    rest = seen[at + 1 :] + tail.lines(last=True)
    assert "".join(text.removesuffix(output.CUT) for text in rest) == "x" * 200_000


@pytest.mark.parametrize("secret", ["hunter2-hunter2", "https://ann:pw-of-ann@host", "s" * 9000])
@pytest.mark.parametrize("at", [-1, 1, 7])
def test_a_secret_in_two_writes_around_the_cut_of_a_long_line_is_hidden(tmp_path: Path, secret: str, at: int) -> None:
    """The first write ends inside of it, at any distance from where a piece ends."""
    values = [] if "://" in secret else [secret]
    path = tmp_path / "out"
    for before in (65_536 - 3, 65_536 + 8192, 65_536 + 8192 + 7, 80_000, 140_000):
        tail = output.Tail(str(path), output.Rules(redact.rules(values)))
        told = f"{'x ' * (before // 2)}{secret} and more"
        cut = before // 2 * 2 + at % len(secret)
        path.write_text(told[:cut])
        seen = tail.lines()
        with path.open("a") as file:
            file.write(told[cut:] + " y" * 50_000 + "\n")
        seen += tail.lines()
        whole = "".join(text.removesuffix(output.CUT) for text in seen)
        assert whole == redact.hide(told, values) + " y" * 50_000
        assert "***" in whole
        assert all(len(text) <= output.LONGEST_LINE_BYTES + len(output.CUT) for text in seen)


def test_a_secret_with_colours_in_the_middle_is_hidden_and_other_colours_stay() -> None:
    rules = output.Rules(redact.rules(["hunter2-hunter2"]))
    assert rules.hide("\x1b[1mkey\x1b[0m hunter2\x1b[31m-hunter2") == "key ***"
    assert rules.hide("\x1b[1mkey\x1b[0m hunter2-hunter2") == "\x1b[1mkey\x1b[0m ***"
    assert rules.hide("\x1b[1mkey\x1b[0m hunter2") == "\x1b[1mkey\x1b[0m hunter2"


def test_one_line_longer_than_a_message_does_not_silence_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Lines] = []
    monkeypatch.setattr(follow, "say", lambda *, lines: said.append(lines))
    path = tmp_path / "log"
    path.write_bytes(b"0 | first\n" + b"x" * 700_000 + b"\n0 | last\nnot yet whole")
    file = follow.GrowingFile("log", str(path), 0)
    while file.send_lines():
        pass
    assert [text for lines in said for text in lines.texts] == ["0 | first", "x" * 700_000, "0 | last"]
    assert [lines.start_bytes for lines in said[1:]] == [lines.end_bytes for lines in said[:-1]]


def test_a_limit_of_a_logins_files_is_told_with_the_command_that_shows_it() -> None:
    text = wire.reason(OSError(errno.EFBIG, "File too large", "/w/.try-1"))
    assert agent_error(text, "ssh node1") == (
        "a limit of its login keeps files small ([Errno 27] File too large: '/w/.try-1'): see its start files",
        "ssh node1 -t 'ulimit -f'",
    )


def test_clean_removes_only_folders_that_start_made(tmp_path: Path) -> None:
    ours, other = tmp_path / "a" / "node0", tmp_path / "b"
    for folder in (ours, other):
        folder.mkdir(parents=True)
    (ours / ".paceline").touch()
    folders.remove_ours([str(ours), str(other)])
    assert not ours.exists()
    assert other.exists()


def test_a_start_removes_what_no_process_owns_and_keeps_what_a_command_may_still_fetch(tmp_path: Path) -> None:
    runs, gone = tmp_path / "runs", subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    me = f"{socket.gethostname()}-{os.getpid()}-{processes.start_time(os.getpid())}"
    names = {
        "data/.staging-" + f"{socket.gethostname()}-{gone.pid}-77-abcdefgh": False,
        f"data/.staging-{me}-abcdefgh": True,
        "data/.staging-other-host-12-34-abcdefgh": True,  # of a host that shares the home
        "data/9cf2": True,
        "runs/k1-f00-1-aaa/node0": False,  # of an earlier attempt of this run
        "runs/k1-f00-2-bbb/node1": True,  # of this attempt, on a host that shares the home
        "runs/k2-f00-1-ccc/node0": True,  # of another run's attempt
    }
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    node = node_start(run_dir=str(runs / "k1-f00-2-bbb" / "node0"), data_dir=str(tmp_path / "data" / "9cf2"))
    request = start_request(node, registry=str(tmp_path / "agents"), attempt_prefix="k1-f00-", run_id="k1-f00-2-bbb")
    leftovers.remove_leftovers(request, node)
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert sorted(path.name for path in runs.iterdir()) == ["k1-f00-2-bbb", "k2-f00-1-ccc"]


@pytest.mark.parametrize(
    ("node", "cores", "able"), [("0", "0-1,4096", True), ("0", "4096-4099", False), ("-1", "0", False)]
)
def test_a_host_tells_whether_ranks_can_be_bound_beside_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cores: str, able: bool
) -> None:
    device, place = tmp_path / "bus/pci/devices/0000:01:00.0", tmp_path / "devices/system/node/node0"
    for folder in (device, place, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "numa_node").write_text(f"{node}\n")
    (place / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not hardware.can_bind_numa(str(tmp_path))  # no numactl
    (tmp_path / "bin/numactl").write_text("")
    (tmp_path / "bin/numactl").chmod(0o755)
    assert hardware.can_bind_numa(str(tmp_path)) == able
