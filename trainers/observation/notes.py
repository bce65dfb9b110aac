"""The reader of the notes that observed processes have left in a folder, one file per process."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainers.observation.observer import MADE_FOLDER, ORIGIN, PROJECT, VARIABLE, WORK, WRITTEN

FOLDER = "seen"
"""Name of the folder for the notes of an attempt's processes."""


class Note(NamedTuple):
    """A line of a process's notes. ``access`` and ``zone``: see ``observer``. ``path``: relative to the zone's folder,
    or the name of a variable or module. ``digest``: of a file's content or of the names in a folder, else ``-``.
    """

    at_ns: int
    access: str
    zone: str
    digest: str
    path: str


class Notes:
    """All notes in a folder, sorted by time, except those of files that the processes themselves wrote before."""

    def __init__(self, folder: Path) -> None:
        self.all = [*_of_foreign_files(sorted(note for path in folder.iterdir() for note in _parsed(path)))]

    def of(self, *accesses: str, zones: Collection[str] = ()) -> Iterator[Note]:
        """Yield the notes of these accesses in these zones; without zones, in all."""
        return (note for note in self.all if note.access in accesses and (not zones or note.zone in zones))

    @property
    def variables(self) -> list[str]:
        return sorted({note.path for note in self.of(VARIABLE)})

    @property
    def own_variables(self) -> list[str]:
        return sorted({note.path for note in self.of(VARIABLE, zones=(WORK, PROJECT, ORIGIN))})


def _parsed(path: Path) -> Iterator[Note]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, SyntaxError):  # the process was killed while it wrote the line
            at_ns, access, zone, digest, noted_path = line.split(" ", 4)
            yield Note(int(at_ns), access, zone, digest, str(ast.literal_eval(noted_path)))


def _of_foreign_files(notes: Iterable[Note]) -> Iterator[Note]:
    """Yield notes in order of time, except those of files that the program itself wrote before."""
    written: set[tuple[str, str]] = set()
    made_folders: dict[str, tuple[str, ...]] = {}
    for note in notes:
        if note.access in (WRITTEN, MADE_FOLDER):
            yield note
            written.add((note.zone, note.path))
            if note.access == MADE_FOLDER:
                made_folders[note.zone] = (*made_folders.get(note.zone, ()), f"{note.path}/")
        elif (note.zone, note.path) not in written and not note.path.startswith(made_folders.get(note.zone, ())):
            yield note
