"""Claims on a host: in order of their tickets, gone with their process, whatever lies beside them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster.agent import claims, processors, stops
from pipeline.cluster.launchers import claims as wishes
from pipeline.cluster.launchers.connection import Connection
from pipeline.cluster.launchers.payload import agent_argv
from pipeline.cluster.occupancy import _Queue, in_common_order
from pipeline.cluster.preflight import State, occupation
from pipeline.cluster.running import Watchers
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host, NodeFacts
from tests.pipeline.test_planning import planned
from tests.pipeline.test_preflight_checks import told
from tests.pipeline.test_preflight_gpus import A100
from tests.waiting import promised_s, wait_until

NOW = time.time()


def wish(run: str, *resources: str, group: str = "", alone: bool = True) -> dict[str, object]:
    named = list(resources or ("gpu:0",))
    return {"resources": named, "attempts": f"{run}-", "group": group or run, "what": f"run {run}", "alone": alone}


def ahead(claim: claims.Claim, folder: Path) -> list[str]:
    return [row["what"] for row in claim.ahead(str(folder))]


def test_tickets_are_served_in_their_order_for_the_same_devices(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    first, other, second, third = (
        claims.stake(wish(run, device), str(folder))
        for run, device in [("a", "gpu:0"), ("b", "gpu:1"), ("c", "gpu:0"), ("d", "gpu:0")]
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert (ahead(first, folder), ahead(other, folder)) == ([], [])
    assert (ahead(second, folder), ahead(third, folder)) == (["run a"], ["run a", "run c"])
    first.release()
    assert (ahead(second, folder), ahead(third, folder)) == ([], ["run c"])


def test_the_run_that_waited_takes_its_place_along_and_one_controller_arranges_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    holding = claims.stake(wish("a"), str(folder))
    waiting = claims.stake(wish("b"), str(folder))
    started = claims.stake(wish("a"), str(folder))
    holding.release()
    assert (started.ticket, ahead(waiting, folder)) == (1, ["run a"])
    trials = [claims.stake(wish(run, "gpu:7", group="sweep"), str(folder)) for run in ("c", "d")]
    assert [ahead(trial, folder) for trial in trials] == [[], []]


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    program = (
        "import sys, time; from pipeline.cluster.agent import claims; "
        f"claim = claims.stake({wish('a')!r}, sys.argv[1]); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        mine = claims.stake(wish("b"), str(folder))
        assert ahead(mine, folder) == ["run a"]
        holder.kill()
    assert ahead(mine, folder) == []
    assert [path.name[:9] for path in folder.iterdir()] == ["000000002"], "what it left is removed"


def test_what_is_no_claim_is_passed_over_and_what_is_shown_cannot_be_forged(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    held = claims.stake({**wish("a"), "what": "run \x1b[31mred", "user": "alice"}, str(folder))
    (folder / "000000000-1-1").symlink_to("/etc/passwd")
    os.mkfifo(folder / "000000000-2-2")
    (folder / "folder").mkdir()
    (folder / "000000000-3-3").mkdir()
    mine = claims.stake(wish("b"), str(folder))
    (row,) = mine.ahead(str(folder))
    assert (row["user"], row["what"]) == (claims.user_name(os.getuid()), "run [31mred")
    assert Path("/etc/passwd").exists()
    Path(held.path).write_text('{"resources": 7}')
    assert mine.ahead(str(folder)) == []
    Path(held.path).write_text(json.dumps({**wish("a"), "since": 1e300}))  # no date
    assert [row["what"] for row in claims.seen(str(folder))] == ["run b"]


def test_a_run_that_shares_goes_beside_others_and_shows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "FOLDER", str(tmp_path / "claims"))
    monkeypatch.setattr(claims.stake, "__defaults__", (claims.FOLDER,))
    monkeypatch.setattr(claims.Claim.ahead, "__defaults__", (claims.FOLDER,))
    sharing = [claims.claim_for_run(wish(run, "cpu", alone=False)) for run in ("a", "b")]
    assert None not in sharing
    said = rf"is busy: {claims.user_name(os.getuid())}'s run a has its processors since \d\d:\d\d; .*'s run b has"
    with pytest.raises(SystemExit, match=said):
        claims.claim_for_run(wish("c", "cpu"))
    assert [row["what"] for row in claims.seen(claims.FOLDER)] == ["run a", "run b"]
    assert claims.claim_for_run(None) is None


def test_a_folder_that_is_swapped_for_a_link_loses_no_file_of_anybody(tmp_path: Path) -> None:
    """Whoever made the folder owns it, and can put a link to somebody else's files in its place at any moment."""
    folder, precious = tmp_path / "claims", tmp_path / "precious"
    precious.mkdir()
    names = [".env", "thesis.tex", "weights.pt", "000000001-1-1"]
    for name in names:
        (precious / name).write_text("dear")
    held = claims.stake(wish("a"), str(folder))
    (precious / Path(held.path).name).write_text("dear")
    with claims.locked(str(folder)) as place:
        for name in names:
            (folder / name).write_text("left behind")
        folder.rename(tmp_path / "aside")
        folder.symlink_to(precious)
        rows = claims.living(place)
    assert [row["what"] for row in rows] == ["run a"]
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == sorted([*names[:3], Path(held.path).name])
    held.release()
    said = rf"{claims.user_name(os.getuid())} has put a link or a file where .*cluster\.when_busy=share"
    with pytest.raises(OSError, match=said):
        claims.stake(wish("b"), str(folder))
    assert claims.seen(str(folder)) == []
    assert sorted(path.name for path in precious.iterdir()) == sorted([*names, Path(held.path).name])
    assert {path.read_text() for path in precious.iterdir()} == {"dear"}


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel tells of locks in /proc/locks on Linux alone")
def test_who_holds_a_lock_on_the_folder_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_MUTEX_S", 0.05)
    monkeypatch.setattr(claims.stake, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(claims.Claim.ahead, "__defaults__", (str(tmp_path),))
    place = os.open(tmp_path, os.O_RDONLY)
    user = "nobody" if os.geteuid() == 0 else None
    lock = partial(fcntl.flock, place, fcntl.LOCK_EX)
    with subprocess.Popen(["sleep", "600"], pass_fds=[place], preexec_fn=lock, user=user) as holder:
        os.close(place)
        who = user or claims.user_name(os.getuid())
        said = rf"{who}'s process {holder.pid} \(sleep 600\) has held a lock on it for .*cluster\.when_busy=share"
        with pytest.raises(OSError, match=said):
            claims.claim_for_run(wish("a"))
        assert claims.claim_for_run(wish("a", alone=False)) is None, "which needs no claim"
        holder.kill()
    assert claims.claim_for_run(wish("a")) is not None


def test_a_folder_that_only_its_owner_may_write_names_owner_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", partial(_refused, os.open))
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match=r"belongs to \S+ and has mode 0755, and needs 1777; ask them or an administ"):
        claims.stake(wish("a"), str(tmp_path))
    assert claims.seen(str(tmp_path / "nowhere")) == []


def _refused(original: Any, path: str, flags: int, *mode: int, **where: Any) -> int:
    """As for a user who isn't root."""
    if flags & os.O_CREAT:
        raise PermissionError(errno.EACCES, "Permission denied")
    return int(original(path, flags, *mode, **where))


@pytest.mark.parametrize(
    ("device", "change", "expected"),
    [
        ("cpu", {}, ["cpu"]),
        ("cuda", {"nproc_per_node": 2}, ["gpu:0", "gpu:1"]),
        ("cuda", {"env": {"CUDA_VISIBLE_DEVICES": "3, 1,2"}, "nproc_per_node": 2}, ["gpu:3", "gpu:1"]),
        ("cuda", {"placement": {"CUDA_VISIBLE_DEVICES": "GPU-ab"}}, ["gpu:GPU-ab"]),
    ],
)
def test_a_run_claims_the_devices_of_its_ranks(device: str, change: dict[str, object], expected: list[str]) -> None:
    assert wishes.resources(Host(name="a", **change), device) == expected  # type: ignore[arg-type]


def test_gpus_are_refused_by_default_and_processors_shared(tmp_path: Path) -> None:
    def policy(device: str, when_busy: str = "auto") -> str:
        return wishes.policy(Cluster(launcher="pssh", hosts=(), device=device, when_busy=when_busy))

    assert [policy("cuda"), policy("cpu"), policy("auto")] == ["refuse", "share", "share"]
    assert [policy("cuda", "share"), policy("cpu", "wait")] == ["share", "wait"]
    with pytest.raises(UsageError, match=r"cluster\.when_busy='later' is not an option"):
        planned(tmp_path, "cluster.when_busy=later")


def busy(facts: NodeFacts, **change: object) -> list[occupation.Occupation]:
    hosts = (Host(name=facts.host, nproc_per_node=2),)
    cluster = Cluster(launcher="pssh", hosts=hosts, device="cuda", **change)  # type: ignore[arg-type]
    return occupation.occupied(cluster, [facts], "mine-")


def row(run: str, *resources: str) -> dict[str, object]:
    return {**wish(run, *resources), "words": f"bob's run {run}"}


def test_runs_and_processes_of_others_on_the_gpus_of_the_ranks_are_named_with_since_when() -> None:
    owners = f"4242, alice, {NOW:.0f}, "
    facts = told(0, {"gpus": {**A100, "owners": owners}, "claims": [row("a", "gpu:1"), row("b", "gpu:2")]})
    (found,) = busy(facts)
    assert found.runs == ("bob's run a",)
    assert len(found.processes) == 1
    assert re.fullmatch(
        rf"alice's /opt/venv/bin/python, -u \(pid 4242\) is on GPU 1 since {claims.clock(NOW)}", found.processes[0]
    )
    with pytest.raises(HostError, match=r"1 of 3 hosts is busy:\n  node0 is busy: bob's run a; alice's") as caught:
        occupation.refuse([found], 3)
    assert caught.value.hint == wishes.WHEN_BUSY


def test_what_is_left_of_the_same_run_gives_way_and_a_run_with_a_claim_is_named_once() -> None:
    claimed = [row("mine", "gpu:0"), row("a", "gpu:0")]
    owners = "4242, bob, 1, a-1-ffffff:0"
    (found,) = busy(told(0, {"gpus": {**A100, "owners": owners}, "claims": claimed}))
    assert (found.runs, found.processes) == (("bob's run a",), ())
    assert busy(told(0, {"gpus": {**A100, "owners": "4242, me, 1, mine-1-ffffff:0"}})) == []


def test_preflight_fails_where_a_training_would_be_refused_and_warns_where_it_would_wait() -> None:
    facts = told(0, {"gpus": None, "claims": [row("a", "gpu:0")]})
    for when_busy, state in [("auto", State.FAILED), ("wait", State.WARNING), ("share", State.WARNING)]:
        cluster = Cluster(launcher="pssh", hosts=(Host(name="node0"),), device="cuda", when_busy=when_busy)
        (check,) = occupation.checks(cluster, [facts])
        assert (check.host, check.name, check.state, check.seen) == ("node0", "occupied", state, "bob's run a")


def test_everybody_waits_for_hosts_in_the_same_order_so_nobody_waits_for_one_who_waits_for_him() -> None:
    first, second = told(0, machine="f00d"), told(1, machine="beef")
    named = [Host(name="my-a"), Host(name="my-b")], [Host(name="their-b"), Host(name="their-a")]
    assert [host.name for host in in_common_order(named[0], [first, second])] == ["my-b", "my-a"]
    assert [host.name for host in in_common_order(named[1], [second, first])] == ["their-b", "their-a"]


def test_whose_a_process_on_a_gpu_is_and_since_when_is_told_with_nvidia_smis_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\ncase $1 in *compute-apps*) echo 'GPU-ab, {os.getpid()}, 10, python'; esac\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = processors.gpu_state(5.0)
    assert said is not None
    pid, user, since, mark = said["owners"].split(", ")
    assert (int(pid), user, mark) == (os.getpid(), claims.user_name(os.getuid()), "")
    assert 0 <= time.time() - float(since) < 86400
    assert processors.owner("0") == ""


def test_a_run_is_called_by_its_key_and_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": "resnet18"}}))
    assert wishes.title(tmp_path, "5a0c") == "run 5a0c (resnet18)"
    assert wishes.title(tmp_path / "nowhere", "5a0c") == "run 5a0c"


def test_a_place_is_left_though_somebody_has_stopped_its_connection() -> None:
    place = wishes.Place([sys.executable, "-c", "import time; time.sleep(60)"], wish("a"))
    os.kill(place._child.pid, signal.SIGSTOP)
    wait_until(lambda: stops.state(place._child.pid) == "T")
    leaving = threading.Thread(target=place.leave, daemon=True)
    leaving.start()
    leaving.join(promised_s(10.0))
    code = place._child.poll()
    place._child.kill()
    assert code == -signal.SIGKILL


def test_who_waits_outlives_broken_connections_and_keeps_no_host_that_it_has_lost(tmp_path: Path) -> None:
    """Of two hosts the first is free and the second isn't: both connections break while that one is waited for."""
    hosts = tuple(Host(name=name, env={"CUDA_VISIBLE_DEVICES": f"GPU-{uuid.uuid4()}"}) for name in ("free", "taken"))
    cluster = Cluster(launcher="pssh", hosts=hosts, device="cuda", when_busy="wait")
    other, said = claims.stake(wish("first", f"gpu:{hosts[1].env['CUDA_VISIBLE_DEVICES']}")), list[str]()

    def on_job(text: str) -> None:
        said.append(text.partition(" since ")[0])
        if len(said) == 1:
            for place in queue._places.values():
                place._child.kill()
        elif len(said) == 3:
            other.release()

    facts = [SimpleNamespace(host=host.label, identity=host.label, extra={}) for host in hosts]
    reached: Any = SimpleNamespace(cluster=cluster, facts=lambda *_: facts, forget=lambda: None)
    here: Any = SimpleNamespace(connection=lambda host: Connection(host=host.label, argv=agent_argv(sys.executable)))
    spec: Any = SimpleNamespace(run_key="0123456789ab", run_dir=tmp_path, pack=None, versions={})
    queue = _Queue(here, reached, spec, Watchers(on_line=lambda _: None, on_job=on_job), lambda: None)
    try:
        queue.wait()
        user, name = claims.user_name(os.getuid()), hosts[1].label
        waits = f"waiting for {name}: {user}'s run first has GPU {hosts[1].env['CUDA_VISIBLE_DEVICES']}"
        broke = f"waiting for {name}: the connection to its queue broke (the connection ended); making another"
        assert said == [waits, broke, waits]
        assert not any(map(queue._place_lost, hosts))
    finally:
        queue.leave()
