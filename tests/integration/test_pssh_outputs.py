"""What travels to the nodes and back: data packs, checkpoints, metrics, over real ssh."""

from __future__ import annotations

import json
import os
import re
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import lab as labs
from pipeline.cluster import launchers
from pipeline.cluster.attempt.run import _planned, run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import TrainingError
from pipeline.core.specs import Cluster, Host
from pipeline.data.trees import tree
from pipeline.keys.script_files import DataPath
from pipeline.lab import Lab
from tests.contract.listening import listener
from tests.contract.stub import make
from tests.lab_fixture import on
from tests.waiting import wait_until

pytestmark = pytest.mark.lab

ATTEMPT = """
if rank == 0:
    (run / "checkpoints").mkdir(exist_ok=True)
    print("found", sorted(path.name for path in (run / "checkpoints").iterdir()), flush=True)
    with (run / "metrics.jsonl").open("a") as file:
        print("lines", len((run / "metrics.jsonl").read_text().splitlines()), flush=True)
        for step in (1, 2) if not list((run / "checkpoints").iterdir()) else (2,):
            file.write(json.dumps({"t": 0.0, "step": step, "epoch": 0, "metrics": {}}) + "\\n")
    if not list((run / "checkpoints").iterdir()):
        (run / "checkpoints" / "step-00000001.pt").write_bytes(b"one")
        first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
        globals()["seal"](run / "checkpoints" / "step-00000001.pt", first)
        (run / "checkpoints" / "step-00000002.pt").write_bytes(b"torn: no json beside it")
        time.sleep(1)
        raise ValueError("boom")
    finish = globals()["finish"]
    before = (run / "metrics.jsonl").read_text()
    finish(rank, run)
    (run / "metrics.jsonl").write_text(before)
else:
    time.sleep(600 if not (run / "checkpoints").exists() else 0)
"""


def cluster(lab: Lab, **settings: Any) -> Cluster:
    hosts = tuple(Host(name=host.name, env={"OMP_NUM_THREADS": "1"}) for host in lab.hosts)
    return Cluster(launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), settings=PsshConfig(**settings))


def test_second_attempt_goes_on_from_the_first_ones_checkpoint(lab: Lab, tmp_path: Path) -> None:
    stub = make(tmp_path, ATTEMPT, stand_in=True)
    lines: list[LogLine] = []

    def attempt(number: int) -> None:
        run_attempt(stub.spec(number), closing(Hosts(cluster(lab))), listener(lines.append))

    with pytest.raises(TrainingError, match="ValueError: boom"):
        attempt(1)
    assert sorted(path.name for path in (stub.run_dir / "checkpoints").iterdir()) == [
        "step-00000001.json",
        "step-00000001.pt",
    ]
    attempt(2)
    found = [line.text for line in lines if line.text.startswith(("found", "lines"))]
    assert found == ["found []", "lines 0", "found ['step-00000001.json', 'step-00000001.pt']", "lines 1"]
    steps = [json.loads(line)["step"] for line in (stub.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert on(lab, "node0", "ls ~/.cache/paceline/runs").stdout == ""


LEFT = """
found = sorted(path.name for path in (run / "checkpoints").glob("*"))
print("found", found, flush=True)
if not found:
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000001.pt").write_bytes(b"one")
    globals()["seal"](run / "checkpoints" / "step-00000001.pt")
    time.sleep(600)
globals()["finish"](rank, run)
"""


@pytest.mark.ci
@pytest.mark.long
def test_what_an_attempt_left_on_another_host_is_ended_there_and_gone_on_with(lab: Lab, tmp_path: Path) -> None:
    stub, lines, notes = make(tmp_path, LEFT, stand_in=True), list[LogLine](), list[str]()
    one, other = (replace(cluster(lab), hosts=(Host(name=host.name),)) for host in lab.hosts)
    with closing(Hosts(one)) as hosts:  # and no more: the controller is killed
        facts = hosts.facts(stub.spec().pack)
        plan = _planned(stub.spec(), hosts, facts, hosts.ports()[0])
        hosts.launcher.start(plan, stub.spec().pack, facts, stub.run_dir)
    wait_until(lambda: on(lab, "node0", f"ls {plan.nodes[0].run_dir}/checkpoints/*.json").returncode == 0)
    run_attempt(stub.spec(2), closing(Hosts(other)), listener(lines.append, on_note=notes.append))
    assert notes[:1] == ["attempt 1 was left on node0: it is ended there, and its checkpoints were fetched"]
    assert "found ['step-00000001.json', 'step-00000001.pt']" in [line.text for line in lines]
    assert on(lab, "node0", "ls ~/.cache/paceline/runs").stdout == ""


def large_pack(folder: Path, count: int) -> PackSource:
    """Of ``count`` times 4 kB of noise."""
    stub = make(folder, "")
    (stub.pack_dir / "images.bin").write_bytes(os.urandom(4000 * count))
    (stub.pack_dir / "labels.bin").write_bytes(bytes(8 * count))
    manifest = {"digest": stub.digest, "count": count, "channels": 1, "height": 40, "width": 100}
    (stub.pack_dir / "manifest.json").write_text(json.dumps(manifest))
    return PackSource(path=stub.pack_dir, digest=stub.digest)


def test_pack_goes_to_all_hosts_and_a_truncated_one_is_replaced(lab: Lab, tmp_path: Path) -> None:
    pack, what = large_pack(tmp_path, 2500), cluster(lab, workdir="~/packs 'n $(touch x)")
    with closing(launchers.create(what)) as launcher:
        assert isinstance(launcher, AgentLauncher)
        facts = launcher.probe(pack)
        assert [fact.pack_path for fact in facts] == [None, None]
        launcher.send_pack(pack, facts)
        paths = [fact.pack_path for fact in launcher.probe(pack)]
        assert all(path is not None and path.endswith(f"/data/{pack.digest}") for path in paths)

        on(lab, "node1", f': > ~/"packs \'n \\$(touch x)"/data/{pack.digest}/images.bin')
        facts = launcher.probe(pack)
        assert [fact.pack_path is None for fact in facts] == [False, True]
        launcher.send_pack(pack, facts)
        assert [fact.pack_path for fact in launcher.probe(pack)] == paths


@pytest.mark.ci
@pytest.mark.long
def test_a_folder_of_data_arrives_with_its_programs_and_empty_folders(lab: Lab, tmp_path: Path) -> None:
    source = tmp_path / "my data"
    for number in range(40):
        path = source / f"part {number % 3}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(250_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "none" / "here").mkdir(parents=True)
    (tmp_path / "words.txt").write_text("one two")
    named = [DataPath("program.data", source), DataPath("program.args.words", tmp_path / "words.txt")]
    found = tree(named, tmp_path / "data")
    found.create()
    assert found.path is not None
    pack = PackSource(path=found.path, digest=found.digest, inside=found.inside)
    with closing(launchers.create(cluster(lab))) as launcher:
        assert isinstance(launcher, AgentLauncher)
        launcher.send_pack(pack, launcher.probe(pack))
        places = [fact.pack_path for fact in launcher.probe(pack)]
    listed = "find . -printf '%P %y %m\\n' | sort; find . -type f | sort | xargs -d '\\n' sha256sum"
    assert [on(lab, f"node{at}", f"cat '{place}/content2/words.txt'").stdout for at, place in enumerate(places)] == [
        "one two"
    ] * 2
    told = [on(lab, f"node{number}", f"cd '{place}/content' && {listed}").stdout for number, place in enumerate(places)]
    assert "none/here d " in told[0]
    assert "run.sh f 755" in told[0]
    assert told[0] == told[1]


@pytest.mark.ci
@pytest.mark.long
def test_who_waits_for_a_large_pack_hears_how_much_of_it_each_host_has(lab: Lab, tmp_path: Path) -> None:
    pack, what = large_pack(tmp_path, 1000), cluster(lab)
    heard: list[str] = []
    over = threading.Event()

    def listen() -> None:
        while not over.wait(0.1):
            heard.append(launcher.starting())

    with closing(launchers.create(what)) as launcher:
        assert isinstance(launcher, AgentLauncher)
        facts = launcher.probe(pack)
        labs.limit(lab, "node1", 8)
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            launcher.send_pack(pack, facts)
        finally:
            over.set()
            listener.join()
            labs.restore(lab, "node1")
    assert heard[0] == "sending code and data to the hosts and starting torchrun there"
    told = [re.search(r"^sending the data pack: .*node1 (\S+) of 4\.\d MB \(.+ MB/s\)", text) for text in heard]
    arrived = [float(match[1]) for match in told if match]
    assert arrived == sorted(arrived)
    assert 0 < arrived[0] < 4.0
