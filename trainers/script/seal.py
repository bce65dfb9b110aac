"""The seal of a run: which files it read that its key doesn't hold (see ``seal_hook``, which notes them)."""

from __future__ import annotations

import glob
import itertools
import os
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.script import rank_hook, seal_hook
from trainers.script.arguments import OUTSIDE
from trainers.script.seal_hook import ABSENT, ASKED, FOLDER, ORIGIN, PACKAGE, PATTERN, PROJECT, READ, SKIP, WORK

_OUTSIDE = f"{OUTSIDE}/"
_RECORDS = (".git/", ".hg/")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of one attempt on this host.

    Attributes:
        run_dir: the run folder; nothing in it but ``work`` is looked at.
        snapshot: the files that the key holds.
        work: the copy in which the script runs.
        script: the script, relative to ``work``.
        data: what {data}, {data2}, … stand for.
        project: the checkout, where it lies on this host.
        origin: the folder of a script that lies outside of the project, where it lies on this host.
    """

    run_dir: Path
    snapshot: Path
    work: Path
    script: str
    data: tuple[str, ...] = ()
    project: Path | None = None
    origin: Path | None = None


@dataclass(frozen=True)
class Unkeyed:
    """A file by its path in the project; ``was_read``: else it was looked for in vain."""

    path: str
    was_read: bool

    @property
    def how(self) -> str:
        """What was done with it, as summary.json has it."""
        return "read" if self.was_read else "looked for"


class Seal:
    """Written before the script starts; asked when all of it has ended."""

    def __init__(self, folder: Path, places: Places, *, watches: bool) -> None:
        """``folder`` is this attempt's own on this host. Raises OSError."""
        self._places, self._seen = places, folder / "seen"
        self.site = folder / "site"
        for path in (self._seen, self.site):
            path.mkdir()
        self._keyed = {path.relative_to(places.snapshot).as_posix() for path in places.snapshot.rglob("*")}
        started = folder / "started"  # by the clock of the file system, not by this host's
        started.touch()
        arguments = {
            "folder": str(self.site),
            "zones": zones(places),
            "report": str(self._seen),
            "since_ns": started.stat().st_ctime_ns,
            "watches": watches,
        }
        hooks = [Path(str(hook.__file__)).read_text(encoding="utf-8") for hook in (seal_hook, rank_hook)]
        text = "\n".join([*hooks, f"publish()\nbegin(**{arguments!r})\n"])
        (self.site / "sitecustomize.py").write_text(text, encoding="utf-8")

    def unkeyed(self, *, ended_well: bool) -> list[Unkeyed]:
        """What the run's processes noted, by path.

        Where the project doesn't lie on this host, nobody can say whether a file that was looked for in vain is one
        of its files: it is told only where the run failed.
        """
        found: dict[str, bool] = {}
        for path in sorted(self._seen.iterdir()):
            for how, kind, inside in _notes(path):
                for name in self._names(how, kind, inside, ended_well):
                    if name.rstrip("/") not in self._keyed and not _is_record(name):
                        found[name] = found.get(name, False) or how == READ
        parents = {f"{path}/" for name in found if not name.endswith("/") for path in Path(name).parents}
        return [Unkeyed(name, was_read) for name, was_read in sorted(found.items()) if name not in parents]

    def _names(self, how: str, kind: str, inside: str, ended_well: bool) -> Iterator[str]:
        """Of the files that a note stands for those that count."""
        if kind in (PROJECT, ORIGIN):
            if how == READ:  # a step alone notes what isn't there
                yield inside if kind == PROJECT else _OUTSIDE + inside
            return
        prefix = _OUTSIDE if inside.startswith(_OUTSIDE) else ""
        top, rest = self._places.origin if prefix else self._places.project, inside.removeprefix(prefix)
        if top is None:
            if how == ABSENT and not ended_well:
                yield inside
        elif how in (PACKAGE, PATTERN):
            pattern = f"{glob.escape(rest)}*.py" if how == PACKAGE else rest
            there = sorted(glob.glob(pattern, root_dir=top, recursive=True))  # noqa: PTH207  (without hidden files)
            lacks = (prefix + name for name in there if not (self._places.work / prefix / name).exists())
            yield from (name for name in lacks if (top / name.removeprefix(prefix)).is_file())
        elif inside.endswith("/"):
            if _holds(top / rest, modules=how != FOLDER):
                yield inside
        elif (top / rest).is_file():
            yield inside
        elif how == ASKED and not ended_well and _holds(top / rest):
            yield f"{inside}/"  # whether it exists was asked: Hydra does, before it lists its configurations


def _holds(folder: Path, *, modules: bool = False) -> bool:
    """Whether a file lies in it; ``modules``: of Python, as a package without __init__.py has them or one in it."""
    found = itertools.chain(folder.glob("*.py"), folder.glob("*/*.py")) if modules else folder.rglob("*")
    return any(path.is_file() for path in found)


def zones(places: Places) -> list[tuple[str, str]]:
    """(kind, real path): the innermost zone decides about a file, and where there is none nobody looks."""
    known = [(WORK, places.work), (SKIP, places.run_dir), (PROJECT, places.project), (ORIGIN, places.origin)]
    split = [os.path.split(path) for path in places.data]
    skipped = [*places.data, *installation()]
    return [
        *((kind, os.path.realpath(path)) for kind, path in known if path is not None),
        *((SKIP, os.path.realpath(path)) for path in skipped if path),
        *((SKIP, os.path.join(os.path.realpath(folder), name)) for folder, name in split),  # noqa: PTH118  (a link to one file)
    ]


def installation() -> list[str]:
    """Folders of the standard library and of what is installed, also where they lie in the project (.venv)."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    prefix = [sys.prefix] if sys.prefix != sys.base_prefix else []
    return [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages(), *prefix]


def _notes(path: Path) -> Iterator[tuple[str, str, str]]:
    import ast  # most runs leave no note

    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, SyntaxError):  # its process was killed while it wrote
            how, kind, inside = line.split(" ", 2)
            yield how, kind, str(ast.literal_eval(inside))


def _is_record(name: str) -> bool:
    """Of version control and of installed distributions: written down by libraries, and no part of what is computed."""
    return name.startswith(_RECORDS) or any(part.endswith((".egg-info", ".dist-info")) for part in name.split("/"))


def message(unkeyed: Collection[Unkeyed]) -> list[str]:
    """What a person is told: a line for files that were read, another for those that were looked for in vain."""
    lines = []
    for was_read in (True, False):
        names = [item.path for item in unkeyed if item.was_read is was_read]
        if names:
            was, are, them = ("was", "isn't", "it") if len(names) == 1 else ("were", "aren't", "them")
            what = f"{_joined(names)} {was} " + ("read" if was_read else f"looked for and {are} in the snapshot")
            lines.append(f"the key is not complete: {what}; add {them} to program.inputs")
    return lines


def _joined(names: list[str]) -> str:
    if len(names) > 8:
        return f"{', '.join(names[:8])} and {len(names) - 8} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def project_of(config: Mapping[str, Any], run_dir: Path) -> Path | None:
    """The checkout, where it lies on this host: as PACELINE_PROJECT says, else the folder above that of the runs."""
    told = os.environ.get("PACELINE_PROJECT")
    if told:
        return Path(told) if Path(told).is_dir() else None
    runs = Path(str(config.get("paths", {}).get("runs", "")))
    if runs.is_absolute() or not runs.parts or run_dir.parent.parts[-len(runs.parts) :] != runs.parts:
        return None
    return run_dir.parents[len(runs.parts)]


def origin_of(config: Mapping[str, Any], script: str) -> Path | None:
    """The folder of a script outside of the project, where it lies on this host."""
    typed = str(config["program"].get("script") or "")
    inside = script.removeprefix(_OUTSIDE)
    if not script.startswith(_OUTSIDE) or not os.path.isabs(typed) or not typed.endswith(f"/{inside}"):  # noqa: PTH117
        return None
    folder = Path(typed.removesuffix(f"/{inside}") or "/")
    return folder if folder.is_dir() else None
