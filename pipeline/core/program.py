"""What torchrun starts on the nodes, as far as the pipeline has to know it: as data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from trainers.contract import run_folder

SECTION = "program"
"""The section of config.json that says which it is; the classifier has none."""

TORCHRUN = "trainers.torchrun"
"""The module of the node half that is torchrun; every snapshot has it."""

TORCHRUN_FILE = "trainers/torchrun.py"
"""Its path there."""


class Program(NamedTuple):
    """``entry`` is a module of the node half: each rank runs it, or, where it ``starts_torchrun``, it is torchrun's
    parent on each node.

    ``trained`` are the files of a run folder that a good end has left, ``folders`` those of which every file is one;
    ``evaluated`` is what the report makes of them. Without ``is_ours`` nobody knows what ranks do: they share no batch
    of a known size, and whether their runs come out equal is not known before ``doit reproduce``.
    """

    name: str
    entry: str
    trained: tuple[str, ...]
    folders: tuple[str, ...] = ()
    evaluated: tuple[str, ...] = ()
    starts_torchrun: bool = False
    is_ours: bool = True

    def files(self, run_dir: Path) -> tuple[str, ...]:
        """What a finished run has in its folder besides what describes it, but for what can't be read and for links
        that lead out of it."""
        top = os.path.realpath(run_dir)
        paths = (path for name in self.folders for path in sorted((run_dir / name).rglob("*")) if _is_kept(path, top))
        return (*self.trained, *(path.relative_to(run_dir).as_posix() for path in paths), *self.evaluated)


def _is_kept(path: Path, top: str) -> bool:
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
    """That of a run, from its config.json."""
    section = config.get(SECTION)
    return named(section.get("name") if isinstance(section, Mapping) else None)


def of_run(run_dir: Path) -> Program:
    """That of the run in this folder."""
    return of(documents.read_or_none(run_dir / run_folder.CONFIG) or {})


def named(name: object) -> Program:
    """That of a run, from what its result.json says."""
    return SCRIPT if name == SCRIPT.name else CLASSIFIER


def script_of(config: Mapping[str, Any]) -> str:
    """What a person calls a script's run: ``examples/train.py``."""
    section = config.get(SECTION)
    fields = section if isinstance(section, Mapping) else {}
    command = fields.get("command")
    return str(fields.get("script") or (command[0] if isinstance(command, list) and command else "?"))
