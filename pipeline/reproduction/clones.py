"""A commit, and its submodules at the commits that it records, in repositories that borrow the objects of others or
have those that an archive brings.

Nothing is fetched, and nothing is written into the git folders that are here. What an archive brings is proven by git
itself: the ids of a commit, its trees and files are their digests.
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
"""So that no filter program is known that the attributes of somebody's commit could name."""
_LARGEST_BYTES = 16 << 30  # of all files of a commit that an archive brings
_ALONE = ("--window=0", "--no-reuse-object", "--compression=0", "--threads=1")  # equal commits give equal bytes
_PATHS = ("--null", "--get-regexp", r"^submodule\..*\.path$")


def clone(repository: Path, place: Path, commit: str) -> None:
    """The commit of the git folder ``repository``, in the index of a new repository at ``place`` and nowhere else.

    A patch is made of what git keeps, which filters and line ends of a checkout may alter: it is applied to the index.

    Raises:
        PacelineError: git refuses.
    """
    cloning = ("clone", "--quiet", "--shared", "--no-checkout", str(repository), str(place))
    _run(repository, *cloning)
    _take(place, commit)


def pack(repository: Path, commit: str, to: Path) -> None:
    """Write the commit, without its history, as a git pack into the folder ``to``. Raises PacelineError.

    git makes a pack in the folder of its objects and renames it: that folder may be read-only, or on another disk.
    """
    env = {**git.without_checkout(repository), "GIT_NO_REPLACE_OBJECTS": "1"}
    listed = _run(repository, "rev-list", "--objects", "--no-walk", commit, env=env)
    ids = "".join(f"{line.partition(' ')[0]}\n" for line in listed.split("\n") if line).encode()
    with tempfile.TemporaryDirectory(dir=to) as objects:
        env |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_ALTERNATE_OBJECT_DIRECTORIES": _quoted(repository / "objects")}
        made = _run(repository, "pack-objects", "--quiet", *_ALONE, f"{objects}/made", env=env, input_=ids).strip()
        Path(objects, f"made-{made}.pack").rename(to / f"{commit}.pack")


def _quoted(path: Path) -> str:
    """As git reads one of a list of paths, which colons part."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def unpack(packs: Sequence[Path], place: Path, commit: str) -> None:
    """The commit of ``packs`` in the index of a new repository at ``place``, as ``clone`` has it.

    Raises:
        PacelineError: a pack is damaged, the packs don't hold that commit with all of its files or hold more than
            16 GiB, or a path of it leads out of the repository or into its git folder.
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
    """The files of the index; ``without_settings``: as git does it where nobody configured it. Raises PacelineError."""
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
    """``path`` is relative to the repository; ``repository`` is a git folder that has ``commit`` (None: none here)."""

    path: str
    commit: str
    repository: Path | None


def recorded(repository: Path, commit: str, checkout: Path | None) -> Iterator[Submodule]:
    """The submodules of a commit and theirs in turn, outer ones first.

    Args:
        repository: a git folder that has the commit.
        checkout: where a checkout of that repository may lie, with those of its submodules; None of one that an
            archive has brought, which has the objects of its submodules, too.
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
    """Check out the submodules of ``commit`` in its copy at ``place``; a line for each that can't be, with what helps.

    Args:
        root: a folder of the checkout from which the copy was made; None where an archive brought the files.

    Raises:
        PacelineError: git refuses.
    """
    top = git.top_of(root) if root is not None else None
    repository = (git.common_folder(top) if top is not None else None) or place / ".git"
    for item in recorded(repository, commit, top):
        if not (place / item.path).resolve().is_relative_to(place.resolve()) or not _is_empty(place / item.path):
            continue  # the run's changes put something else there, or a link in the way
        if item.repository is not None:
            clone(item.repository, place / item.path, item.commit)
            check_out(place / item.path, without_settings=root is None)
        elif top is None:
            yield f"{item.path} isn't in the archive: it wasn't there when the run was exported"
        else:
            yield f"{item.path} at {item.commit[:10]} isn't here; if the run needs it: {_mend(top, item)}"


def _mend(top: Path, item: Submodule) -> str:
    place = shlex.quote(item.path)
    if (top / item.path / ".git").exists():  # it is there, at commits of other times
        return f"git -C {shlex.quote(str(top / item.path))} fetch origin {item.commit}, then the same command"
    return f"git -C {shlex.quote(str(top))} submodule update --init --recursive {place}, then the same command"


def _repositories(outer: Path, name: str, checkout: Path) -> Iterator[Path]:
    """Where git may keep a submodule: in its checkout, or what it has kept of one that isn't checked out now."""
    own = git.common_folder(checkout) if (checkout / ".git").exists() else None
    if own is not None:
        yield own
    if ".." not in Path(name).parts and (kept := outer / "modules" / name.lstrip("/")).is_dir():
        yield kept  # a commit may say any name


def _names(repository: Path, commit: str) -> dict[str, str]:
    """Path → the name under which git keeps it, as .gitmodules of a commit says."""
    listed = _answer(repository, "config", "--blob", f"{commit}:.gitmodules", *_PATHS)
    rows = [row.partition("\n") for row in listed.split("\0") if row]
    return {path: key.removeprefix("submodule.").removesuffix(".path") for key, _, path in rows}


def _is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _answer(repository: Path, *words: str) -> str:
    """git's answer, '' where it refuses."""
    done = git.git(repository, *words, env=git.without_checkout(repository), errors="surrogateescape")
    return done.stdout if done is not None and done.code == 0 else ""
