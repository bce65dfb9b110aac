"""The working directory of a script on one host: laid out from the snapshot, and kept between attempts.

``given.json`` names what was laid out there, with sizes and times, so all else was written by the script. One that goes
on from a checkpoint finds what it had written beside the snapshot; one that begins anew finds the snapshot alone, and
what earlier attempts left is set aside. Standard library only: the controller does the same with what hosts sent it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainers.contract import run_folder
from trainers.script.files import write_json
from trainers.script.recorder import keep_unrecorded
from trainers.script.resume import newest_checkpoint, whole_since
from trainers.script.settings import ScriptConfig

_LAID = "laid"

Stamps = Mapping[str, Sequence[int]]
"""Path in the run folder → size and time of the last write (ns)."""


def folder_of(run_dir: Path, node_rank: int) -> Path:
    """What a script's attempts have on one host: its copy of the snapshot (``copy_of``), files of Paceline's own."""
    return run_dir / run_folder.WORK / f"node{node_rank}"


def copy_of(run_dir: Path, node_rank: int) -> Path:
    """The script's copy of the project."""
    return folder_of(run_dir, node_rank) / run_folder.WORK_COPY


def given(run_dir: Path, node_rank: int) -> Stamps:
    """What was laid out there; nothing where all that lies there was written by the script (a host sent it here)."""
    try:
        value: dict[str, list[int]] = json.loads(
            (folder_of(run_dir, node_rank) / run_folder.GIVEN).read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return value


def written_by_script(run_dir: Path, node_rank: int) -> list[Path]:
    """The files in its copy of the project, and above it, that were not laid out there, or were altered since."""
    above = folder_of(run_dir, node_rank) / run_folder.ABOVE
    return [*written(above, run_dir, given(run_dir, node_rank))]


def written(top: Path, run_dir: Path, known: Stamps) -> Iterator[Path]:
    """The files below a folder that were not laid out there, or were altered since. Links are none."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            with suppress(OSError):  # removed just now
                if path.is_file() and not path.is_symlink() and not is_given(path, run_dir, known):
                    yield path


def is_given(path: Path, run_dir: Path, known: Stamps) -> bool:
    """Whether a file lies there as it was laid out. Raises OSError."""
    return list(known.get(path.relative_to(run_dir).as_posix(), ())) == _stamp(path)


def _stamp(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


def checkpoints_to_resume(settings: ScriptConfig, run_dir: Path) -> dict[str, Path]:
    """Placeholder ({resume}, {resume:GLOB}) → the checkpoint that it stands for; those without one are left out.

    They lie in {checkpoints}, or, where no argument names that folder, in the working directory of the first node.
    """
    work, known = copy_of(run_dir, 0), given(run_dir, 0)
    chosen_for: dict[str, Path] = {}
    for name in settings.resume_names:
        pattern = name.partition(":")[2] or settings.resume_pattern
        chosen = newest_checkpoint(run_dir / run_folder.CHECKPOINTS, pattern)
        if chosen is None and not settings.names_checkpoints:
            top = work if pattern is None else work / settings.workdir
            chosen = newest_checkpoint(top, pattern, counts=lambda path: not is_given(path, run_dir, known))
        if chosen is not None:
            chosen_for[name] = chosen
    return chosen_for


def checkpoints_stamp(settings: ScriptConfig, run_dir: Path) -> str:
    """Which checkpoints ``checkpoints_to_resume`` chooses, and when they were written; '' without any."""
    chosen = checkpoints_to_resume(settings, run_dir).values()
    return " ".join(f"{path.relative_to(run_dir)} {whole_since(path)}" for path in chosen)


def lay_out(run_dir: Path, node_rank: int, *, besides: Stamps | None = None) -> Path:
    """Put the snapshot where the script runs, under what it has written there before; that folder.

    Safe to be ended at any moment: a file that is neither in ``given.json`` nor altered does not come into being.

    Args:
        besides: what else was given to this host, for ``given.json``.

    Raises:
        OSError: it can't be written.
    """
    folder = folder_of(run_dir, node_rank)
    work, laid = copy_of(run_dir, node_rank), folder / _LAID
    work.mkdir(parents=True, exist_ok=True)
    known = given(run_dir, node_rank)
    for name in known:
        path = run_dir / name
        with suppress(OSError):
            if path.is_relative_to(work) and is_given(path, run_dir, known):
                path.unlink()
    shutil.rmtree(laid, ignore_errors=True)
    shutil.copytree(run_dir / run_folder.CODE, laid, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: work / path.relative_to(laid) for path in laid.rglob("*") if path.is_file()}
    stamps = {target.relative_to(run_dir).as_posix(): _stamp(path) for path, target in files.items()}
    write_json(folder / run_folder.GIVEN, {**(besides or {}), **stamps})
    for path, target in files.items():
        if not os.path.lexists(target):  # else the script has altered it
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(laid)
    return work


def set_aside(run_dir: Path, node_rank: int, to: Path, *, with_checkpoints: bool = False) -> list[str]:
    """Move what earlier attempts wrote on a host out of the way of one that begins anew; their paths below ``to``.

    Of the first node also {run} and what other hosts sent, and ``with_checkpoints`` what no attempt can go on from;
    its metrics that aren't recorded stay (``keep_unrecorded``). Raises OSError.
    """
    if node_rank == 0:
        keep_unrecorded(run_dir)
    folder, work = folder_of(run_dir, node_rank), copy_of(run_dir, node_rank)
    target = to if node_rank == 0 else to / run_folder.NODES / str(node_rank)
    nodes = [node.relative_to(run_dir).as_posix() for node in run_dir.glob(f"{run_folder.NODES}/*")]
    parts = ["outputs", *(f"{node}/{name}" for node in nodes for name in ("outputs", run_folder.WORK))]
    parts += ["checkpoints", *(f"{node}/checkpoints" for node in nodes)] if with_checkpoints else []
    parts = parts if node_rank == 0 else []
    moves = [(path, target / "workdir" / below(path, work)) for path in written_by_script(run_dir, node_rank)]
    for name in parts:
        moves += [(path, to / path.relative_to(run_dir)) for path in written(run_dir / name, run_dir, {})]
    for path, place in moves:
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    for place in (folder / run_folder.ABOVE, *(run_dir / name for name in parts)):
        shutil.rmtree(place, ignore_errors=True)
    if (left := folder.with_name(f"{folder.name}-left")).exists():  # what was above program.outputs_limit
        target.mkdir(parents=True, exist_ok=True)
        left.replace(target / "left")
    return [place.relative_to(to).as_posix() for _, place in moves]


def take_carried(run_dir: Path, node_rank: int) -> Stamps:
    """On a host with a run folder of its own: put what this node had saved before where the script looks for it.

    Returns:
        What of {checkpoints} is the first node's, which this one doesn't have to send back.

    Raises:
        OSError: it can't be moved.
    """
    carried = run_dir / run_folder.CARRIED / str(node_rank)
    checkpoints = run_dir / run_folder.CHECKPOINTS
    of_first = (
        {}
        if node_rank == 0
        else {path.relative_to(run_dir).as_posix(): _stamp(path) for path in written(checkpoints, run_dir, {})}
    )
    for path in [*written(carried, carried, {})]:
        target = run_dir / path.relative_to(carried)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        of_first.pop(target.relative_to(run_dir).as_posix(), None)
    shutil.rmtree(run_dir / run_folder.CARRIED, ignore_errors=True)
    return of_first


def below(path: Path, workdir: Path) -> str:
    """Its path from the working directory; ``up/`` stands for a folder above."""
    return "/".join("up" if part == ".." else part for part in Path(os.path.relpath(path, workdir)).parts)


def in_words(names: Sequence[str], size_bytes: int | None = None) -> str:
    """``results.csv, logs/a.txt and 3 more``, with their size."""
    shown = ", ".join(map(printed, names[:3])) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    return shown if size_bytes is None else f"{shown} ({size(size_bytes)})"


def printed(name: str) -> str:
    """A file's name as a line can hold it: what isn't UTF-8, or ends a line, is written out."""
    return name if name.isprintable() else repr(name)[1:-1]


def size(count_bytes: int) -> str:
    """``1.5 GiB``, as limits are told."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count_bytes >= factor:
            return f"{count_bytes / factor:.1f} {unit}"
    return f"{count_bytes} B"
