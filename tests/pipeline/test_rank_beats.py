"""What is said of the ranks while they train, and of one that is slower than the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.runs import ranks
from pipeline.runs.ranks import RankRow
from trainers.contract.beats import Phase, RankBeat


def row(rank: int, **change: Any) -> RankRow:
    usual: dict[str, Any] = {"step": 58, "phase": Phase.COMPUTING, "for_s": 0.1, "own_s": 60.0}
    return RankRow(rank=rank, host=f"node{rank}", **{**usual, **change})


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], ""),
        ([row(0), row(1)], "all at step 58"),
        ([row(0), row(1, step=57)], "steps 57 to 58"),
        ([row(0, phase=Phase.WAITING, for_s=12.4), row(1, phase=Phase.LOADING, for_s=12.4)],
         "all at step 58; behind: rank 1 on node1 (step 58, loading data 12 s)"),
        ([row(0), *(row(number, step=57, for_s=3.0) for number in range(1, 6))],
         "steps 57 to 58; behind: rank 1 on node1 (step 57, computing gradients 3 s), rank 2 on node2 (step 57, "
         "computing gradients 3 s), rank 3 on node3 (step 57, computing gradients 3 s) and 2 more ranks"),
    ],
)  # fmt: skip
def test_who_lags(told: list[RankRow], said: str) -> None:
    assert ranks.lagging(told) == said


def test_a_rank_that_is_a_fifth_slower_than_the_median_is_named_with_what_it_cost() -> None:
    told = [row(0), row(1, own_s=90.0), row(2, own_s=71.9), row(3)]
    assert ranks.slow(told) == [
        "rank 1 on node1 was slow: its own work took 90.0 s, 50% more than the median rank's 60.0 s, and the others "
        "waited 30.0 s for it"
    ]
    assert ranks.slow([row(0, own_s=1.0), row(1, own_s=2.5)]) == [], "too short to say anything of a host"
    assert ranks.slow([row(0)]) == []


def test_what_was_noted_is_read_again_and_what_is_damaged_is_nothing(tmp_path: Path) -> None:
    beat = RankBeat(rank=3, pid=9, step=58, phase=Phase.WAITING, moves=4, for_s=2.0, collectives=60, own_s=1.5)
    told = ranks.rows_of([("b", beat)])
    ranks.write(tmp_path, told, ["slow"])
    assert ranks.read(tmp_path) == (told, ["slow"])
    assert (told[0].rank, told[0].host, told[0].own_s) == (3, "b", 1.5)
    for text in ("", "null", '{"ranks": [{"rank": 1}], "notes": []}', '{"ranks": 7}'):
        (tmp_path / "ranks.json").write_text(text)
        assert ranks.read(tmp_path) == ([], [])
