"""Read this rank's identity from the environment. Imports no torch; no other module reads RANK."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainers.contract import variables


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The identity of this process among all ranks, as torchrun sets it (one rank without torchrun)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nnodes: int = 1
    node_rank: int = 0


def read_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Read the ranks from torchrun's variables.

    With rendezvous=file, each node runs its own torchrun, which does not know the node's rank. The plan then sets the
    ranks in PACELINE_ variables.
    """

    def number(name: str, default: int) -> int:
        return int(environment.get(name, default))

    if variables.FIRST_RANK in environment:
        return Ranks(
            rank=number(variables.FIRST_RANK, 0) + number("LOCAL_RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=number(variables.WORLD_SIZE, 1),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            nnodes=number(variables.NNODES, 1),
            node_rank=number(variables.NODE_RANK, 0),
        )
    world_size = number("WORLD_SIZE", 1)
    return Ranks(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        nnodes=number("GROUP_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
    )
