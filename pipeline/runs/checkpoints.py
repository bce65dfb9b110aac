"""The checkpoints of a run folder as the controller reads them, without torch: which one the next attempt resumes from.

The trainer does the same with the copy on its node; trainers/checkpoint/folder.py describes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core import program as programs
from pipeline.core.files import canonical_json, sha256_file, sha256_text, write_atomic
from pipeline.runs.metrics_file import bad_lines
from trainers.contract import run_folder
from trainers.core.config import ConfigError
from trainers.script import workdir
from trainers.script.files import in_words
from trainers.script.settings import ScriptConfig
from trainers.script.workdir import checkpoints_to_resume

_OPTION = re.compile(r"""["']--(\w*(?:resume|checkpoint|ckpt|restart)[\w-]*)["']""")
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def go_on_from_checkpoint(run_dir: Path) -> Iterator[str]:
    """Make the newest complete checkpoint the newest file, and cut metrics.jsonl to the lines up to it.

    The trainer does the same on its node, so both copies stay equal to the byte. Yields warnings about damage. Raises
    OSError.
    """
    if not programs.of_run(run_dir).is_ours:  # trainers.script.metrics keeps rows that it doesn't log again
        return
    text = ""
    for path in sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), reverse=True):
        try:
            text = read_verified(path)["metrics"]
            break
        except DAMAGE as error:
            yield f"checkpoint {path.name} is skipped: {error}"
            set_aside(path)
    path = run_dir / run_folder.METRICS
    if path.exists():
        bad = bad_lines(path)
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            yield f"{path.name}: line {bad[0]}{more} was damaged; all that the checkpoint knows is there again"
        if path.read_bytes() == text.encode():
            return
    write_atomic(path, text)


def script_goes_on(run_dir: Path) -> bool:
    """Whether a script that starts now gets a checkpoint, by the same rules as ``trainers.script.start``."""
    settings = settings_of(run_dir)
    return settings is not None and bool(checkpoints_to_resume(settings, run_dir))


def newest_of_script(run_dir: Path, settings: ScriptConfig) -> Path | None:
    """Return the newest checkpoint that a script could resume from, even if no argument names one. Raises OSError."""
    if not settings.resumes:
        folder = ["{checkpoints}"] if settings.names_checkpoints else []
        settings = replace(settings, args=["{resume}", *folder])
    return next(iter(checkpoints_to_resume(settings, run_dir).values()), None)


def resume_offer(run_dir: Path, settings: ScriptConfig) -> str:
    """Return the argument that would give a script the checkpoint that it saved, by an option in its source.

    '' if an argument names it already, or there is no checkpoint. Raises OSError.
    """
    if checkpoints_to_resume(settings, run_dir) or (newest := newest_of_script(run_dir, settings)) is None:
        return ""
    source = run_dir / run_folder.CODE / (settings.script or "")
    text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
    options = _OPTION.findall(text)
    work = workdir.copy_of(run_dir, 0)
    is_in_work = newest.is_relative_to(work)
    shown = newest.relative_to(work if is_in_work else run_dir)
    if options:
        best = min(options, key=lambda name: (not name.startswith("resume"), len(name)))
        return f"the argument --{best} '{{resume}}' would give it {shown}"
    if is_in_work:
        return f"an option of it that takes a checkpoint, as in --resume '{{resume}}', would get {shown}"
    return ""  # it may read {checkpoints} by itself


def saved_by_script(run_dir: Path) -> str:
    """Return the checkpoints that a script resumes from, and their times, as text to compare; '' without any."""
    settings = settings_of(run_dir)
    return "" if settings is None else workdir.checkpoints_stamp(settings, run_dir)


def settings_of(run_dir: Path) -> ScriptConfig | None:
    """Return the settings of a script's run; None for the classifier."""
    section = documents.read_or_empty(run_dir / run_folder.CONFIG).get(programs.SECTION) or {}
    try:
        return ScriptConfig(**section)
    except (ConfigError, TypeError):
        return None


def set_aside_of_script(run_dir: Path, attempt: int) -> str | None:
    """Move away what hosts sent of earlier attempts.

    For a script that starts over on hosts with their own folders.

    Return where it is, in words; None: there was nothing, or the script resumes from it. Raises OSError.
    """
    settings = settings_of(run_dir)
    if settings is None or checkpoints_to_resume(settings, run_dir):
        return None
    place = run_dir / run_folder.ATTEMPTS / str(attempt) / "before"
    names = workdir.set_aside(run_dir, 0, place, with_checkpoints=settings.resumes)
    return f"what earlier attempts left is kept in {place}: {in_words(names)}" if names else None


def resumes(section: Mapping[str, Any]) -> bool:
    """Whether the section ``program`` of a run names a checkpoint for its script."""
    try:
        return ScriptConfig(**section).resumes
    except (ConfigError, TypeError):
        return False


def read_verified(path: Path) -> dict[str, Any]:
    """Read the .json beside a checkpoint, and check the checkpoint's sha256.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: the checkpoint is torn, altered or unreadable.
    """
    side = read_side(path)
    seen = sha256_file(path)
    if seen != side["sha256"]:
        raise ValueError(f"the sha256 of {path.name} is {seen[:12]}, {path.stem}.json says {side['sha256'][:12]}")
    return side


def read_side(path: Path) -> dict[str, Any]:
    """Read the .json beside a checkpoint without checking the checkpoint. Raises as ``read_verified`` does."""
    side: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    rest = {name: value for name, value in side.items() if name != "digest"}
    if side["digest"] != sha256_text(canonical_json(rest)):
        raise ValueError(f"{path.stem}.json was altered: its digest does not match its content")
    return side


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the folder, complete or not; 0 without one."""
    return max(map(step_of, (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt")), default=0)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint or of its .json; 0 for another file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def set_aside(path: Path) -> None:
    """Rename a checkpoint and its files to ``*.bad``, so that it is ignored. Raises OSError."""
    for part in (path, path.with_suffix(".json")):
        with suppress(FileNotFoundError):
            part.replace(part.with_name(f"{part.name}.bad"))
