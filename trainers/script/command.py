"""The command line of a user's script: the words behind torchrun's own options (the script and its arguments) and its
variables, with every placeholder filled. ``require_program`` checks that this host can start a program, because
torchrun would print a long traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainers.contract import run_folder
from trainers.core.errors import ConfigError
from trainers.script.settings import ScriptConfig, filled, groups, is_resume, names, placeholder_of_data


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Paths of the attempt on this host. ``work``: the script's copy of the snapshot; ``script``: relative to it.
    ``resume``: name of the placeholder (resume, resume:GLOB) → its checkpoint; a name for which there is none is
    missing.
    """

    run_dir: Path
    work: Path
    script: str
    data: tuple[str, ...]
    seed: int
    resume: Mapping[str, Path]

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / run_folder.CHECKPOINTS

    @property
    def outputs(self) -> Path:
        return self.run_dir / run_folder.OUTPUTS


def argv(settings: ScriptConfig, paths: Paths) -> list[str]:
    """Return the script (``-m`` and a module; ``--no-python`` and a program) and its arguments. ``--`` ends torchrun's
    own options, because its argparse would take the script's ``--log`` for an abbreviation of one. Without a
    checkpoint, the argument that names {resume} is left out, with its flag.
    """
    values = _values(settings, paths)
    words: list[str] = []
    for group in groups(settings.args):
        if any(_lacks_checkpoint(word, paths) for word in group):
            # the flag may be the word before, if args are a list: [--checkpoint, "{resume}"]
            if len(group) == 1 and "=" not in group[0] and words and words[-1].startswith("-"):
                words.pop()
        else:
            words += [filled(word, values) for word in group]
    if settings.module:
        return ["-m", *(["--"] if settings.torchrun else []), settings.module, *words]
    if settings.script:
        return [*(["--"] if settings.torchrun else []), str(paths.work / paths.script), *words]
    first = ["--no-python", "--"] if settings.torchrun else []
    return [*first, program(settings, paths), *settings.command[1:], *words]


def variables(settings: ScriptConfig, paths: Paths) -> dict[str, str]:
    """Return ``program.env`` with placeholders filled."""
    values = _values(settings, paths)
    return {name: filled(value, values) for name, value in settings.env.items() if not _lacks_checkpoint(value, paths)}


def _lacks_checkpoint(text: str, paths: Paths) -> bool:
    return any(is_resume(name) and name not in paths.resume for name in names(text))


def _values(settings: ScriptConfig, paths: Paths) -> dict[str, str]:
    return {
        **{placeholder_of_data(at)[1:-1]: path for at, path in enumerate(paths.data)},
        "run": str(paths.outputs),
        "checkpoints": str(paths.checkpoints),
        "seed": str(paths.seed),
        **{name: str(path) for name, path in paths.resume.items()},
    }


def program(settings: ScriptConfig, paths: Paths) -> str:
    """Return the program to start: a path in the copy of the snapshot, or a plain name for PATH."""
    word = settings.command[0]
    if "/" not in word:
        return word
    # the path was typed for the user's computer: try it below workdir, then each of its ends below the copy, as an
    # absolute path into the project has the project's folders in front; last, a program outside of the project
    parts = Path(word).parts[1:] if word.startswith("/") else Path(word).parts
    candidates = [Path(settings.workdir, *parts), *(Path(*parts[at:]) for at in range(len(parts)))]
    for candidate in (*candidates, Path(run_folder.SCRIPT_OUTSIDE, parts[-1])):
        if (paths.work / candidate).is_file():
            return os.path.normpath(paths.work / candidate)
    return word


def require_program(word: str, env: Mapping[str, str], workdir: Path) -> None:
    """Raise ConfigError for a missing program, which torchrun's traceback of twenty lines wouldn't name."""
    path = env.get("PATH", os.defpath)
    # relative entries of PATH begin at the folder in which the program is started
    folders = os.pathsep.join(str(workdir / entry) for entry in path.split(os.pathsep))
    file = str(workdir / word) if "/" in word else shutil.which(word, path=folders)
    if file is None:
        raise ConfigError(
            f"program.command=[{word}]: no {word} in PATH={path}; install it on this host, or set program.env.PATH "
            f"(a file of the project is named with a slash: ./{word})"
        )
    if not os.access(file, os.X_OK) or not Path(file).is_file():
        raise ConfigError(
            f"program.command=[{word}]: {file} is no program here (an executable file); install it on this host, or "
            "name a file of the project"
        )
