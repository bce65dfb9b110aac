"""Slices of a sharded checkpoint: read by any number of ranks, and never as code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from trainers.strategies.fsdp import Slice, file_name, read_slices, write_slices

WHOLE = {"model.a": torch.arange(14.0).reshape(7, 2), "adam.b": torch.arange(2.0)}


def of_rank(rank: int, ranks: int, *, empty: bool = False) -> dict[str, Slice]:
    found = {}
    for name, whole in WHOLE.items():
        first = min(len(whole), -(-len(whole) // ranks) * rank)
        local = whole[first : first + -(-len(whole) // ranks)]
        found[name] = Slice(first=first, rows=len(whole), local=torch.zeros_like(local) if empty else local)
    return found


def saved(folder: Path, ranks: int) -> list[Path]:
    paths = [folder / file_name(rank) for rank in range(ranks)]
    for rank, path in enumerate(paths):
        write_slices(path, of_rank(rank, ranks), 0)
    return paths


def test_slices_of_three_ranks_are_read_by_two(tmp_path: Path) -> None:
    paths = saved(tmp_path / "shards", 3)
    for rank in range(2):
        wanted, found = of_rank(rank, 2), of_rank(rank, 2, empty=True)
        assert read_slices(paths, found) is None
        assert all(torch.equal(found[name].local, wanted[name].local) for name in WHOLE)
    assert max(path.stat().st_size for path in paths) < 4096, "a view is written without what it is a view of"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    paths = saved(tmp_path / "shards", 2)
    assert read_slices(paths[:1], of_rank(1, 2, empty=True)) == "3 rows of model.a are missing"
    other = {**of_rank(0, 2), "adam.b": Slice(first=0, rows=3, local=torch.zeros(2))}
    assert read_slices(paths, other) == "adam.b has 2 rows of [], and here 3 of []"
    assert read_slices(paths, {"model.a": other["model.a"]}) == "rank-00000.pt differs in adam.b"


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_code_in_a_file_of_slices_is_not_run(tmp_path: Path) -> None:
    torch.save({"model.a": Hostile(tmp_path / "run")}, tmp_path / file_name(0))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read_slices([tmp_path / file_name(0)], of_rank(0, 1, empty=True))
    assert not (tmp_path / "run").exists()
