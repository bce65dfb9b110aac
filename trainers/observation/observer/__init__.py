"""The code that runs in each observed Python process and notes the files, folders, variables and modules it reads.

This module has the names of zones (where a file lies) and accesses (what was done) in the notes, and their digests.
``hooks`` intercepts accesses, ``watch`` writes the notes. A ``sitecustomize.py`` starts the code before all other code
(``trainers.observation.processes``). Standard library only and Python >= 3.8, because a script may start another
interpreter. Nothing may raise: an exception in an audit hook aborts the operation."""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH208
from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would take longer than this whole module
    import hashlib
    from collections.abc import Iterable

WORK = "work"
"""Zone: the copy of the project in which the program runs."""
PROJECT = "project"
"""Zone: the checkout."""
ORIGIN = "origin"
"""Zone: the folder of a script that lies outside of the checkout."""
OUTSIDE = "outside"
"""Zone: everything else."""
SKIP = "skip"
"""Zone: not observed, such as the run folder, the data, Python and the system."""

# A file or folder was used:
READ = "read"  # a file was opened, outside of the copy
TEXT = "text"  # a source was opened other than by an import
WRITTEN = "written"  # a file was opened for writing
MADE_FOLDER = "made-folder"  # a folder was created outside of the copy
EXISTS = "exists"  # os.stat of an existing file of the checkout

# A file or folder was looked for in vain:
OPEN_FAILED = "open-failed"
STAT_FAILED = "stat-failed"  # os.stat, which opens nothing, as os.path.exists calls it
OWN_STAT_FAILED = "own-stat-failed"  # the same by the program's own code; libraries also look for files they will write
MODULE_MISSING = "module-missing"  # one of the files in which an import looked for a module
ARGUMENT_MISSING = "argument-missing"  # a file on the command line of a started program, which the copy lacks
FOLDER_MISSING = "folder-missing"  # a folder was listed, which the copy lacks

# Names in a folder were listed:
PACKAGE_LISTED = "package-listed"  # a package of the copy, which may lack some of its modules
PATTERN_SEARCHED = "pattern-searched"  # only the names that match a pattern
OWN_PATTERN_EMPTY = "own-pattern-empty"  # the same in the copy by the program's own code, which found no name
FOLDER_LISTED = "folder-listed"  # all names in a folder outside of the copy

VARIABLE = "variable"  # a variable of the environment was read by its name
IMPORTED = "imported"  # a module was imported; the note has its top-level name

HASHED_BYTES = 64 << 20  # a larger file is identified by size and modification time
original_stat, original_open = os.stat, os.open  # ``hooks`` replaces those in os


def digest_of(path: str, as_stamp: bool = False) -> str:
    """Return the sha256 of a regular file, or ``SIZE:MTIME_NS`` if it is large or ``as_stamp``. Raises OSError."""
    state = original_stat(path)
    if as_stamp or state.st_size > HASHED_BYTES:
        return f"{state.st_size}:{state.st_mtime_ns}"
    hashed, file = _sha256(b""), original_open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        while part := os.read(file, 1 << 20):
            hashed.update(part)
    finally:
        os.close(file)
    return hashed.hexdigest()


def digest_of_names(folder: str, without: Iterable[str] = ()) -> str:
    """Return the sha256 of the names in a folder, except ``__pycache__`` and ``without``. Raises OSError."""
    names = sorted(name for name in os.listdir(folder) if name != "__pycache__" and name not in without)
    return _sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()


def _sha256(content: bytes) -> hashlib._Hash:
    import hashlib  # only when needed: it loads OpenSSL, which would delay the start of every script

    return hashlib.sha256(content)
