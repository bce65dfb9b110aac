"""The identity of this process: its rank, and its attempt to finish the run. Imports no torch; no other module reads
torchrun's variables of ranks.

A rank may outlive its controller, agent and torchrun. It must not write into the run folder of a later attempt then;
``Attempt.check`` prevents it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainers.contract import run_folder
from trainers.core.errors import TrainerError


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
    """Read the ranks from torchrun's variables."""

    def number(name: str, default: int) -> int:
        return int(environment.get(name, default))

    world_size = number("WORLD_SIZE", 1)
    return Ranks(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        nnodes=number("GROUP_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """This process's attempt to finish the run."""

    run_dir: Path
    id: str  # torchrun's run id; '' without torchrun
    valid_ids: frozenset[str] | None  # of all attempts of the run; None: the run folder has no list of them

    def refuse(self, other: object) -> None:
        """Raise ValueError if the attempt ``other``, which wrote a file, is none of this run's."""
        if self.valid_ids is not None and other not in self.valid_ids:
            raise ValueError(
                f"it was written by attempt {other or '?'}, which {run_folder.ATTEMPT_IDS} doesn't name as one of this "
                "run's"
            )

    def check(self) -> None:
        """Raise TrainerError if the folder was removed, or belongs to a later attempt by now."""
        if not self.run_dir.is_dir():
            raise TrainerError(f"the run folder {self.run_dir} was removed while the run was going on")
        if self.valid_ids is None or not self.id:
            return
        ids = _read(self.run_dir)
        if not ids or ids[-1] != self.id:
            state = (
                f"belongs to attempt {ids[-1]} by now" if ids else f"has no readable {run_folder.ATTEMPT_IDS} any more"
            )
            raise TrainerError(f"the run folder {self.run_dir} {state}; attempt {self.id} ends")


def read_attempt(run_dir: Path) -> Attempt:
    """Return this process's attempt, from torchrun's environment and the run folder."""
    ids = _read(run_dir)
    valid_ids = None if ids is None else frozenset(ids)
    return Attempt(run_dir=run_dir, id=os.environ.get("TORCHELASTIC_RUN_ID", ""), valid_ids=valid_ids)


def _read(run_dir: Path) -> list[str] | None:
    """Return the ids of all attempts of a run, oldest first: None if their file is missing, [] if it is damaged."""
    try:
        ids = json.loads((run_dir / run_folder.ATTEMPT_IDS).read_text(encoding="utf-8"))["attempts"]
        return [str(item) for item in ids]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
