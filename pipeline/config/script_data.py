"""Which paths in a script's arguments are data: their contents count in the key, and they are sent to the hosts."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.keys.script_files import DataPath
from trainers.script.settings import names, placeholder_of_data

_PATH = re.compile(r"(?P<name>[^/=]*=)?(?P<path>(?:/|~/).*[^/].*)", re.DOTALL)
_WRITTEN = re.compile(
    r"\b(artifacts|cache|checkpoints?|ckpts?|dest|destination|export|(log|out|output|save|run|work)(s|dir|file)?|logging|"
    r"results?|scratch|te?mp|tensorboard|tb|wandb|exps?|experiments?|snapshots?|workspace|project|o|"
    r"(model|target) dir)\b"
)
"""In the name of an option: the script writes there."""
_READ = re.compile(r"\b(from|init|input|load|pretrained|resume)\b")
_OF_THE_SYSTEM = ("/dev", "/proc", "/sys")


def is_written(option: str) -> bool:
    """True if a script writes to the path of an option with this name: ``--output-dir``."""
    spaced = re.sub(r"[-_.=]", " ", option).lower()
    return _WRITTEN.search(spaced) is not None and _READ.search(spaced) is None


class ScriptData:
    """A script's data: ``program.data``, and local paths in its arguments, which {data} replaces there.

    ``notes`` has a line about how each path counts.

    Args:
        paths: those of ``program.data``.
        untracked: paths that every host has already (``program.untracked``).
        root: the project.
    """

    def __init__(self, paths: Sequence[DataPath], untracked: Sequence[str], root: Path) -> None:
        self.paths, self._root = [*paths], root
        self._untracked = [Path(path).expanduser() for path in untracked]
        self.notes = list[str]()

    def with_placeholders(self, args: Any) -> Any:
        """Return ``program.args`` with a placeholder for each path that is data, and add these paths to ``paths``."""
        if isinstance(args, Mapping):
            return {name: self._values(str(name), value) for name, value in args.items()}
        if not isinstance(args, list):
            return args
        options = ["", *(word if isinstance(word, str) and word.startswith("-") else "" for word in args)]
        return [self._word(options[at], f"program.args[{at}]", word) for at, word in enumerate(args)]

    def _values(self, option: str, value: Any) -> Any:
        field = f"program.args.{option}"
        if isinstance(value, list):
            return [self._word(option, field, word) for word in value]
        return self._word(option, field, value)

    def _word(self, option: str, field: str, word: Any) -> Any:
        """Return one argument, which may begin with a name of its own: ``path=/data``."""
        match = _PATH.fullmatch(word) if isinstance(word, str) else None
        if match is None or names(word):
            return word
        prefix, written_path = match["name"] or "", match["path"]
        path = Path(os.path.abspath(Path(written_path).expanduser()))  # noqa: PTH100
        if any(path.is_relative_to(untracked) for untracked in self._untracked):
            return word
        is_output = is_written(f"{option} {prefix}")
        if not path.exists():
            if not is_output:
                self.notes.append(
                    f"{field}={written_path} isn't here: the key has its name and not its contents; program.data=<its "
                    f"path here> and {{data}} in its place send it to the hosts"
                )
            return word
        if self._is_too_wide(path) or not (path.is_file() or path.is_dir()):
            return word
        if is_output:
            self.notes.append(
                f"{field}={written_path} is not in the key: by its name the script writes there; {{run}} is a folder "
                f"that is kept, and program.data={path} with {{data}} makes it data"
            )
            return word
        if path.is_dir() and not any(path.iterdir()):
            self.notes.append(f"{field}={written_path} is empty, so nothing of it is in the key")
            return word
        return f"{prefix}{self._placeholder(path, field, written_path)}"

    def _is_too_wide(self, path: Path) -> bool:
        """Return True if a folder holds more than data: the project, a home, all temporary files, or special files."""
        inside = (self._root, Path.home(), Path(tempfile.gettempdir()))
        return any(folder.is_relative_to(path) for folder in inside) or str(path).startswith(_OF_THE_SYSTEM)

    def _placeholder(self, path: Path, field: str, written_path: str) -> str:
        for number, data in enumerate(self.paths):
            if path.is_relative_to(data.path):
                below = path.relative_to(data.path).as_posix()
                return placeholder_of_data(number) + ("" if below == "." else f"/{below}")
        self.paths.append(DataPath(field, path))
        self.notes.append(
            f"{field}={written_path} is data: its contents are part of the key, and it is sent to the hosts; "
            f"program.untracked=['{path}'] leaves it where it is and out of the key"
        )
        return placeholder_of_data(len(self.paths) - 1)
