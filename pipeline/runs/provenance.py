"""The origin of a run, written to provenance.json and changes.patch before its launch: commit, uncommitted changes,
command line, lock file, data, and each host's environment. `doit reproduce` makes the run again from them.

The patch is taken with git's own commands in a temporary index, so the user's repository isn't touched."""

from __future__ import annotations

import os
import platform
import re
import shlex
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.cache import FOLDER
from pipeline.core.errors import PacelineError
from pipeline.core.files import link_or_copy, sha256_bytes, sha256_file, temporary_prefix, write_atomic, write_json
from pipeline.core.processes import git
from pipeline.core.redact import hide, mask_word
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json

_KEY = re.compile(r"[0-9a-f]{12}")  # the name of a run folder
_LARGEST_UNTRACKED_BYTES = 8 << 20  # a larger file is data or a result, hardly a source
_LARGEST_READ_BYTES = 64 << 20  # a larger file isn't searched for secrets
_LEAST_SECRET_CHARACTERS = 8  # a shorter secret stands in any source by chance
_DIFF = (  # each option overrides what a user's git configuration may say
    "diff-index", "-p", "--cached", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color",
    "--no-renames", "--no-relative", "-U3", "--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all",
)  # fmt: skip
_FIXED_SETTINGS = {"core.safecrlf": "false", "submodule.recurse": "false", "diff.orderFile": ""}


def uncommitted(
    root: Path, outputs: Sequence[str], secrets: Collection[str], imported: Collection[Path]
) -> tuple[bytes, tuple[str, ...]]:
    """Return the patch that turns the commit into the checkout at ``root``, and ``name: why`` for each file left out.

    ``outputs`` are folders of results, which don't count as changes. ``imported`` are the files that the run imports:
    they count even outside of ``root``. Files with one of ``secrets`` are left out."""
    objects = git.answer(root, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-git")) as folder:
        (Path(folder) / "objects").mkdir()
        env = {  # git writes its objects into the temporary folder, and reads the repository's as alternates
            "GIT_INDEX_FILE": str(Path(folder) / "index"),
            "GIT_OBJECT_DIRECTORY": str(Path(folder) / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": (objects or "").strip(),
            "GIT_LITERAL_PATHSPECS": "1",
        }
        try:
            return _Index(root, env, imported).changes(outputs, secrets, Path(folder) / "patch")
        except PacelineError as error:
            return b"", (f"all changes: {error.what}",)


class _Index:
    """A temporary git index that begins as the commit: marks in the user's index (assume-unchanged, …) hide nothing."""

    def __init__(self, root: Path, env: Mapping[str, str], imported: Collection[Path]) -> None:
        self._env = env
        self._top = Path(_rev_parse(root, "--show-toplevel"))  # all names are relative to it
        self._prefix = _rev_parse(root, "--show-prefix")  # the project's folder in the repository
        self._sparse = ("--sparse",) if git.answer(root, "config", "--bool", "core.sparseCheckout") == "true\n" else ()
        self._left_out: dict[str, str] = {}  # name → why
        # imported files of the repository that lie outside of the project's folder
        resolved = [path.resolve() for path in imported]
        outside = [path for path in resolved if not path.is_relative_to(root.resolve())]
        self._imported = sorted(str(path.relative_to(self._top)) for path in outside if path.is_relative_to(self._top))

    def changes(self, outputs: Sequence[str], secrets: Collection[str], target: Path) -> tuple[bytes, tuple[str, ...]]:
        """Return the patch, which git writes to ``target``, and ``name: why`` for each file left out. Bring the index
        to the state of the checkout, take back what must not be in the patch, and compare with HEAD."""
        self._git("read-tree", "HEAD")
        not_checked_out = self._never_checked_out()
        self._take_tracked()
        self._take_untracked(outputs)
        self._name_submodules()
        changed = self._names("diff-index", "--cached", "--name-only", "-z", "HEAD")
        unchanged = [name for name in changed if name in not_checked_out]
        with_secret = list(self._with_secret(changed, secrets))
        self._reset([*unchanged, *with_secret, *(name for name in self._left_out if name in changed)])
        # git writes the patch to a file: sources may hold any bytes
        self._git(*_DIFF, f"--output={target}", "HEAD")
        patch = target.read_bytes() if target.exists() else b""
        # a file name may hold bytes that are no UTF-8, which JSON can't store
        printable = ((os.fsencode(name).decode(errors="backslashreplace"), why) for name, why in self._left_out.items())
        return patch, tuple(f"{name}: {why}" for name, why in sorted(printable))

    def _never_checked_out(self) -> set[str]:
        """Return the files that a sparse checkout omits: they were not deleted."""
        listed = git.git(self._top, "ls-files", "-t", "-z", errors="surrogateescape") if self._sparse else None
        rows = listed.stdout.split("\0") if listed is not None and listed.code == 0 else []
        return {row[2:] for row in rows if row.startswith("S ") and not (self._top / row[2:]).exists()}

    def _take_tracked(self) -> None:
        """Add the changes of tracked files to the index; note the files that git refuses."""
        imported = self._names("ls-files", "-z", "--", *self._imported) if self._imported else []
        options = ("--update", *self._sparse, "--ignore-errors")
        error = self._error_of("add", *options, "--", self._prefix or ".", *imported)
        if error is None:
            return
        # git names only the first file: those that still differ from the index are the ones that it didn't take
        self._error_of("update-index", "-q", "--refresh")
        for name in self._names("diff-files", "--name-only", "-z", "--ignore-submodules=all"):
            self._left_out[name] = f"git can't take it ({error})"

    def _take_untracked(self, outputs: Sequence[str]) -> None:
        """Add new files that git doesn't ignore to the index; note those that can't be sources, or that git refuses."""
        taken = []
        output_folders = [f"{self._prefix}{output}/" for output in outputs]
        searched = (self._prefix or ".", *self._imported)
        for name in self._names("ls-files", "--others", "--exclude-standard", "-z", "--", *searched):
            is_output = any(f"{name}/".startswith(folder) for folder in output_folders)
            if is_output or self._is_of_a_run(name):
                continue
            why = _unfit(self._top / name)
            if why is None:
                taken.append(name)
            else:
                self._left_out[name] = why
        if not taken:
            return
        listed = "\0".join(taken).encode(errors="surrogateescape")
        options = ("--ignore-errors", "--pathspec-from-file=-", "--pathspec-file-nul")
        error = self._error_of("add", *self._sparse, *options, input_=listed)
        if error is not None:  # git names only the first file that it refuses
            added = set(self._names("ls-files", "-z"))
            self._left_out |= {name: f"git can't take it ({error})" for name in taken if name not in added}

    def _is_of_a_run(self, name: str) -> bool:
        """Return True for a file in a run folder, and for Paceline's caches, in any folder of runs."""
        return any(
            parent.name == FOLDER
            or (_KEY.fullmatch(parent.name) and (self._top / parent / run_folder.JOURNAL).is_file())
            for parent in Path(name).parents
        )

    def _name_submodules(self) -> None:
        """Note changed submodules: their commits and changes belong to repositories of their own."""
        for row in self._names("ls-tree", "-r", "-z", "HEAD"):
            columns, _, name = row.partition("\t")
            mode, _, commit = columns.split()
            folder = self._top / name
            is_submodule = mode == "160000"
            if not is_submodule or not (folder / ".git").exists():  # without .git it isn't checked out
                continue
            head = (git.answer(folder, "rev-parse", "HEAD") or "").strip()
            status = git.answer(folder, "status", "--porcelain", "--ignore-submodules=none")
            if head != commit:
                self._left_out[name] = f"a submodule at {head[:10] or 'no commit'} instead of {commit[:10]}"
            elif status != "":
                self._left_out[name] = "a submodule with changes of its own"

    def _with_secret(self, changed: Sequence[str], secrets: Collection[str]) -> Iterator[str]:
        """Yield the changed files that hold a secret, and note why they are left out."""
        if not secrets:
            return
        for name in changed:
            path = self._top / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_READ_BYTES:
                continue
            text = path.read_bytes().decode(errors="surrogateescape")
            holds_long = any(value in text for value in secrets if len(value) >= _LEAST_SECRET_CHARACTERS)
            # ``hide`` also finds a short secret where it stands as a whole word
            if holds_long or hide(text, secrets) != hide(text):
                self._left_out[name] = "a secret of this run stands in it"
                yield name

    def _reset(self, names: Sequence[str]) -> None:
        """Put files back into the index as the commit has them, so that the patch doesn't mention them."""
        for name in names:
            row = self._git("ls-tree", "-z", "HEAD", "--", name).rstrip("\0")
            if not row:  # not in the commit: mode 0 removes it from the index
                row = f"0 {'0' * len(self._git('rev-parse', 'HEAD').strip())}\t{name}"
            self._git("update-index", "-z", "--index-info", input_=f"{row}\0".encode(errors="surrogateescape"))

    # ------------------------------------------------------------------------------------------------ git
    def _names(self, *arguments: str) -> list[str]:
        return [name for name in self._git(*arguments).split("\0") if name]

    def _git(self, *arguments: str, input_: bytes | None = None) -> str:
        done = git.git(
            self._top, *arguments, env=self._env, input_=input_, settings=_FIXED_SETTINGS, errors="surrogateescape"
        )
        if done is None or done.code != 0:
            raise PacelineError(f"git {arguments[0]} failed: {done.stderr.strip() if done else 'git is missing'}")
        return done.stdout

    def _error_of(self, *arguments: str, input_: bytes | None = None) -> str | None:
        """Run git; return the first line of its error, or None."""
        try:
            self._git(*arguments, input_=input_)
        except PacelineError as error:
            return error.what.splitlines()[0]
        return None


def _rev_parse(root: Path, option: str) -> str:
    done = git.git(root, "rev-parse", option, errors="surrogateescape")
    return done.stdout.removesuffix("\n") if done is not None else ""


def _unfit(path: Path) -> str | None:
    """Return why an untracked file is no source that a patch could hold; None if it is one."""
    if str(path).endswith("/") or (path.is_dir() and not path.is_symlink()):
        return "a repository of its own"
    try:
        status = path.lstat()
    except OSError as error:
        return f"can't be read ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        return "no plain file"
    if status.st_size > _LARGEST_UNTRACKED_BYTES:
        return f"{status.st_size / 1e6:.1f} MB, and untracked files of more than 8 MiB are no sources"
    return None if os.access(path, os.R_OK) else "can't be read (Permission denied)"


LOCK = "requirements.lock"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The content of provenance.json. Without git, ``git_commit`` and ``git_dirty`` are None.

    ``git_prefix`` is the project's folder inside the repository. ``left_out``: ``name: why`` for each changed file that
    the patch lacks. ``defaults`` are the user's own defaults that this configuration contains. ``environments``: host →
    software and hardware, as ``environment`` returns them."""

    git_commit: str | None
    git_dirty: bool | None
    git_prefix: str
    patch_sha256: str
    left_out: tuple[str, ...]
    command: str
    overrides: tuple[str, ...]
    hosts: tuple[str, ...]
    controller: str
    python: str
    data_digest: str
    lock_sha256: str | None
    unix_time: float
    defaults: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overrides": [*map(mask_word, self.overrides)]}

    def write(self, run_dir: Path, patch: bytes) -> None:
        """Write provenance.json and the patch. Raises OSError."""
        write_json(run_dir / run_folder.PROVENANCE, self.as_json())
        write_atomic(run_dir / run_folder.CHANGES, patch)


def collect(
    root: Path,
    argv: Sequence[str],
    run: Mapping[str, Any],
    *,
    outputs: Sequence[Path],
    secrets: Collection[str] = (),
    imported: Collection[Path] = (),
) -> tuple[Provenance, bytes]:
    """Return the provenance of a run and the patch from the commit to this checkout (as ``uncommitted`` does). ``run``
    has the fields of ``Provenance`` that don't depend on the checkout."""
    commit = git.answer(root, "rev-parse", "--verify", "--quiet", "HEAD")
    inside = [str(path.relative_to(root)) for path in outputs if path.is_relative_to(root) and path != root]
    if commit is not None:
        patch, left_out = uncommitted(root, inside, secrets, imported)
    else:
        refusal = git.refusal(root)  # '' for a folder that is no repository, or has no commit yet
        patch, left_out = b"", (f"everything: {refusal}",) if refusal else ()
    prefix = git.answer(root, "rev-parse", "--show-prefix") if commit is not None else None
    provenance = Provenance(
        git_commit=commit.strip() if commit is not None else None,
        git_dirty=bool(patch or left_out) if commit is not None else None,
        git_prefix=(prefix or "").removesuffix("\n"),
        patch_sha256=sha256_bytes(patch),
        left_out=left_out,
        command=shlex.join(map(mask_word, argv)),
        controller=platform.node(),
        python=platform.python_version(),
        lock_sha256=sha256_file(root / LOCK) if (root / LOCK).is_file() else None,
        **run,
    )
    return provenance, patch


def environment(fact: HostFacts) -> dict[str, Any]:
    """Return the facts of a host's probe that provenance.json keeps: software and hardware."""
    container = {}
    if (image := fact.container) is not None:
        parts = {"engine": image.engine, "image": image.image, "digest": image.digest, "gpus": image.gpus}
        container = {"container": parts}
    return {
        **container,
        "hostname": fact.hostname,
        "python": fact.python_version,
        "torch": fact.torch_version,
        "cpus": fact.cpus,
        "memory_bytes": fact.memory_bytes,
        "gpus": fact.gpus,
        **as_json(fact.hardware),
        "packages": fact.packages,
    }


def keep_lock(root: Path, run_dir: Path) -> None:
    """Copy requirements.lock into the run folder, as a link to one shared file per lock, because it is large."""
    source = root / LOCK
    if not source.is_file():
        (run_dir / LOCK).unlink(missing_ok=True)
        return
    shared = run_dir.parent / ".locks" / sha256_file(source)
    if not shared.is_file():
        write_atomic(shared, source.read_bytes())
    link_or_copy(shared, run_dir / LOCK)
