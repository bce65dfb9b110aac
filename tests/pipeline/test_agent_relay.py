"""The agents pass a data pack on: here on loopback, all of them in one process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent import probe, reach, relay, relay_files
from pipeline.cluster.launchers.relaying import notes

CONTENT = {"images.bin": bytes(range(250)) * 4000, "labels.bin": bytes(8 * 1000)}
DIGEST = "d" * 64


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience, for what fails in the end; small blocks, so that there are many."""
    for name, seconds in (("CONNECT_S", 0.5), ("LIMIT_S", 0.6), ("RETRY_S", 0.02)):
        monkeypatch.setattr(reach, name, seconds)
    monkeypatch.setattr(relay, "STALL_S", 1.0)
    monkeypatch.setattr(relay, "BLOCK_BYTES", 1 << 14)


class Hosts:
    """Nodes with a folder each, of which the first has the pack."""

    def __init__(self, folder: Path, sources: Sequence[Sequence[int]]) -> None:
        self.folder = folder
        self.gone: dict[int, set[int]] = {}  # node → those that have taken from it and left
        pack = folder / "pack"
        pack.mkdir()
        manifest = {"digest": DIGEST, "count": 1000, "channels": 1, "height": 10, "width": 100}
        files = {**CONTENT, "manifest.json": json.dumps(manifest).encode()}
        for name, data in files.items():
            (pack / name).write_bytes(data)
        self.files = [
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        ]
        self.total_bytes = sum(map(len, files.values()))
        self.nodes: list[dict[str, Any]] = [
            {
                "address": f"127.0.0.{number + 1}",
                "port": probe.free_ports(1)[0],
                "sources": list(of),
                "pack_path": None if number else str(pack),
            }
            for number, of in enumerate(sources)
        ]

    def run(self, *numbers: int, secrets: dict[int, str] | None = None) -> list[str]:
        """What each of ``numbers`` (all) ends with: where its pack lies, or why it has none."""

        async def one(number: int) -> str:
            secret = (secrets or {}).get(number, "word")
            node = relay.Node(number, self.nodes, secret, relay.Content(self.files), reach.LIMIT_S)
            self.gone[number] = node.gone
            try:
                request = {"workdir": str(self.workdir(number)), "pack_digest": DIGEST, "empty": ["an/empty one"]}
                return await relay.part(request, node)
            except relay.UnservedError as error:
                return str(error)

        async def all_at_once() -> list[str]:
            return await asyncio.gather(*map(one, numbers or range(len(self.nodes))))

        return asyncio.run(all_at_once())

    def workdir(self, number: int) -> Path:
        return self.folder / f"node {number}"

    def place(self, number: int) -> Path:
        return self.workdir(number) / "data" / DIGEST

    def has_it(self, number: int) -> bool:
        return all((self.place(number) / name).read_bytes() == data for name, data in CONTENT.items())

    def given_by(self, number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Fills with the bytes that node ``number`` reads to give them away."""
        given: list[int] = []
        read = relay.Content.read

        def counted(content: relay.Content, at: int) -> bytes:
            data = read(content, at)
            if content.folder == str(self.nodes[number]["pack_path"]):
                given.append(len(data))
            return data

        monkeypatch.setattr(relay.Content, "read", counted)
        return given


def test_seven_hosts_get_it_and_the_first_gives_it_to_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(tmp_path, [[], [0], [0], [1, 0], [1, 0], [2, 0], [2, 0]])
    given = hosts.given_by(0, monkeypatch)
    assert hosts.run()[1:] == [str(hosts.place(number)) for number in range(1, 7)]
    assert all(map(hosts.has_it, range(1, 7)))
    assert sum(given) == 2 * hosts.total_bytes
    assert (hosts.place(6) / "an" / "empty one").is_dir()


def test_who_loses_its_source_on_the_way_goes_on_with_the_first_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, [[], [0], [1, 0]])
    append = relay.Content.append

    def full(content: relay.Content, data: bytes) -> None:
        if str(hosts.place(1).parent) in content.folder and content.have > 200_000:
            raise relay.UnservedError("its disk is full")
        append(content, data)

    monkeypatch.setattr(relay.Content, "append", full)
    given = hosts.given_by(0, monkeypatch)
    assert hosts.run()[1:] == ["node 0: its disk is full", str(hosts.place(2))]
    assert hosts.has_it(2)
    assert list(hosts.place(1).parent.parent.glob("data/*")) == []
    assert sum(given) < 2 * hosts.total_bytes, "it has begun anew"


@pytest.mark.slow
def test_who_does_not_know_the_secret_gets_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, [[], [0], [0]])
    told = hosts.run(secrets={1: "guessed"})
    assert told[1:] == ["node 0: it closed the connection", str(hosts.place(2))]
    assert not hosts.place(1).exists()


def test_what_comes_changed_is_not_kept(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, [[], [0]])
    (Path(hosts.nodes[0]["pack_path"]) / "labels.bin").write_bytes(b"x" * 8000)
    assert hosts.run()[1] == "labels.bin came damaged"
    assert not hosts.workdir(1).joinpath("data").exists()


@pytest.mark.slow
def test_a_source_that_cannot_be_reached_is_named_with_the_reason(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, [[], [0]])
    assert hosts.run(1) == ["node 0: refused"]


def test_a_host_that_has_it_already_keeps_nobody_waiting(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, [[], [0]])
    hosts.run()
    made = hosts.place(1).stat().st_ino
    assert hosts.run()[1] == str(hosts.place(1))
    assert hosts.place(1).stat().st_ino == made
    assert hosts.gone[0] == {1}, "the first one waits until its time is up"


def passed_on(folder: Path, files: Sequence[str], *, sha256: str | None = None) -> list[str]:
    """Node 0 gives ``files`` of its folder to nodes 1 and 2: where each has them, or why it doesn't."""
    contents = [(name, (folder / "0" / name).read_bytes()) for name in files]
    told = [
        {"name": name, "bytes": len(data), "sha256": sha256 or hashlib.sha256(data).hexdigest()}
        for name, data in contents
    ]
    nodes = [
        {
            "address": f"127.0.0.{number + 1}",
            "port": probe.free_ports(1)[0],
            "sources": [[], [0], [1, 0]][number],
            "place": str(folder / str(number)),
        }
        for number in range(3)
    ]

    async def one(number: int) -> str:
        try:
            node = relay.Node(number, nodes, "word", relay.Content(told), reach.LIMIT_S)
            return await relay_files.part_of_files(node)
        except relay.UnservedError as error:
            return str(error)

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(one, range(3)))

    return asyncio.run(all_at_once())


def test_files_of_a_folder_take_the_place_of_what_lies_there_and_leave_the_rest(tmp_path: Path) -> None:
    for name, data in (("0/a/b c", b"new" * 30_000), ("0/d", b"d"), ("1/a/b c", b"old"), ("2/kept", b"k")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "1" / ".paceline-partial" / "relayed-killed").mkdir(parents=True)
    assert passed_on(tmp_path, ["a/b c", "d"]) == [str(tmp_path / str(number)) for number in range(3)]
    for number in (1, 2):
        assert (tmp_path / str(number) / "a" / "b c").read_bytes() == b"new" * 30_000
    names = {path.relative_to(tmp_path / "2").as_posix() for path in (tmp_path / "2").rglob("*")}
    assert names == {"a", "a/b c", "d", "kept"}
    assert not (tmp_path / "1" / ".paceline-partial").exists()


def test_files_that_come_damaged_replace_nothing(tmp_path: Path) -> None:
    for name, data in (("0/a", b"new"), ("1/a", b"old"), ("2/a", b"old")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    assert passed_on(tmp_path, ["a"], sha256="0" * 64)[1] == "a came damaged"
    assert [(tmp_path / str(number) / "a").read_bytes() for number in (1, 2)] == [b"old", b"old"]
    assert not (tmp_path / "1" / ".paceline-partial").exists()


def test_one_line_names_the_hosts_that_failed_alike() -> None:
    assert notes("the data pack", "a", {"b": "a: refused", "c": "a: refused", "d": "it closed"}) == [
        "b, c could not get the data pack from a (a: refused), so this computer sent it",
        "d could not get the data pack from a (it closed), so this computer sent it",
    ]
