"""The two programs that torchrun starts on the nodes, described as data for the controller.

``classifier`` is the built-in training, ``script`` a training script of the user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from trainers.contract import run_folder

SECTION = "program"
"""The section of config.json that names the program; the classifier's configuration has none."""

TORCHRUN, TORCHRUN_FILE = "trainers.torchrun", "trainers/torchrun.py"
"""The node half's module that runs torchrun, and its path in the snapshot of a run's code."""


class Program(NamedTuple):
    """One program: its module on the nodes, and the files that a run with it leaves in its run folder."""

    name: str
    entry: str  # the module that each rank runs; with starts_torchrun: that each node runs once
    trained: tuple[str, ...]  # files that a successful run leaves
    folders: tuple[str, ...] = ()  # folders of which all files belong to the result
    evaluated: tuple[str, ...] = ()  # files that the evaluation report adds
    starts_torchrun: bool = False
    is_ours: bool = True  # False: a user's script, whose batch size and determinism are unknown

    def files(self, run_dir: Path) -> tuple[str, ...]:
        """List the result files of a finished run, without unreadable files and links that leave its folder."""
        top = os.path.realpath(run_dir)
        paths = (path for name in self.folders for path in sorted((run_dir / name).rglob("*")) if _is_kept(path, top))
        return (*self.trained, *(path.relative_to(run_dir).as_posix() for path in paths), *self.evaluated)


def _is_kept(path: Path, top: str) -> bool:
    """Return True for a readable file that, if it is a link, leads to a place below ``top``."""
    is_inside = not path.is_symlink() or Path(os.path.realpath(path)).is_relative_to(top)
    return is_inside and path.is_file() and os.access(path, os.R_OK)


CLASSIFIER = Program(
    name="classifier",
    entry="trainers.classifier",
    trained=(run_folder.FINAL_WEIGHTS, run_folder.METRICS, run_folder.PREDICTIONS),
    evaluated=(run_folder.REPORT, run_folder.CONFUSION_MATRIX),
)
SCRIPT = Program(
    name="script",
    entry="trainers.script.start",
    trained=(run_folder.METRICS, run_folder.OUTPUT_DIGESTS),
    folders=("outputs", "checkpoints", "nodes"),
    starts_torchrun=True,
    is_ours=False,
)


def of(config: Mapping[str, Any]) -> Program:
    """Return the program of a run, from its config.json."""
    section = config.get(SECTION)
    return named(section.get("name") if isinstance(section, Mapping) else None)


def of_run(run_dir: Path) -> Program:
    """Return the program of the run in this folder."""
    return of(documents.read_or_empty(run_dir / run_folder.CONFIG))


def named(name: object) -> Program:
    """Return the program of a run, from the name in its result.json."""
    return SCRIPT if name == SCRIPT.name else CLASSIFIER


def script_of(config: Mapping[str, Any]) -> str:
    """Return the user-facing name of a script's run: ``examples/train.py``."""
    section = config.get(SECTION)
    fields = section if isinstance(section, Mapping) else {}
    command = fields.get("command")
    return str(fields.get("script") or (command[0] if isinstance(command, list) and command else "?"))
