"""The newest checkpoint of a run folder on this node."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time

from trainers.contract import run_folder

SETTLED_S = 2.0  # a script's checkpoint counts as complete if nothing was written to it for this time


def newest_checkpoint(run_dir: str) -> int:
    """Return the step of the newest complete checkpoint, whose .json is written last; 0 without one."""
    sides = glob.glob(os.path.join(glob.escape(run_dir), "checkpoints/step-*.json"))
    matches = (re.fullmatch(r"step-(\d+)\.json", os.path.basename(path)) for path in sides)
    return max((int(name[1]) for name in matches if name), default=0)


def newest_change(run_dir: str) -> int:
    """Return when a script last wrote a checkpoint, in ms of unix time; 0 if there is none, or it may be writing."""
    newest = 0.0
    for folder, _, names in os.walk(os.path.join(run_dir, run_folder.CHECKPOINTS)):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
    return int(newest * 1000) + 1 if newest and time.time() - newest > SETTLED_S else 0
