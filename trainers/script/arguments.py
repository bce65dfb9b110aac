"""What stands behind torchrun's own options: the script, its arguments and variables, with every placeholder filled."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainers.script.settings import ScriptConfig, filled, groups, names, placeholder_of_data

OUTSIDE = "_script"
"""Where the snapshot has the files of a script that lies outside of the project."""
_TORN = -1
_NOTES = (".json", ".yaml", ".yml", ".txt", ".log", ".csv", ".md", ".jsonl", ".sha256")
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".bad")


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where things lie on this host. ``work`` is this attempt's copy of the snapshot, ``script`` relative to it."""

    run_dir: Path
    work: Path
    script: str
    data: tuple[str, ...]
    seed: int
    resume: Path | None

    @property
    def checkpoints(self) -> Path:
        """What a later attempt goes on from."""
        return self.run_dir / "checkpoints"

    @property
    def outputs(self) -> Path:
        """{run}: what the script leaves."""
        return self.run_dir / "outputs"


def argv(settings: ScriptConfig, paths: Paths) -> list[str]:
    """The script (a program: torchrun's ``--no-python`` and its words) and its arguments; without torchrun these alone.

    The ``--`` ends torchrun's own options: else its argparse takes a script's ``--log`` for the beginning of one of
    them, and drops a ``--`` of the script.
    Without a checkpoint the argument that names {resume} is left out, with its flag.
    """
    values = _values(settings, paths)
    words: list[str] = []
    for group in groups(settings.args):
        if paths.resume is None and any("resume" in names(word) for word in group):
            if len(group) == 1 and "=" not in group[0] and words and words[-1].startswith("-"):
                words.pop()
        else:
            words += [filled(word, values) for word in group]
    if settings.script:
        return [*(["--"] if settings.torchrun else []), str(paths.work / paths.script), *words]
    first = ["--no-python", "--"] if settings.torchrun else []
    return [*first, program(settings, paths), *settings.command[1:], *words]


def variables(settings: ScriptConfig, paths: Paths) -> dict[str, str]:
    """``program.env`` with placeholders filled."""
    values = _values(settings, paths)
    return {
        name: filled(value, values)
        for name, value in settings.env.items()
        if paths.resume is not None or "resume" not in names(value)
    }


def _values(settings: ScriptConfig, paths: Paths) -> dict[str, str]:
    return {
        **{placeholder_of_data(at)[1:-1]: path for at, path in enumerate(paths.data)},
        "run": str(paths.outputs),
        "checkpoints": str(paths.checkpoints),
        "resume": str(paths.resume),
        "seed": str(paths.seed),
    }


def program(settings: ScriptConfig, paths: Paths) -> str:
    """A path is one in the snapshot, wherever it lay before; whoever starts it looks for a plain name in PATH."""
    word = settings.command[0]
    if "/" not in word:
        return word
    parts = Path(word).parts[1:] if word.startswith("/") else Path(word).parts
    inside = [Path(settings.workdir, *parts), *(Path(*parts[at:]) for at in range(len(parts)))]
    for place in (*inside, Path(OUTSIDE, parts[-1])):
        if (paths.work / place).is_file():
            return os.path.normpath(paths.work / place)
    return word


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest file or folder of checkpoints that is whole, by modification time; None without one.

    Left out are names of unfinished files, empty ones, notes such as .json, and a zip (torch.save writes one) that
    breaks off, with the folder in which it lies: who saves several files was killed in the midst. Where some are
    called checkpoint-N, the rest is something else (transformers' Trainer lays the final weights beside them).
    """
    found = [(time_ns, path.name, path) for path in sorted(folder.glob("*")) if (time_ns := _whole_since(path)) > 0]
    numbered = [row for row in found if re.fullmatch(r"checkpoint[-_]\d+", row[1])]
    return max(numbered or found)[2] if found else None


def _whole_since(path: Path) -> int:
    """When it was last written (ns), 0 for what nobody can go on from, _TORN for a file that breaks off. Of a folder,
    its newest file counts."""
    name = path.name.lower()
    if name.startswith((".", "~", "tmp")) or name.endswith(("~", *_UNFINISHED)) or ".tmp" in name:
        return 0
    try:
        if path.is_dir():
            times = [_whole_since(inside) for inside in path.iterdir()]
            return _TORN if _TORN in times else max(times, default=0)
        if name.endswith(_NOTES) or "tfevents" in name:
            return 0
        state = path.stat()
        if _is_torn(path):
            return _TORN
        return state.st_mtime_ns if state.st_size else 0
    except OSError:
        return 0


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if not is_zip:
        return False
    import zipfile  # most runs begin without a checkpoint

    return not zipfile.is_zipfile(path)
