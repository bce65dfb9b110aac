"""Claims on a host: one run a device, gone with their process, whatever lies in their folder; waiting for them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.agent import wire
from pipeline.cluster.agent.host import usage
from pipeline.cluster.agent.node import user_name
from pipeline.cluster.agent.requests import ClaimRequest
from pipeline.cluster.agent.running import claims
from pipeline.cluster.attempt import run as attempt
from pipeline.cluster.launchers import settings
from pipeline.cluster.launchers.transport.agent_client import resources
from pipeline.cluster.preflight import State
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host, LaunchSettings
from pipeline.tracking import __main__ as tracking
from pipeline.tracking.client import DestinationRecorder
from pipeline.tracking.destinations import Destination
from tests.contract.listening import listener
from tests.pipeline.test_planning import planned
from tests.pipeline.test_preflight_checks import told
from tests.pipeline.test_preflight_gpus import A100
from trainers.contract.host_facts import HeldClaim, HostFacts

NOW = time.time()


def wish(run: str, *resources: str, group: str = "", alone: bool = True) -> ClaimRequest:
    return ClaimRequest(resources or ("gpu:0",), f"{run}-", group or run, f"run {run}", refuses_others=alone)


def stake(run: str, folder: Path, *resources: str, **change: Any) -> claims.Claim:
    return claims.claim_devices(wish(run, *resources, **change), str(folder))


def test_a_device_that_another_run_has_is_refused_with_who_and_since_when(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    first, other = stake("a", folder, "gpu:0"), stake("b", folder, "gpu:1")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    said = rf"is busy: {user_name(os.getuid())}'s run a has GPU 0 since \d\d:\d\d$"
    with pytest.raises(SystemExit, match=said):
        stake("c", folder, "gpu:0")
    first.release()
    assert [row.title for row in claims.claims_here(str(folder))] == ["run b"]
    stake("c", folder, "gpu:0").release()
    other.release()
    assert list(folder.iterdir()) == []


def test_of_runs_that_come_at_once_one_gets_the_device(tmp_path: Path) -> None:
    def try_it(run: str) -> claims.Claim | None:
        try:
            return stake(run, tmp_path / "claims")
        except SystemExit:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [claim for claim in pool.map(try_it, "abcdefgh") if claim is not None]
    assert len(won) == 1


def test_a_run_gives_way_to_itself_and_one_controller_arranges_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    held = [stake("a", folder), stake("a", folder)]
    held += [stake(run, folder, "gpu:7", group="sweep") for run in ("c", "d")]
    assert [row.title for row in claims.claims_here(str(folder))] == ["run a", "run a", "run c", "run d"]
    del held


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    program = (
        "import sys, time; from pipeline.cluster.agent.running import claims; "
        "from pipeline.cluster.agent.requests import ClaimRequest; "
        f"claim = claims.claim_devices({wish('a')!r}, sys.argv[1]); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        with pytest.raises(SystemExit, match="run a has GPU 0"):
            stake("b", folder)
        holder.kill()
    held = stake("b", folder)
    assert [str(path) for path in folder.iterdir()] == [held.path], "what it left is removed"


def test_what_is_no_claim_is_passed_over_and_what_is_shown_cannot_be_forged(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    held = claims.claim_devices(wish("a")._replace(title="run \x1b[31mred"), str(folder))
    (folder / "000000000-1-1").symlink_to("/etc/passwd")
    os.mkfifo(folder / "000000000-2-2")
    (folder / "folder").mkdir()
    (folder / "000000000-3-3").mkdir()
    mine = stake("b", folder, alone=False)
    row, _ = claims.claims_here(str(folder))
    assert (row.user, row.title) == (user_name(os.getuid()), "run [31mred")
    assert Path("/etc/passwd").exists()
    Path(held.path).write_text('{"resources": 7}')
    assert [row.title for row in claims.claims_here(str(folder))] == ["run b"]
    Path(held.path).write_bytes(claims.claim_file(wish("a"), since=1e300))  # no date
    assert [row.title for row in claims.claims_here(str(folder))] == ["run b"]
    mine.release()


def test_a_run_that_shares_goes_beside_others_and_shows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "FOLDER", str(tmp_path / "claims"))
    monkeypatch.setattr(claims.claim_devices, "__defaults__", (claims.FOLDER,))
    sharing = [claims.claim_for_run(wish(run, "cpu", alone=False)) for run in ("a", "b")]
    assert None not in sharing
    said = rf"is busy: {user_name(os.getuid())}'s run a has its processors since \d\d:\d\d; .*'s run b has"
    with pytest.raises(SystemExit, match=said):
        claims.claim_for_run(wish("c", "cpu"))
    assert [row.title for row in claims.claims_here(claims.FOLDER)] == ["run a", "run b"]
    assert claims.claim_for_run(None) is None


def test_a_folder_that_is_swapped_for_a_link_loses_no_file_of_anybody(tmp_path: Path) -> None:
    """Whoever made the folder owns it, and can put a link to somebody else's files in its place at any moment."""
    folder, precious = tmp_path / "claims", tmp_path / "precious"
    precious.mkdir()
    names = [".env", "thesis.tex", "weights.pt", "000000001-1-1"]
    for name in names:
        (precious / name).write_text("dear")
    held = claims.claim_devices(wish("a"), str(folder))
    (precious / Path(held.path).name).write_text("dear")
    with claims.locked(str(folder)) as place:
        for name in names:
            (folder / name).write_text("left behind")
        folder.rename(tmp_path / "aside")
        folder.symlink_to(precious)
        rows = claims.living(place)
    assert [row.title for row in rows] == ["run a"]
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == sorted([*names[:3], Path(held.path).name])
    held.release()
    said = rf"{user_name(os.getuid())} has put a link or a file where .*cluster\.when_busy=share"
    with pytest.raises(OSError, match=said):
        claims.claim_devices(wish("b"), str(folder))
    assert claims.claims_here(str(folder)) == ()
    assert sorted(path.name for path in precious.iterdir()) == sorted([*names, Path(held.path).name])
    assert {path.read_text() for path in precious.iterdir()} == {"dear"}


def test_a_lock_on_the_folder_that_nobody_releases_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_MUTEX_S", 0.05)
    monkeypatch.setattr(claims.claim_devices, "__defaults__", (str(tmp_path),))
    place = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    with pytest.raises(OSError, match=r"a process has held a lock on it for .*cluster\.when_busy=share"):
        claims.claim_for_run(wish("a"))
    assert claims.claim_for_run(wish("a", alone=False)) is None, "which needs no claim"
    os.close(place)
    assert claims.claim_for_run(wish("a")) is not None


def test_a_folder_that_only_its_owner_may_write_names_owner_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", partial(_refused, os.open))
    tmp_path.chmod(0o755)
    owned = r"belongs to \S+ and has mode 0755, and needs 1777; ask its owner or an administ"
    with pytest.raises(OSError, match=owned):
        claims.claim_devices(wish("a"), str(tmp_path))
    assert claims.claims_here(str(tmp_path / "nowhere")) == ()


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
    assert resources(Host(name="a", **change), device) == expected  # type: ignore[arg-type]


def test_gpus_are_refused_by_default_and_processors_shared(tmp_path: Path) -> None:
    def policy(device: str, when_busy: str = "auto") -> str:
        return settings.busy_policy(
            Cluster(launcher="pssh", hosts=(), device=device, settings=LaunchSettings(when_busy=when_busy))
        )

    assert [policy("cuda"), policy("cpu"), policy("auto")] == ["refuse", "share", "share"]
    assert [policy("cuda", "share"), policy("cpu", "wait")] == ["share", "wait"]
    with pytest.raises(UsageError, match=r"cluster\.when_busy='later' is not an option"):
        planned(tmp_path, "cluster.when_busy=later")


def busy(facts: HostFacts, **change: object) -> list[preflight.Occupation]:
    hosts = (Host(name=facts.host, nproc_per_node=2),)
    cluster = Cluster(launcher="pssh", hosts=hosts, device="cuda", **change)  # type: ignore[arg-type]
    return preflight.occupied(cluster, [facts], "mine-")


def row(run: str, *resources: str) -> HeldClaim:
    return HeldClaim(resources, f"{run}-", run, f"run {run}", NOW, "bob", f"bob's run {run}")


def test_runs_and_processes_of_others_on_the_gpus_of_the_ranks_are_named_with_since_when() -> None:
    owners = f"4242, alice, {NOW:.0f}, "
    facts = told(0, nvidia_smi=A100._replace(owners=owners), claims=(row("a", "gpu:1"), row("b", "gpu:2")))
    (found,) = busy(facts)
    assert found.runs == ("bob's run a",)
    assert len(found.processes) == 1
    assert re.fullmatch(
        rf"alice's /opt/venv/bin/python, -u \(pid 4242\) is on GPU 1 since {wire.clock(NOW)}", found.processes[0]
    )
    with pytest.raises(HostError, match=r"1 of 3 hosts is busy:\n  node0 is busy: bob's run a; alice's") as caught:
        preflight.refuse_occupied([found], 3)
    assert caught.value.hint == settings.WHEN_BUSY_HINT


def test_what_is_left_of_the_same_run_gives_way_and_a_run_with_a_claim_is_named_once() -> None:
    claimed = (row("mine", "gpu:0"), row("a", "gpu:0"))
    owners = "4242, bob, 1, a-1-ffffff:0"
    (found,) = busy(told(0, nvidia_smi=A100._replace(owners=owners), claims=claimed))
    assert (found.runs, found.processes) == (("bob's run a",), ())
    assert busy(told(0, nvidia_smi=A100._replace(owners="4242, me, 1, mine-1-ffffff:0"))) == []


def test_preflight_fails_where_a_training_would_be_refused_and_warns_where_it_would_wait() -> None:
    facts = told(0, claims=(row("a", "gpu:0"),))
    for when_busy, state in [("auto", State.FAILED), ("wait", State.WARNING), ("share", State.WARNING)]:
        cluster = Cluster(
            launcher="pssh", hosts=(Host(name="node0"),), device="cuda", settings=LaunchSettings(when_busy=when_busy)
        )
        (check,) = preflight._occupation(cluster, [facts])
        assert (check.host, check.name, check.state, check.seen) == ("node0", "occupied", state, "bob's run a")


def test_whose_a_process_on_a_gpu_is_and_since_when_is_told_with_nvidia_smis_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\ncase $1 in *compute-apps*) echo 'GPU-ab, {os.getpid()}, 10, python'; esac\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    output = usage.nvidia_smi(5.0)
    assert output is not None
    pid, user, since, mark = output.owners.split(", ")
    assert (int(pid), user, mark) == (os.getpid(), user_name(os.getuid()), "")
    assert 0 <= time.time() - float(since) < 86400
    assert usage.owner("0") == ""


def waiting(tmp_path: Path, when_busy: str, answers: list[Any]) -> tuple[list[str], Any, Any]:
    """What is said, the hosts, which give one of ``answers`` each time they are asked, and the run."""

    def facts(*_: object) -> list[HostFacts]:
        answer = answers.pop(0)
        if isinstance(answer, HostError):
            raise answer
        return [told(0, claims=tuple(answer))]

    cluster = Cluster(
        launcher="pssh", hosts=(Host(name="node0"),), device="cuda", settings=LaunchSettings(when_busy=when_busy)
    )
    launcher = SimpleNamespace()
    hosts: Any = SimpleNamespace(cluster=cluster, launcher=launcher, facts=facts, forget_facts=lambda: None)
    spec: Any = SimpleNamespace(run_key="0123456789ab", run_dir=tmp_path, pack=None, versions={}, is_restart=False)
    return [], hosts, spec


def test_who_waits_asks_until_nobody_is_there_and_outlives_a_host_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "PROBE_AGAIN_S", 0.0)
    monkeypatch.setattr(attempt, "AgentLauncher", SimpleNamespace)
    answers = [[row("a", "gpu:0")], HostError("node0: timed out"), [row("a", "gpu:0")], []]
    said, hosts, spec = waiting(tmp_path, "wait", answers)
    attempt.until_free(hosts, spec, listener(on_notice=said.append), lambda: None)
    waits = "waiting for node0: bob's run a"
    assert said == [waits, "waiting, and a host doesn't answer: node0: timed out; it is asked again", waits]
    _, hosts, spec = waiting(tmp_path, "wait", [HostError("node0: timed out")])
    with pytest.raises(HostError, match="timed out"):
        attempt.until_free(hosts, spec, listener(), lambda: None)


def test_a_start_that_another_run_forestalled_is_tried_again_where_waiting_is_wanted(tmp_path: Path) -> None:
    error = HostError("start: node0: is busy: bob's run a has GPU 0")
    _, hosts, spec = waiting(tmp_path, "wait", [])
    assert attempt.was_claimed_first(error, hosts, spec)
    assert not attempt.was_claimed_first(HostError("the disk is full"), hosts, spec)
    _, hosts, spec = waiting(tmp_path, "refuse", [])
    assert not attempt.was_claimed_first(error, hosts, spec)
    spec.is_restart = True
    assert attempt.was_claimed_first(error, hosts, spec)


AUTOGROUP = Path("/proc/self/autogroup")
SEEN = f"from pathlib import Path; import os; print(os.nice(0), Path('{AUTOGROUP}').read_text())"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="a kernel without autogrouping")
@pytest.mark.parametrize(("leads", "session"), [(True, "nice 10"), (False, "nice 0")])
def test_a_process_beside_a_training_steps_back_with_its_session_and_with_no_other(leads: bool, session: str) -> None:
    own = (
        f"import os; from pipeline.core.processes import process as of; of.set_priority(os.getpid(), of.BESIDE); {SEEN}"
    )
    code = own if leads else f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, start_new_session=True)
    assert done.stdout.startswith("10 ")
    assert session in done.stdout


@pytest.mark.parametrize(
    ("line", "gives_way"),
    [
        ("record RUN --experiment x --follow", False),  # the controller sets it back, and forward again
        ("serve --experiment x", True),
    ],
)
def test_only_what_works_beside_a_training_gives_way(
    monkeypatch: pytest.MonkeyPatch, line: str, gives_way: bool
) -> None:
    """Beside six busy loops doit ui was refused after two minutes: its store was made with the least priority."""
    given: list[bool] = []
    monkeypatch.setattr(tracking, "set_priority", lambda *_: given.append(True))
    for work in ("_record_one", "_serve"):
        monkeypatch.setattr(tracking, work, lambda *_: 0)
    monkeypatch.setattr(tracking, "_NOT_NEEDED", ())
    for of_a_process in ("masking.begin", "unexpected.install", "unexpected.keep_tracebacks_in"):
        monkeypatch.setattr(f"{tracking.__name__}.{of_a_process}", lambda *_: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert tracking.main([*line.split(), "--uri", "sqlite:////nowhere/mlflow.db"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert bool(given) == gives_way


def test_the_recorder_of_a_run_under_way_gets_hardly_anything_until_the_training_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It doesn't step back by itself: one that came to it after the training had ended stayed there."""
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("pipeline.tracking.recorder_command", lambda *_, **__: waiting)
    recorder = DestinationRecorder(tmp_path, Destination(uri="sqlite:///mlflow.db", experiment="paceline"))
    recorder.start()
    assert recorder._child is not None
    with recorder._child as child:
        before = _niceness(child.pid)
        recorder.restore_priority()
        after = _niceness(child.pid)
        child.kill()
    assert before == (19, 19)
    assert after == (0 if os.geteuid() == 0 else 19, 0)
    recorder.restore_priority()  # it is gone: nothing happens


def _niceness(pid: int) -> tuple[int, int]:
    """The process's, and its session's where that has one: the file is empty where nothing ever began a session."""
    own, session = os.getpriority(os.PRIO_PROCESS, pid), Path(f"/proc/{pid}/autogroup")
    words = session.read_text().split() if session.exists() else []
    return own, int(words[-1]) if words else own
