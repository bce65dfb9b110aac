"""Arguments of a script that name files or folders of this computer: they are its data, as ``program.data`` is."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.keys.script_files import DataPath
from trainers.script.settings import names, placeholder_of_data

_PATH = re.compile(r"(?P<name>[^/=]*=)?(?P<path>(?:/|~/).*[^/].*)", re.DOTALL)
_WRITTEN = re.compile(
    r"\b(artifacts|cache|checkpoints?|ckpts?|dest|destination|export|(log|out|output|save|run|work)(s|dir|file)?|logging|"
    r"results?|scratch|te?mp|tensorboard|tb|wandb)\b"
)
"""In the name of an option: the script writes there."""
_READ = re.compile(r"\b(from|init|input|load|pretrained|resume)\b")
_OF_THE_SYSTEM = ("/dev", "/proc", "/sys")


@dataclass
class DataArguments:
    """The data of a script, and its arguments with ``{data}`` in place of each path of this computer.

    ``notes``: a line for each path, on what counts of it.
    """

    args: Any
    data: list[DataPath]
    untracked: Sequence[str] = ()
    root: Path = Path()
    notes: list[str] = field(default_factory=list)

    def word(self, name: str, where: str, word: Any) -> Any:
        """One argument; ``name`` is that of its option, ``where`` its field."""
        match = _PATH.fullmatch(word) if isinstance(word, str) else None
        if match is None or names(word):
            return word
        path = Path(os.path.abspath(Path(match["path"]).expanduser()))  # noqa: PTH100
        option = re.sub(r"[-_.=]", " ", f"{name} {match['name'] or ''}").lower()
        is_written = _WRITTEN.search(option) is not None and _READ.search(option) is None
        shown = f"{where}={match['path']}"
        if any(path.is_relative_to(Path(text).expanduser()) for text in self.untracked):
            return word
        if not path.exists():
            if not is_written:
                self.notes.append(
                    f"{shown} isn't here: the key has its name and not its contents; program.data=<where it is here> "
                    f"and {{data}} in its place send it to the hosts"
                )
            return word
        if self._is_too_wide(path) or not (path.is_file() or path.is_dir()):
            return word
        if is_written:
            self.notes.append(
                f"{shown} is not in the key: by its name the script writes there; {{run}} is a folder that is kept, "
                f"and program.data={path} with {{data}} makes it data"
            )
            return word
        if path.is_dir() and not any(path.iterdir()):
            self.notes.append(f"{shown} is empty, so nothing of it is in the key")
            return word
        return f"{match['name'] or ''}{self._placeholder(path, where, shown)}"

    def _is_too_wide(self, path: Path) -> bool:
        """Whether a folder holds more than data: the project, a home, all temporary files, or what is no file."""
        within = (self.root, Path.home(), Path(tempfile.gettempdir()))
        return any(place.is_relative_to(path) for place in within) or str(path).startswith(_OF_THE_SYSTEM)

    def _placeholder(self, path: Path, where: str, shown: str) -> str:
        for number, known in enumerate(self.data):
            if path.is_relative_to(known.path):
                inside = path.relative_to(known.path).as_posix()
                return placeholder_of_data(number) + ("" if inside == "." else f"/{inside}")
        self.data.append(DataPath(where, path))
        self.notes.append(
            f"{shown} is data: its contents are part of the key, and it is sent to the hosts; "
            f"program.untracked=['{path}'] leaves it where it is and out of the key"
        )
        return placeholder_of_data(len(self.data) - 1)


def tracked(args: Any, data: Sequence[DataPath], untracked: Sequence[str], root: Path) -> DataArguments:
    """``program.args`` with its paths as data behind ``data``, which ``program.data`` names."""
    found = DataArguments(args=args, data=[*data], untracked=untracked, root=root)
    if isinstance(args, Mapping):
        found.args = {name: _of_option(found, str(name), value) for name, value in args.items()}
    elif isinstance(args, list):
        flags = ["", *(word if isinstance(word, str) and word.startswith("-") else "" for word in args)]
        found.args = [found.word(flags[at], f"program.args[{at}]", word) for at, word in enumerate(args)]
    return found


def _of_option(found: DataArguments, name: str, value: Any) -> Any:
    words = [found.word(name, f"program.args.{name}", word) for word in (value if isinstance(value, list) else [value])]
    return words if isinstance(value, list) else words[0]
