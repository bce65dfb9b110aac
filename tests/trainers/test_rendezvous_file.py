"""A folder for rendezvous=file that can't be written, or isn't shared."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from trainers.core.errors import TrainerError
from trainers.distributed import connecting
from trainers.distributed.connecting import _file_store
from trainers.distributed.ranks import Ranks, read_ranks


def test_a_node_takes_its_place_from_the_plan_where_torchrun_does_not_know_it() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    plan = {"PACELINE_FIRST_RANK": "2", "PACELINE_WORLD_SIZE": "4", "PACELINE_NNODES": "2", "PACELINE_NODE_RANK": "1"}
    wanted = Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2, nnodes=2, node_rank=1)
    assert read_ranks({**torchrun, **plan}) == wanted


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "abc-1"
    with pytest.raises(TrainerError, match=rf"host here can't write {re.escape(str(path))} .*rendezvous=static"):
        _file_store(path, Ranks(world_size=2), "here")


@pytest.mark.slow
def test_a_folder_that_is_not_shared_names_the_ranks_that_were_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_FILE_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(TrainerError, match=r"rank 0 on host here saw nothing of rank\(s\) 1, 2 .*same on every host"):
        _file_store(tmp_path / "abc-1", Ranks(world_size=3), "here")
