"""Where the ranks of this node stand, read from their own memory (trainers/distributed/heartbeat.py writes it)."""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH116, PTH118, PTH119, PTH120, PTH123, PTH207
from __future__ import annotations

import contextlib
import glob
import os
import re
import struct
import time

from trainers.contract import run_folder
from trainers.contract.beats import CELLS, FILE, RankBeat

from .wire import Json

SETTLED_S = 2.0  # a script's checkpoint that nobody has written to for so long is taken for whole


def read_beats(node: Json) -> list[tuple[str, RankBeat]]:
    """The beat of each rank that can be read, with the folder of its files."""
    found = []
    ranks = os.path.join(glob.escape(node["state_dir"]), "ranks/*/attempt_*/*")
    for path in sorted(glob.glob(os.path.join(ranks, FILE))):
        with contextlib.suppress(OSError, struct.error, ValueError):
            with open(path, "rb") as file:  # gone with the rank's process
                pid, step, phase, moves, since_ns, collectives, own_ns, _ = CELLS.unpack(file.read(CELLS.size))
            folder = os.path.dirname(path)
            beat = RankBeat(
                rank=node["first_rank"] + int(os.path.basename(folder)),
                pid=pid,
                step=step,
                phase=phase,
                moves=moves,
                for_s=round((time.monotonic_ns() - since_ns) / 1e9, 3),
                collectives=collectives,
                own_s=round(own_ns / 1e9, 3),
            )
            found.append((folder, beat))
    return found


def newest_checkpoint(run_dir: str) -> int:
    """The step of the newest checkpoint that is whole, 0 without one: the .json beside it is written last."""
    sides = glob.glob(os.path.join(glob.escape(run_dir), "checkpoints/step-*.json"))
    found = (re.fullmatch(r"step-(\d+)\.json", os.path.basename(path)) for path in sides)
    return max((int(name[1]) for name in found if name), default=0)


def newest_change(run_dir: str) -> int:
    """When a script last wrote a checkpoint, in ms of unix time; 0 where there is none or it may be at it."""
    newest = 0.0
    for folder, _, names in os.walk(os.path.join(run_dir, run_folder.CHECKPOINTS)):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    return int(newest * 1000) + 1 if newest and time.time() - newest > SETTLED_S else 0
