"""Which files of the project a step's Python processes read though its key doesn't hold them.

The audit hook is that of scripts (``trainers.script.seal_hook``). A step runs in the checkout, so nothing is missing
there and nothing is kept from it. Noted is what it reads, and names that it looked for: a file that isn't there may be
another time.
"""

from __future__ import annotations

import ast
import glob
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.core.places import HOME

_HOOK = "trainers/script/seal_hook.py"  # of the node half: read as text
_PROJECT, _SKIP, _READ, _PATTERN, _MODULE = "project", "skip", "read", "pattern", "module"  # its words
_CALLER = ("trainers/__init__.py", "trainers/script/__init__.py", "trainers/script/call.py")  # of functions
_RECORDS = (".git/", ".hg/")


class Reading:
    """Written before the step's program starts; asked when all of it has ended."""

    def __init__(self, folder: Path, root: Path, runs_dir: Path) -> None:
        """``folder`` is new, and this step's own. Raises OSError."""
        self.site, self._seen = folder / "site", folder / "seen"
        self.site.mkdir(parents=True)
        self._seen.mkdir()
        self._root = root
        skipped = [str(runs_dir), *_installation()]
        zones = [(_PROJECT, os.path.realpath(root)), *((_SKIP, os.path.realpath(path)) for path in skipped)]
        since_ns = self._seen.stat().st_ctime_ns  # by the clock of the file system: what the step writes is later
        begin = (
            f"\n_watch = Watch({zones!r}, {str(self._seen)!r}, {since_ns})"
            f"\nsys.addaudithook(hook_of(_watch))\nwatch_stat(_watch)\nchain({str(self.site)!r})"
            "\nsys.meta_path.append(LastFinder(_watch))\n"
        )
        text = (HOME / _HOOK).read_text(encoding="utf-8")
        (self.site / "sitecustomize.py").write_text(text + begin, encoding="utf-8")

    def unkeyed(self, keyed: Collection[str]) -> list[str]:
        """The files, by their path in the project, without those of ``keyed``. Raises OSError."""
        found = {inside for how, inside in self._notes() if how == _READ}
        return sorted(name for name in found.difference(keyed, _CALLER) if not _is_record(name))

    def looked_for(self) -> dict[str, list[str]]:
        """Patterns of names below the project, each with those that there are now. Raises OSError."""
        found: dict[str, list[str]] = {}
        for how, inside in {*self._notes()}:
            if how == _PATTERN:
                found[inside] = names(self._root, inside)
            elif how != _READ and (how != _MODULE or inside.endswith(".py")) and not _is_record(inside):
                escaped = glob.escape(inside)
                if not names(self._root, escaped):  # else it was made meanwhile
                    found[escaped] = []
        return dict(sorted(found.items()))

    def _notes(self) -> Iterator[tuple[str, str]]:
        """(how, path in the project)."""
        for notes in self._seen.iterdir():
            for line in notes.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, SyntaxError):  # its process was killed while it wrote
                    how, kind, inside = line.split(" ", 2)
                    if kind == _PROJECT:
                        yield how, str(ast.literal_eval(inside))


def names(root: Path, pattern: str) -> list[str]:
    """What matches below the project, sorted."""
    return sorted(glob.glob(pattern, root_dir=root, recursive=True))  # noqa: PTH207  (which takes hidden ones, too)


def _installation() -> list[str]:
    """Where the standard library and installed packages lie, also in the project (.venv)."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    prefix = [sys.prefix] if sys.prefix != sys.base_prefix else []
    return [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), *prefix]


def _is_record(name: str) -> bool:
    """Of version control and of installed distributions: libraries look at them, and nothing is computed from them."""
    return name.startswith(_RECORDS) or ".egg-info/" in name or ".dist-info/" in name
