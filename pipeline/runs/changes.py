"""The uncommitted changes of a checkout as one patch; what no patch can keep is named, and costs nothing else."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import git
from pipeline.core.errors import PacelineError
from pipeline.core.leftovers import of_system
from pipeline.core.redact import hide

_LARGEST_UNTRACKED_BYTES = 8 << 20
_LARGEST_READ_BYTES = 64 << 20  # of a changed file that is searched for secrets
_DIFF = (  # what the user's own configuration could change about a diff is said here
    "diff-index", "-p", "--cached", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color",
    "--no-renames", "--no-relative", "-U3", "--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all",
)  # fmt: skip
_STEADY = {"core.safecrlf": "false", "core.fsmonitor": "false", "submodule.recurse": "false", "diff.orderFile": ""}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """``patch`` turns the commit into the checkout but for ``left_out``, each a name and why: ``big.bin: 9 MB …``."""

    patch: bytes
    left_out: tuple[str, ...]


def collect(
    root: Path, outputs: Sequence[str], secrets: Collection[str] = (), imported: Collection[Path] = ()
) -> Changes:
    """What the checkout at ``root`` has besides its commit. Its index and objects stay as they are.

    Args:
        outputs: folders of results, relative to ``root``: no sources.
        secrets: texts that may stand in no file: a changed file that holds one is left out.
        imported: sources of the run; those of the repository count that lie outside of ``root``, too.
    """
    objects = git.answer(root, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory(prefix=of_system("git")) as folder:
        (Path(folder) / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(Path(folder) / "index"),
            "GIT_OBJECT_DIRECTORY": str(Path(folder) / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": (objects or "").strip(),
            "GIT_LITERAL_PATHSPECS": "1",
        }
        try:
            return _Index(root, env, imported).changes(outputs, secrets, Path(folder) / "patch")
        except PacelineError as error:
            return Changes(patch=b"", left_out=(f"all changes: {error.what}",))


class _Index:
    """A throw-away index that begins as the commit: marks in the user's own (assume-unchanged, …) hide nothing."""

    def __init__(self, root: Path, env: Mapping[str, str], imported: Collection[Path]) -> None:
        self._env = env
        self._top = Path(_line(root, "--show-toplevel"))  # all names are relative to it
        self._prefix = _line(root, "--show-prefix")  # the project's folder in it
        self._sparse = ("--sparse",) if git.answer(root, "config", "--bool", "core.sparseCheckout") == "true\n" else ()
        self._left_out: dict[str, str] = {}
        self._beside = sorted(_beside(root.resolve(), self._top, imported))

    def changes(self, outputs: Sequence[str], secrets: Collection[str], target: Path) -> Changes:
        self._git("read-tree", "HEAD")
        absent = self._never_checked_out()
        self._take_tracked()
        self._take_untracked(outputs)
        self._name_submodules()
        changed = self._names("diff-index", "--cached", "--name-only", "-z", "HEAD")
        shut = [name for name in changed if name in absent] + list(self._secret(changed, secrets))
        self._reset([*shut, *(name for name in self._left_out if name in changed)])
        # git writes the patch to a file: sources may hold any bytes
        self._git(*_DIFF, f"--output={target}", "HEAD")
        patch = target.read_bytes() if target.exists() else b""
        named = (f"{_printable(name)}: {why}" for name, why in sorted(self._left_out.items()))
        return Changes(patch=patch, left_out=tuple(named))

    def _never_checked_out(self) -> set[str]:
        """Files that a sparse checkout leaves away: they were not deleted."""
        listed = git.git(self._top, "ls-files", "-t", "-z", errors="surrogateescape") if self._sparse else None
        rows = listed.stdout.split("\0") if listed is not None and listed.code == 0 else []
        return {row[2:] for row in rows if row.startswith("S ") and not (self._top / row[2:]).exists()}

    def _take_tracked(self) -> None:
        known = self._names("ls-files", "-z", "--", *self._beside) if self._beside else []
        done = self._try("add", "--update", *self._sparse, "--ignore-errors", "--", self._prefix or ".", *known)
        if done is None:
            return
        self._try("update-index", "-q", "--refresh")
        for name in self._names("diff-files", "--name-only", "-z", "--ignore-submodules=all"):
            self._left_out[name] = f"git can't take it ({done})"

    def _take_untracked(self, outputs: Sequence[str]) -> None:
        taken = []
        inside = [f"{self._prefix}{output}/" for output in outputs]
        places = (self._prefix or ".", *self._beside)
        for name in self._names("ls-files", "--others", "--exclude-standard", "-z", "--", *places):
            if any(f"{name}/".startswith(output) for output in inside):
                continue
            why = _unfit(self._top / name)
            if why is None:
                taken.append(name)
            else:
                self._left_out[name] = why
        if not taken:
            return
        listed = "\0".join(taken).encode(errors="surrogateescape")
        words = ("--ignore-errors", "--pathspec-from-file=-", "--pathspec-file-nul")
        done = self._try("add", *self._sparse, *words, input_=listed)
        if done is not None:
            there = set(self._names("ls-files", "-z"))
            self._left_out |= {name: f"git can't take it ({done})" for name in taken if name not in there}

    def _name_submodules(self) -> None:
        """Their commits and changes are of repositories of their own."""
        for row in self._names("ls-tree", "-r", "-z", "HEAD"):
            about, _, name = row.partition("\t")
            mode, _, commit = about.split()
            folder = self._top / name
            if mode != "160000" or not (folder / ".git").exists():
                continue
            head = (git.answer(folder, "rev-parse", "HEAD") or "").strip()
            status = git.answer(folder, "status", "--porcelain", "--ignore-submodules=none")
            if head != commit:
                self._left_out[name] = f"a submodule at {head[:10] or 'no commit'} instead of {commit[:10]}"
            elif status != "":
                self._left_out[name] = "a submodule with changes of its own"

    def _secret(self, changed: Sequence[str], secrets: Collection[str]) -> Iterator[str]:
        """Changed files with a secret of the run in them."""
        if not secrets:
            return
        for name in changed:
            path = self._top / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_READ_BYTES:
                continue
            text = path.read_bytes().decode(errors="surrogateescape")
            if any(value in text for value in secrets if len(value) >= 8) or hide(text, secrets) != hide(text):
                self._left_out[name] = "a secret of this run stands in it"
                yield name

    def _reset(self, names: Sequence[str]) -> None:
        """Put entries back to what the commit has."""
        for name in names:
            row = self._git("ls-tree", "-z", "HEAD", "--", name).rstrip("\0")
            zero = f"0 {'0' * len(self._git('rev-parse', 'HEAD').strip())}\t{name}"
            self._git("update-index", "-z", "--index-info", input_=f"{row or zero}\0".encode(errors="surrogateescape"))

    # ------------------------------------------------------------------------------------------------ git
    def _names(self, *arguments: str) -> list[str]:
        return [name for name in self._git(*arguments).split("\0") if name]

    def _git(self, *arguments: str, input_: bytes | None = None) -> str:
        done = git.git(self._top, *arguments, env=self._env, input_=input_, settings=_STEADY, errors="surrogateescape")
        if done is None or done.code != 0:
            raise PacelineError(f"git {arguments[0]} failed: {done.stderr.strip() if done else 'git is missing'}")
        return done.stdout

    def _try(self, *arguments: str, input_: bytes | None = None) -> str | None:
        """None, or the first line of why it (partly) failed."""
        try:
            self._git(*arguments, input_=input_)
        except PacelineError as error:
            return error.what.splitlines()[0]
        return None


def _line(root: Path, about: str) -> str:
    done = git.git(root, "rev-parse", about, errors="surrogateescape")
    return done.stdout.removesuffix("\n") if done is not None else ""


def _beside(root: Path, top: Path, sources: Collection[Path]) -> Iterator[str]:
    """The names of those that are the repository's and lie outside of the project's folder in it."""
    for source in sources:
        path = source.resolve()
        if path.is_relative_to(top) and not path.is_relative_to(root):
            yield str(path.relative_to(top))


def _unfit(path: Path) -> str | None:
    """Why an untracked file can't be in the patch."""
    if str(path).endswith("/") or (path.is_dir() and not path.is_symlink()):
        return "a repository of its own"
    try:
        found = path.lstat()
    except OSError as error:
        return f"can't be read ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        return "no plain file"
    if found.st_size > _LARGEST_UNTRACKED_BYTES:
        return f"{found.st_size / 1e6:.1f} MB, and untracked files of more than 8 MiB are no sources"
    return None if os.access(path, os.R_OK) else "can't be read (Permission denied)"


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
