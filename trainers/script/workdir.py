"""The working directory of a script on one host: laid out as a copy of the snapshot, and kept between attempts.

``given.json`` has the size and time of each file that was laid out, so all other files are the script's. Standard
library only, because the controller does the same with files that hosts sent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainers.contract import run_folder
from trainers.observation import notes
from trainers.observation.observer import OPEN_FAILED, OWN_PATTERN_EMPTY, OWN_STAT_FAILED, WORK
from trainers.script.files import work_folder, write_json
from trainers.script.metrics.recorder import keep_unrecorded
from trainers.script.resume import is_best, is_checkpoint, newest_checkpoint, whole_since
from trainers.script.settings import ScriptConfig

BY_ITSELF = ""
"""In place of a placeholder's name: the script looks for its checkpoint by itself."""
_LAID, _LOOKED_FOR = "laid", "looked_for.json"  # folder of a copy that is being made; paths that were looked for

Stamps = Mapping[str, Sequence[int]]
"""Path in the run folder → size and time of the last write (ns)."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """This node's part of a run folder. ``is_sent``: the run folder was sent to this host, and isn't shared by all."""

    run_dir: Path
    rank: int
    is_sent: bool

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def outputs(self) -> Path:
        if self.is_first or self.is_sent:
            return self.run_dir / run_folder.OUTPUTS
        return self.run_dir / run_folder.NODES / str(self.rank) / run_folder.OUTPUTS

    def shown(self, path: Path) -> str:
        return path.relative_to(self.run_dir).as_posix()

    def place(self, path: Path, name: str) -> str:
        """Return where a folder will lie on the controller, for messages; ``name``: below nodes/RANK there."""
        return self.shown(path) if self.is_first or not self.is_sent else f"{run_folder.NODES}/{self.rank}/{name}"


def copy_of(run_dir: Path, node_rank: int) -> Path:
    return work_folder(run_dir, node_rank) / run_folder.WORK_COPY


def laid_out_stamps(run_dir: Path, node_rank: int) -> Stamps:
    """Return the stamps in ``given.json``; none if nothing was laid out yet."""
    try:
        value: dict[str, list[int]] = json.loads(
            (work_folder(run_dir, node_rank) / run_folder.GIVEN).read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return value


def written_by_script(run_dir: Path, node_rank: int) -> list[Path]:
    """Return the files in a script's copy of the project, and above it, that it has written or changed."""
    # the copy lies two folders below this one (run_folder.WORK_COPY), so that ../x and ../../x are found, too
    above = work_folder(run_dir, node_rank) / run_folder.ABOVE
    return [*files_changed_since(above, run_dir, laid_out_stamps(run_dir, node_rank))]


def files_changed_since(top: Path, run_dir: Path, laid_out: Stamps) -> Iterator[Path]:
    """Yield the files below a folder that were not laid out or were changed since, without links."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            with suppress(OSError):  # removed just now
                if path.is_file() and not path.is_symlink() and not is_as_laid_out(path, run_dir, laid_out):
                    yield path


def is_as_laid_out(path: Path, run_dir: Path, laid_out: Stamps) -> bool:
    return list(laid_out.get(path.relative_to(run_dir).as_posix(), ())) == _stamp(path)


def _stamp(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def checkpoints_to_resume(settings: ScriptConfig, run_dir: Path) -> dict[str, Path]:
    """Return placeholder → its checkpoint, if any; ``BY_ITSELF`` → one that the script looks for by itself."""
    if not settings.resumes:
        looked_for_by_script = _looked_for_checkpoint(settings, run_dir)
        return {} if looked_for_by_script is None else {BY_ITSELF: looked_for_by_script}
    work, laid_out = copy_of(run_dir, 0), laid_out_stamps(run_dir, 0)
    chosen_for: dict[str, Path] = {}
    for name in settings.resume_names:
        pattern = name.partition(":")[2] or settings.resume_pattern
        chosen = newest_checkpoint(run_dir / run_folder.CHECKPOINTS, pattern)
        if chosen is None and not settings.names_checkpoints:  # it may save in its working directory
            top = work if pattern is None else work / settings.workdir
            chosen = newest_checkpoint(top, pattern, is_output=lambda path: not is_as_laid_out(path, run_dir, laid_out))
        if chosen is not None:
            chosen_for[name] = chosen
    return chosen_for


def _looked_for_checkpoint(settings: ScriptConfig, run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint that an attempt looked for in vain and later wrote, as with os.path.exists
    or glob. None with several nodes, because only the first has the file. Best weights are left out: a script looks
    for them only to compare. A ``resume_pattern`` that matches nothing starts over.
    """
    work, folders = copy_of(run_dir, 0), [*(run_dir / run_folder.WORK).glob("node*/" + run_folder.WORK_COPY)]
    if folders != [work]:
        return None
    laid_out, pattern = laid_out_stamps(run_dir, 0), settings.resume_pattern
    paths = {path for name in looked_for(run_dir) for path in _matching(work, name)}
    if pattern is not None:
        paths &= {*(work / settings.workdir).glob(pattern)}
    written_times = {
        path: whole_since(path) for path in paths if not is_best(path) and not is_as_laid_out(path, run_dir, laid_out)
    }
    complete = {path: time_ns for path, time_ns in written_times.items() if time_ns > 0}
    return max(complete, key=lambda path: complete[path], default=None)


def _matching(work: Path, name: str) -> list[Path]:
    """Return the file that ``looked_for`` names, or the checkpoints that match a pattern there."""
    if "*" not in name and "?" not in name and "[" not in name:
        return [work / name] if (work / name).is_file() else []
    return [path for path in work.glob(name) if not path.is_symlink() and is_checkpoint(path)]


def newest_output(run_dir: Path) -> Path | None:
    """Return the newest checkpoint among the outputs of a finished script; None without any."""
    return newest_checkpoint(run_dir / run_folder.OUTPUTS)


def looked_for(run_dir: Path) -> list[str]:
    """Return paths and patterns, in the first node's copy, that the script's code or an ``open`` looked for in vain."""
    folder = work_folder(run_dir, 0)
    try:
        before: list[str] = json.loads((folder / _LOOKED_FOR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = []
    with suppress(OSError):  # an attempt that was not observed
        accesses = (OPEN_FAILED, OWN_STAT_FAILED, OWN_PATTERN_EMPTY)
        failed = notes.Notes(folder / notes.FOLDER).of(*accesses, zones=(WORK,))
        return list(dict.fromkeys([*before, *(note.path for note in failed)]))
    return before


def keep_looked_for(run_dir: Path) -> None:
    if names := looked_for(run_dir):
        write_json(work_folder(run_dir, 0) / _LOOKED_FOR, names)


def checkpoints_stamp(settings: ScriptConfig, run_dir: Path) -> str:
    """Return the checkpoints of ``checkpoints_to_resume`` and their times, as one text to compare; '' without any."""
    chosen = checkpoints_to_resume(settings, run_dir).values()
    return " ".join(f"{path.relative_to(run_dir)} {whole_since(path)}" for path in chosen)


def lay_out(run_dir: Path, node_rank: int, *, others: Stamps | None = None) -> Path:
    """Copy the snapshot to the script's working directory, without touching files of the script; return that folder.

    This may be killed at any moment, so each file is listed in ``given.json`` before it appears there; else it would
    count as the script's. ``others``: further files to list. Raises OSError.
    """
    folder = work_folder(run_dir, node_rank)
    work, new_copy = copy_of(run_dir, node_rank), folder / _LAID
    work.mkdir(parents=True, exist_ok=True)
    # remove the files of an earlier attempt, except those that the script has changed
    laid_out = laid_out_stamps(run_dir, node_rank)
    for name in laid_out:
        path = run_dir / name
        with suppress(OSError):
            if path.is_relative_to(work) and is_as_laid_out(path, run_dir, laid_out):
                path.unlink()
    # copy to another folder first: renamed files keep the times that are listed
    shutil.rmtree(new_copy, ignore_errors=True)
    shutil.copytree(run_dir / run_folder.CODE, new_copy, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: work / path.relative_to(new_copy) for path in new_copy.rglob("*") if path.is_file()}
    stamps = {target.relative_to(run_dir).as_posix(): _stamp(path) for path, target in files.items()}
    write_json(folder / run_folder.GIVEN, {**(others or {}), **stamps})
    for path, target in files.items():
        if not os.path.lexists(target):  # else the script has altered it
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(new_copy)
    return work


def set_aside(run_dir: Path, node_rank: int, to: Path, *, with_checkpoints: bool = False) -> list[str]:
    """Move files of earlier attempts to the folder ``to``, for an attempt that starts anew; return their paths there.
    ``with_checkpoints``: also those in {checkpoints}, which can't be resumed from. Raises OSError.
    """
    if node_rank == 0:
        keep_unrecorded(run_dir)
    folder, work = work_folder(run_dir, node_rank), copy_of(run_dir, node_rank)
    target = to if node_rank == 0 else to / run_folder.NODES / str(node_rank)
    # the first node's run folder has the files of all nodes, as they were sent back
    nodes = [node.relative_to(run_dir).as_posix() for node in run_dir.glob(f"{run_folder.NODES}/*")]
    moved_folders = ["outputs", *(f"{node}/{name}" for node in nodes for name in ("outputs", run_folder.WORK))]
    moved_folders += ["checkpoints", *(f"{node}/checkpoints" for node in nodes)] if with_checkpoints else []
    moved_folders = moved_folders if node_rank == 0 else []
    moves = [(path, target / "workdir" / below(path, work)) for path in written_by_script(run_dir, node_rank)]
    for name in moved_folders:
        moves += [(path, to / path.relative_to(run_dir)) for path in files_changed_since(run_dir / name, run_dir, {})]
    for path, new_path in moves:
        new_path.parent.mkdir(parents=True, exist_ok=True)
        path.replace(new_path)
    for emptied in (folder / run_folder.ABOVE, *(run_dir / name for name in moved_folders)):
        shutil.rmtree(emptied, ignore_errors=True)
    if (over_limit := folder.with_name(f"{folder.name}-left")).exists():  # what was above program.outputs_limit
        target.mkdir(parents=True, exist_ok=True)
        over_limit.replace(target / "left")
    return [new_path.relative_to(to).as_posix() for _, new_path in moves]


def take_carried(run_dir: Path, node_rank: int) -> Stamps:
    """Move the files that this node wrote in earlier attempts from where they were sent to where the script looks.
    Returns the first node's files in {checkpoints}, which this node needn't send back. Raises OSError.
    """
    carried = run_dir / run_folder.CARRIED / str(node_rank)
    checkpoints = run_dir / run_folder.CHECKPOINTS
    of_first: dict[str, list[int]] = {}
    if node_rank != 0:
        paths = files_changed_since(checkpoints, run_dir, {})
        of_first = {path.relative_to(run_dir).as_posix(): _stamp(path) for path in paths}
    for path in [*files_changed_since(carried, carried, {})]:
        target = run_dir / path.relative_to(carried)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        of_first.pop(target.relative_to(run_dir).as_posix(), None)
    shutil.rmtree(run_dir / run_folder.CARRIED, ignore_errors=True)
    return of_first


def below(path: Path, workdir: Path) -> str:
    """Return the path from the working directory; ``up/`` stands for a folder above."""
    return "/".join("up" if part == ".." else part for part in Path(os.path.relpath(path, workdir)).parts)
