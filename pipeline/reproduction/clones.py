"""Check out a commit with its submodules into new repositories that borrow objects from local ones or from an archive.

Nothing is fetched, and existing git folders are not modified. Objects from an archive are verified by git itself,
because the ids of commits, trees and files are their digests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import PacelineError
from pipeline.core.processes import git

_WITHOUT_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
"""Ignores the user's git configuration, so that attributes of a foreign commit can't run a filter program."""
_LARGEST_BYTES = 16 << 30  # unpacked size of a commit from an archive
_ALONE = ("--window=0", "--no-reuse-object", "--compression=0", "--threads=1")  # equal commits give equal bytes
_PATHS = ("--null", "--get-regexp", r"^submodule\..*\.path$")


def clone(repository: Path, place: Path, commit: str) -> None:
    """Read the commit of ``repository`` into the index of a new repository at ``place``, without checking files out.

    The run's patch is based on git's stored content, which filters and line-end conversion of a checkout may alter, so
    it is applied to the index.

    Raises:
        PacelineError: git refuses.
    """
    cloning = ("clone", "--quiet", "--shared", "--no-checkout", str(repository), str(place))
    _run(repository, *cloning)
    _take(place, commit)


def pack(repository: Path, commit: str, to: Path) -> None:
    """Write the commit, without history, as a git pack into the folder ``to``. Raises PacelineError.

    git creates a pack in its object folder and renames it. That folder may be read-only or on another disk, so a
    temporary object folder is used.
    """
    env = {**git.without_checkout(repository), "GIT_NO_REPLACE_OBJECTS": "1"}
    listed = _run(repository, "rev-list", "--objects", "--no-walk", commit, env=env)
    ids = "".join(f"{line.partition(' ')[0]}\n" for line in listed.split("\n") if line).encode()
    with tempfile.TemporaryDirectory(dir=to) as objects:
        env |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_ALTERNATE_OBJECT_DIRECTORIES": _quoted(repository / "objects")}
        made = _run(repository, "pack-objects", "--quiet", *_ALONE, f"{objects}/made", env=env, input_=ids).strip()
        Path(objects, f"made-{made}.pack").rename(to / f"{commit}.pack")


def _quoted(path: Path) -> str:
    """Quote a path for git's colon-separated list of paths."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def unpack(packs: Sequence[Path], place: Path, commit: str) -> None:
    """Read the commit of ``packs`` into the index of a new repository at ``place``, like ``clone``.

    Raises:
        PacelineError: a pack is damaged, the packs lack the commit or some of its files or hold more than 16 GiB, or a
            path of the commit leaves the repository or enters its git folder.
    """
    kind = ("--object-format=sha256",) if len(commit) == 64 else ()
    place.mkdir(parents=True)
    _run(place, "init", "--quiet", "--template=", *kind, env=_WITHOUT_SETTINGS)
    for path in packs:
        target = place / ".git" / "objects" / "pack" / f"pack-{path.name}"
        shutil.copyfile(path, target)
        _run(place, "index-pack", str(target), env=_WITHOUT_SETTINGS)
    sizes = _run(place, "cat-file", "--batch-all-objects", "--batch-check=%(objectsize)", env=_WITHOUT_SETTINGS)
    if (total := sum(map(int, sizes.split()))) > (most := min(_LARGEST_BYTES, shutil.disk_usage(place).free)):
        raise PacelineError(f"{packs[0].parent.name} of the archive unpacks to {total:,} bytes, of at most {most:,}")
    if not git.has_commit(place, commit):
        raise PacelineError(f"{packs[0].parent.name} of the archive doesn't hold commit {commit}, which the run names")
    _take(place, commit)


def _take(place: Path, commit: str) -> None:
    _run(place, "update-ref", "--no-deref", "HEAD", commit)
    _run(place, "read-tree", commit)


def check_out(place: Path, *, without_settings: bool) -> None:
    """Check out the files of the index; ``without_settings`` ignores git's configuration. Raises PacelineError."""
    env = _WITHOUT_SETTINGS if without_settings else {}
    _run(place, "checkout-index", "--all", "--force", "--index", "--quiet", env=env)


def _run(folder: Path, *words: str, env: Mapping[str, str] | None = None, input_: bytes | None = None) -> str:
    done = git.git(folder, *words, env=env, input_=input_, errors="surrogateescape")
    if done is None or done.code != 0:
        why = done.stderr.strip() if done else "git is missing"
        raise PacelineError(f"git {words[0]} in {folder} failed: {why}")
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Submodule:
    """A submodule of the commit.

    ``path`` is relative to the repository; ``repository`` is a local git folder with ``commit`` (None: there is none).
    """

    path: str
    commit: str
    repository: Path | None


def recorded(repository: Path, commit: str, checkout: Path | None) -> Iterator[Submodule]:
    """Yield the submodules of a commit recursively, outer ones first.

    Args:
        repository: a git folder that has the commit.
        checkout: a possible checkout of that repository with its submodules; None for a repository from an archive,
            which contains the submodules' objects too.
    """
    listed = _answer(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    links = [row.partition("\t") for row in listed.split("\0") if row.startswith("160000 ")]
    names = _names(repository, commit) if links else {}
    for about, _, path in links:
        wanted = about.split()[2]
        inner = checkout / path if checkout is not None else None
        places = _repositories(repository, names.get(path, path), inner) if inner is not None else [repository]
        source = next((place for place in places if _answer(place, "cat-file", "-t", wanted) == "commit\n"), None)
        yield Submodule(path=path, commit=wanted, repository=source)
        if source is not None:
            for item in recorded(source, wanted, inner):
                yield Submodule(path=f"{path}/{item.path}", commit=item.commit, repository=item.repository)


def fill(place: Path, root: Path | None, commit: str) -> Iterator[str]:
    """Check out the submodules of ``commit`` in its copy at ``place``; yield a line with a fix for each missing one.

    Args:
        root: a folder of the checkout from which the copy was made; None if the files came from an archive.

    Raises:
        PacelineError: git refuses.
    """
    top = git.top_of(root) if root is not None else None
    repository = (git.common_folder(top) if top is not None else None) or place / ".git"
    for item in recorded(repository, commit, top):
        target = place / item.path
        is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
        if not target.resolve().is_relative_to(place.resolve()) or not is_empty:
            continue  # the run's patch put other files or a link at this path
        if item.repository is not None:
            clone(item.repository, target, item.commit)
            check_out(target, without_settings=root is None)
        elif top is None:
            yield f"{item.path} isn't in the archive: it wasn't there when the run was exported"
        else:
            yield f"{item.path} at {item.commit[:10]} isn't here; if the run needs it: {_mend(top, item)}"


def _mend(top: Path, item: Submodule) -> str:
    place = shlex.quote(item.path)
    if (top / item.path / ".git").exists():  # the submodule is checked out, but at another commit
        return f"git -C {shlex.quote(str(top / item.path))} fetch origin {item.commit}, then the same command"
    return f"git -C {shlex.quote(str(top))} submodule update --init --recursive {place}, then the same command"


def _repositories(outer: Path, name: str, checkout: Path) -> Iterator[Path]:
    """Yield the places where git may keep a submodule: its checkout, or the folder for submodules not checked out."""
    own = git.common_folder(checkout) if (checkout / ".git").exists() else None
    if own is not None:
        yield own
    if ".." not in Path(name).parts and (kept := outer / "modules" / name.lstrip("/")).is_dir():
        yield kept  # the name comes from the commit and may be anything, hence the check above


def _names(repository: Path, commit: str) -> dict[str, str]:
    """Return path → git's name for the submodule, from .gitmodules of a commit."""
    listed = _answer(repository, "config", "--blob", f"{commit}:.gitmodules", *_PATHS)
    rows = [row.partition("\n") for row in listed.split("\0") if row]
    return {path: key.removeprefix("submodule.").removesuffix(".path") for key, _, path in rows}


def _answer(repository: Path, *words: str) -> str:
    """Return git's output, '' on failure."""
    done = git.git(repository, *words, env=git.without_checkout(repository), errors="surrogateescape")
    return done.stdout if done is not None and done.code == 0 else ""
