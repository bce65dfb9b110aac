"""Before anything computed from the data is kept: nobody has written to them since they were verified."""

from __future__ import annotations

from trainers.core.errors import TrainerError
from trainers.data.pack import PackWatch, set_aside
from trainers.distributed.process_group import Node


def check_data(watch: PackWatch | None, node: Node) -> None:
    """Every rank calls it. Raises TrainerError: a node's data was written to."""
    damage = watch.damage() if watch is not None else None
    whole = node.all_reduce_min(int(damage is None))
    if damage is not None:
        raise set_aside(damage)
    if not whole:
        raise TrainerError("the data of another rank were altered during the training; the same command fixes it")
