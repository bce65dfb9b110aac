"""What the terminal gets of what a rank says, and which hosts an attempt asks."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.core.errors import DataError, HostError, TrainingError
from pipeline.core.files import write_json
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import Cluster, Host, LaunchSettings, State
from pipeline.execution import attempting
from pipeline.execution.attempting import Attempts
from pipeline.execution.restarts import Restarts, next_start
from pipeline.execution.work import OpenAttempt, add_to_journal
from pipeline.runs import journal
from tests.pipeline.test_launch_first_error import PLAN


def test_of_a_line_that_fills_pages_the_beginning_is_shown() -> None:
    said = LogLine(host="node0", rank=3, text="é" * 65_536).shown
    assert said == f"node0:3 | {'é' * 2000}… (cut: 63,536 more characters are in the log)"


@pytest.mark.parametrize("word", ["{resume}", "{checkpoints}"])
def test_nothing_is_said_of_a_beginning_while_hosts_may_have_a_scripts_checkpoints(tmp_path: Path, word: str) -> None:
    program = {"name": "script", "script": "train.py", "args": ["--from", word]}
    config = SimpleNamespace(resolved={"program": program}, script="train.py")
    run: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), config=config)
    told = word == "{resume}"
    nothing = "there is no checkpoint yet" if told else "no argument of the script has {resume}"
    assert next_start(run) == f"from the beginning: {nothing}"
    write_json(tmp_path / "plan.json", asdict(PLAN))
    journal.register_attempt(tmp_path, PLAN.run_id)
    node = PLAN.nodes[0]
    left = f"attempt 1 has left on {node.host}"
    itself = f"; checkpoints that {left} are fetched, and it goes on from them if it reads them by itself"
    assert next_start(run) == (
        f"from the newest checkpoint that {left}, if there is one" if told else f"from the beginning: {nothing}{itself}"
    )
    state_dir = f"{tmp_path}/attempts/1/agent-{PLAN.run_id}"
    here = replace(PLAN, nodes=(replace(node, run_dir=str(tmp_path), state_dir=state_dir),))
    write_json(tmp_path / "plan.json", asdict(here))
    assert next_start(run) == f"from the beginning: {nothing}"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/notes.txt").write_text("no checkpoint")
    finds = f"{{resume}} finds none in {tmp_path}/checkpoints; they are set aside"
    itself = "; its checkpoints stay in place, and it goes on from them if it reads them by itself"
    assert next_start(run) == f"from the beginning: {finds if told else nothing + itself}"


def test_a_run_of_the_own_trainer_starts_from_a_checkpoint_that_is_here_or_may_be_on_its_host(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), config=SimpleNamespace(script=None))
    assert next_start(run) == "from the beginning: there is no checkpoint yet"
    write_json(tmp_path / "plan.json", asdict(PLAN))
    journal.register_attempt(tmp_path, PLAN.run_id)
    left = f"attempt 1 has left on {PLAN.nodes[0].host}"
    assert next_start(run) == f"from the newest checkpoint that {left}, if there is one"
    lost = (
        f"from the beginning: what attempt 1 saved is on {PLAN.nodes[0].host}, which is lost (checkpoints are fetched"
    )
    assert next_start(run, [PLAN.nodes[0].host]).startswith(lost)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000040.pt").touch()
    assert next_start(run, [PLAN.nodes[0].host]) == "from the checkpoint of step 40"
    assert next_start(run) == "from the checkpoint of step 40"


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts whose plan and events nobody needs."""
    for name in ("_subscriber", "_attempt_spec"):
        monkeypatch.setattr(attempting, name, lambda *_, **__: None)


def work_that_says(said: list[str], **fields: Any) -> Any:
    return SimpleNamespace(services=SimpleNamespace(hosts=None, stop=None), say=WaitReports(said.append), **fields)


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_spare_also_takes_part_where_a_command_before_this_one_has_begun_the_run(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """That one may have been killed after it had found the host gone, and this one is to finish the run as it would."""
    hosts, said = (Host(name="a"), Host(name="b")), list[str]()
    cluster = Cluster(launcher="pssh", hosts=hosts, spares=(Host(name="c"),), settings=LaunchSettings(max_restarts=1))

    def run_attempt(_: object, way: AbstractContextManager[Hosts], *__: object) -> None:
        with way as reached:
            if reached.cluster.hosts[0].name == "a":
                raise HostError("probe: a is unreachable", hint="ssh a true", hosts=["a"])

    monkeypatch.setattr(attempting, "run_attempt", run_attempt)
    restarts = Restarts(cluster, begun_before=has_begun)
    with nullcontext() if has_begun else pytest.raises(HostError, match="a is unreachable"):
        Attempts(work_that_says(said), restarts, last=2).make_one(2)
    assert said == (
        ["probe: a is unreachable\n  try: ssh a true\nc takes the place of a, as node 0"] if has_begun else []
    )


def test_a_restart_keeps_the_connections_unless_a_host_is_gone() -> None:
    cluster, kept = (
        Cluster(launcher="pssh", hosts=(Host(name="a"),), settings=LaunchSettings(max_restarts=1)),
        attempting.KeptHosts(),
    )
    with kept.of(cluster) as first, kept.of(cluster) as second, kept.of(replace(cluster)) as of_other_hosts:
        assert first is second is not of_other_hosts
    kept.close()  # as after a lost host
    with kept.of(cluster) as after_close:
        assert after_close is not first


@pytest.mark.usefixtures("unlaunched")
def test_a_spare_that_does_not_answer_is_waited_for_as_one_that_may_have_a_wrong_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, tries = list[str](), iter([True, False])
    settings = LaunchSettings(max_restarts=1, restart_wait_s=60.0)
    cluster = Cluster(launcher="pssh", hosts=(Host(name="a"),), spares=(Host(name="b"),), settings=settings)

    def run_attempt(*_: object) -> None:
        if next(tries):
            raise HostError("probe: b: Could not resolve hostname", hosts=["b"])

    monkeypatch.setattr(attempting, "run_attempt", run_attempt)
    monkeypatch.setattr("time.sleep", lambda _: None)
    restarts = Restarts(cluster)
    restarts.record_failure(TrainingError("a no longer answers", cause="host", gone=["a"]), step=1, now=0.0)
    restarts.replace(["a"])
    Attempts(work_that_says(said), restarts, last=2).make_one(2)
    assert said[0].endswith("for b; b has never answered: is the name of the spare right?")


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("limit_s", [60.0, 0.0])
def test_a_restart_waits_for_a_host_that_took_part_before(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """A host that was restarted refuses connections until its ssh server is up."""
    said, pauses, tries = list[str](), list[float](), iter([True, True, True, False])
    cluster = Cluster(
        launcher="pssh", hosts=(Host(name="a"),), settings=LaunchSettings(max_restarts=1, restart_wait_s=limit_s)
    )

    def run_attempt(*_: object) -> None:
        if next(tries):
            raise HostError("probe: a: Connection refused", hosts=["a"])

    monkeypatch.setattr(attempting, "run_attempt", run_attempt)
    monkeypatch.setattr("time.sleep", pauses.append)
    restarts = Restarts(cluster)
    restarts.record_failure(TrainingError("a no longer answers", cause="host", gone=["a"]), step=1, now=0.0)
    with nullcontext() if limit_s else pytest.raises(HostError, match="a: Connection refused"):
        Attempts(work_that_says(said), restarts, last=2).make_one(2)
    assert pauses == ([1.0, 2.0, 4.0] if limit_s else [])
    waits = r"attempt 2 waits until \d\d:\d\d:\d\d \(cluster.restart_wait_s=60\) for a, which took part before"
    assert len(said) == bool(limit_s)
    assert all(re.fullmatch(rf"probe: a: Connection refused\n{waits}", line) for line in said), said


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("most", [0, 1])
def test_an_attached_attempt_that_fails_is_started_again_as_by_the_command_that_began_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int
) -> None:
    """A laptop was closed and came back by doit attach: the host that is lost then has its spare all the same."""
    hosts, said, ran = (Host(name="a"), Host(name="b")), list[str](), list[tuple[int, list[str]]]()
    cluster = Cluster(
        launcher="pssh", hosts=hosts, spares=(Host(name="c"),), settings=LaunchSettings(max_restarts=most)
    )

    def attach_attempt(*_: object) -> None:
        raise TrainingError("training failed: a no longer answers", cause="host", gone=["a"])

    def make_one(attempts: Attempts, number: int) -> None:
        ran.append((number, [host.name for host in attempts._restarts.cluster.hosts]))

    monkeypatch.setattr(attempting, "attach_attempt", attach_attempt)
    monkeypatch.setattr(Attempts, "make_one", make_one)
    write_json(tmp_path / "config.json", {})
    config: Any = SimpleNamespace(cluster=cluster, script=None, hide=str)
    config.train = SimpleNamespace(trainer=SimpleNamespace(shards=0))
    folder = SimpleNamespace(path=tmp_path, journal=tmp_path / "journal.jsonl")
    run: Any = SimpleNamespace(config=config, folder=folder)
    lock = SimpleNamespace(lost=lambda: False, check=lambda: None)
    work = work_that_says(said, run=run, lock=lock)
    for number in (1, 2):  # the second one had only been planned
        add_to_journal(run, State.PLANNED, number)
    with nullcontext() if most else pytest.raises(TrainingError) as caught:
        attempting.attach(work, OpenAttempt(PLAN, cluster))
    if most:
        assert ran == [(3, ["c", "b"])]
        assert said[-1].splitlines()[1] == "c takes the place of a, as node 0"
        assert said[-1].endswith("starting attempt 3 of 3 from the beginning: there is no checkpoint yet")
    else:
        assert caught is not None
        assert caught.value.hint == "the same command starts from the beginning: there is no checkpoint yet"
        assert (caught.value.gone, ran) == (("a",), [])


def test_a_mirror_that_does_not_answer_is_named_while_it_is_waited_for() -> None:
    doing = list[str]()

    def restore() -> None:
        raise DataError("its last word")

    mirror = SimpleNamespace(shown="cluster.checkpoint_mirror=s3://models/a", restore=restore)
    work: Any = SimpleNamespace(run=None, mirror=mirror, say=SimpleNamespace(doing=doing.append))
    with pytest.raises(DataError):
        attempting.run_attempts(work)
    assert doing == ["waiting for cluster.checkpoint_mirror=s3://models/a to answer"]
