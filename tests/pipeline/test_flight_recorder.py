"""What torch's flight recorder has written of NCCL's collectives, read by the agent without running any of it."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.agent.running import examination
from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE, Collectives
from trainers.distributed.process_group import record_flights


def entry(number: int, name: str = "nccl:all_reduce", group: str = "0", **other: Any) -> dict[str, Any]:
    """As torch 2.11 writes it, without what isn't read."""
    frames = [("/venv/torch/distributed/distributed_c10d.py", 3068, "all_reduce"), ("/run/code/net.py", 41, "forward")]
    return {
        "frames": [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames],
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[10, 100]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        **other,
    }


def dump(given: int, ended: int, *entries: dict[str, Any]) -> bytes:
    status = {"last_enqueued_collective": given, "last_started_collective": -1, "last_completed_collective": ended}
    none = {**status, "last_enqueued_collective": -1, "last_completed_collective": -1}
    told = {"version": "2.10", "pg_status": {"0": status, "1": none}, "entries": list(entries)}
    return pickle.dumps(told)


def now(path: Path) -> tuple[Collectives, ...]:
    return examination.read_dump(str(path), until=time.monotonic())


def test_the_first_collective_that_has_not_ended_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(dump(3, 1, entry(2, is_p2p=True, profiling_name="nccl:send"), entry(1), entry(2), entry(3)))
    at = "/run/code/net.py:41 in forward"
    assert now(path) == (Collectives(group="0", enqueued=3, completed=1, next="all_reduce of 10×100 Float", at=at),)
    path.write_bytes(dump(2, 2, entry(1), entry(2)))
    assert now(path) == (Collectives(group="0", enqueued=2, completed=2),)


@pytest.mark.slow
def test_a_rank_is_asked_over_its_pipe_and_an_old_dump_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    record_flights(environment)
    assert environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / FLIGHT_PIPE)
    assert examination.request_dump(str(tmp_path), 5) is None  # no NCCL there
    (tmp_path / f"{FLIGHT_DUMP}5").write_bytes(dump(9, 9))
    os.mkfifo(tmp_path / f"{FLIGHT_PIPE}5.pipe")  # torch does

    def answer() -> None:
        with (tmp_path / f"{FLIGHT_PIPE}5.pipe").open("rb") as pipe:
            assert pipe.readline() == b"1\n"
        half = dump(3, 2, entry(3))
        (tmp_path / f"{FLIGHT_DUMP}5").write_bytes(half[:50])
        time.sleep(0.3)
        (tmp_path / f"{FLIGHT_DUMP}5").write_bytes(half)

    rank = threading.Thread(target=answer)
    rank.start()
    place = None
    while place is None:  # until the thread has opened it
        place = examination.request_dump(str(tmp_path), 5)
    (row,) = examination.read_dump(place, until=time.monotonic() + 30)
    rank.join()
    assert (row.enqueued, row.completed) == (3, 2)


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_a_person_has_set_for_the_recorder_stays(name: str) -> None:
    theirs = {"TORCHELASTIC_ERROR_FILE": "/run/error.json", name: "/mine/dump-"}
    before = dict(theirs)
    record_flights(theirs)
    assert theirs == before


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        dump(3, 1, entry(2))[:-20],
        pickle.dumps({"pg_status": {}}) + b"more",
        pickle.dumps([1, 2]),
        pickle.dumps({"pg_status": {"0": {}}, "entries": []}),
        pickle.dumps(Hostile()),
    ],
)
def test_what_is_no_dump_tells_nothing_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").write_bytes(content)
    assert now(tmp_path / "dump") == ()
    assert not (tmp_path / "was-run").exists()
    assert now(tmp_path / "nothing") == ()
