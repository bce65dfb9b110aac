"""What is needed to repeat a finished run: its recipe, and its code restored in a separate checkout.

The code is the run's commit, from this clone or an export, with the run's patch. For files of submodules, and for a run
without a commit, it is the copy of the code in the run folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import tracking
from pipeline.core import documents, places
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import sha256_bytes
from pipeline.core.processes import git, process
from pipeline.core.specs import State
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.runs import acceptance, journal
from pipeline.runs.folder import RunFolder, check_parts
from trainers.contract import run_folder

SOURCE = "source"
"""The folder in an exported run with the git pack of its commit."""
_ANOTHER_COPY = "another copy of the run folder, or its export"
_LARGEST_COPIED = 1 << 20  # bytes per file of a project without a repository; code and settings are smaller


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that is needed to repeat a finished run: the contents of the files in its folder."""

    folder: RunFolder
    result: Mapping[str, Any]
    parts: Mapping[str, Any]  # of the key, key.json
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    patch: bytes  # changes.patch; empty without uncommitted changes

    @property
    def commit(self) -> str | None:
        """The commit; None if the run was made outside of a repository or in one without a commit."""
        return self.provenance.get("git_commit")


def read(folder: RunFolder, root: Path) -> Recipe:
    """Read the recipe of a run, and check its parts against each other and the key. ``root``: the project.

    Raises:
        PacelineError: the run isn't finished, its patch is missing, or it has neither a commit nor a copy of its code.
        AlteredError: a part isn't what was written.
    """
    result, key = folder.read_result(), folder.read_key()
    provenance, config = folder.read_json(run_folder.PROVENANCE), folder.read_json(run_folder.CONFIG)
    if result is None:  # another run may have been accepted for this key: a repetition must give that run's weights
        result, _ = acceptance.result_or_accepted(folder)
    if result is None:
        raise PacelineError(
            f"run {folder.key} has no result to compare with: it isn't finished", hint=f"doit status {folder.key}"
        )
    if provenance is None or key is None or config is None:
        parts = {run_folder.PROVENANCE: provenance, run_folder.KEY: key, run_folder.CONFIG: config}
        absent = [name for name, value in parts.items() if value is None]
        state = "damaged" if any((folder.path / name).exists() for name in absent) else "missing"
        raise PacelineError(
            f"run {folder.key} can't be made again: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} {state}",
            hint=_ANOTHER_COPY,
        )
    if provenance.get("git_commit") is None and not folder.code.is_dir():
        raise PacelineError(
            f"run {folder.key} was not made from a commit, and {folder.code}, the copy of its code, is missing",
            hint=_ANOTHER_COPY,
        )
    check_parts(folder, key, result if result.key == folder.key else None, root)
    path = folder.path / run_folder.CHANGES
    patch = path.read_bytes() if path.is_file() else b""
    if sha256_bytes(patch) != provenance.get("patch_sha256", sha256_bytes(patch)):
        raise PacelineError(
            f"{path} is {'altered' if path.exists() else 'missing'}: the uncommitted changes of run {folder.key} "
            "can't be brought back",
            hint="another copy of the run folder, or its export (MLflow keeps no patch that has a login in it)",
        )
    return Recipe(
        folder=folder, result=result.fields, parts=key.parts, config=config, provenance=provenance, patch=patch
    )


@contextmanager
def checkout(
    recipe: Recipe, *, root: Path, checkout_dir: Path, keep: bool, say: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """Yield the project as the run had it, in ``checkout_dir``: its commit, its patch and its own copies of code."""
    shutil.rmtree(checkout_dir, ignore_errors=True)  # a killed command may have left it
    checkout_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        if recipe.commit is None:
            _copy_project(root, checkout_dir, recipe)
            _apply_patch(recipe, checkout_dir)
        else:
            is_of_clone = _read_commit(recipe, recipe.commit, root, checkout_dir)
            # the patch was made in an index: filters and line-end conversion of a checkout alter the files
            _apply_patch(recipe, checkout_dir, "--cached")
            env = {} if is_of_clone else _WITHOUT_SETTINGS
            _run(checkout_dir, "checkout-index", "--all", "--force", "--index", "--quiet", env=env)
            for row in _run(checkout_dir, "ls-tree", "-r", "-z", "--full-tree", recipe.commit).split("\0"):
                if row.startswith("160000 "):
                    name = row.partition("\t")[2]
                    say(f"  submodule    {name} is not checked out: of its files the run's own copies are taken")
        # where in the repository the project lies
        project = _checked_inside(checkout_dir / recipe.provenance.get("git_prefix", ""), checkout_dir)
        _restore_copies(recipe, project, checkout_dir, say)
        yield project
    finally:
        if not keep:
            shutil.rmtree(checkout_dir, ignore_errors=True)


def _read_commit(recipe: Recipe, commit: str, root: Path, checkout_dir: Path) -> bool:
    """Read the commit into the index of a new repository at ``checkout_dir``. Return True if the commit is from this
    clone, False if from an export. Raises PacelineError: neither has it."""
    repository = git.common_folder(root) if git.has_commit(root, commit) else None
    if repository is not None:
        clone_commit(repository, checkout_dir, commit)
        return True
    if packs := sorted((recipe.folder.path / SOURCE).glob("*.pack")):
        unpack_commit(packs, checkout_dir, commit)
        return False
    if (why := git.refusal(root)) is not None:
        raise PacelineError(f"commit {commit} of run {recipe.folder.key} can't be read: {why}")
    raise PacelineError(
        f"commit {commit} of run {recipe.folder.key} is not in this clone ({root})",
        hint="git fetch --all (or git fetch from the clone that has it), then the same command; or an export "
        "that brings the commit: doit export KEY, once more, where it is",
    )


def _copy_project(root: Path, checkout_dir: Path, recipe: Recipe) -> None:
    """Copy the project's small files as they are now (conf/, dodo.py), for a run without a commit. Hidden files,
    virtual environments and results are left out."""
    folders = (recipe.config.get("paths") or {}).values()
    results = {checkout_dir.absolute(), *((root / str(path)).absolute() for path in folders)}
    for walked, names, files in os.walk(root):
        folder = Path(walked)
        inside = [folder / name for name in names if not name.startswith(".") and name != "__pycache__"]
        # os.walk goes only into the folders that stay in ``names``
        names[:] = [path.name for path in inside if path not in results and not (path / "pyvenv.cfg").exists()]
        for path in (folder / name for name in files if not name.startswith(".")):
            if path.is_file() and path.stat().st_size <= _LARGEST_COPIED:
                target = checkout_dir / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def _checked_inside(path: Path, checkout_dir: Path) -> Path:
    """Return the path. Raises PacelineError: it leads out of ``checkout_dir`` by a link of the commit, or by ``..``."""
    if not path.resolve().is_relative_to(checkout_dir.resolve()):
        raise PacelineError(f"{path} leads out of the checkout of the run's code, to {path.resolve()}")
    return path


def _restore_copies(recipe: Recipe, project: Path, checkout_dir: Path, say: Callable[[str], None]) -> None:
    """Copy the files of the run's own code that the checkout lacks or has otherwise, such as those of submodules."""
    source = "its commit and patch have" if recipe.commit is not None else "a copy of the project's code has"
    has_own_paceline = places.code_of(project) == project
    for path in sorted(path for path in recipe.folder.code.rglob("*") if path.is_file()):
        name = path.relative_to(recipe.folder.code).as_posix()
        if name not in recipe.parts["code"]:  # not of the key: Python's caches, or files that somebody added
            continue
        # An installed Paceline isn't part of the project's commit: only installing that version restores it.
        is_installed = not has_own_paceline and name.partition("/")[0].removesuffix(".py") in places.MODULES
        target = (places.HOME if is_installed else project) / name
        if target.is_file() and target.read_bytes() == path.read_bytes():
            continue
        if is_installed:
            say(f"  paceline     {name} is another one than in the version of Paceline that made the run")
        else:
            _checked_inside(target, checkout_dir).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            say(f"  snapshot     {name} is the run's own copy: {source} another, or none")


def _apply_patch(recipe: Recipe, checkout_dir: Path, *options: str) -> None:
    """Apply the run's uncommitted changes, if there are any; ``options`` of git apply. Raises PacelineError."""
    if not recipe.patch:
        return
    path = recipe.folder.path.absolute() / run_folder.CHANGES
    ceiling = {"GIT_CEILING_DIRECTORIES": str(checkout_dir.absolute().parent)}  # a copied project is no repository
    done = git.git(checkout_dir, "apply", *options, "--binary", "--whitespace=nowarn", str(path), env=ceiling)
    if done is None or done.code != 0:
        why = done.stderr.strip() if done else "git is missing"
        raise PacelineError(
            f"the uncommitted changes of run {recipe.folder.key} don't apply to its commit {recipe.commit}:\n{why}",
            hint=f"git apply --reject {path}, in a checkout of that commit",
        )


# ------------------------------------------------------------------- a run that another computer has recorded
_FETCH_S = 600.0  # importing mlflow takes seconds of CPU time, on a busy computer minutes


def from_mlflow(run_id: str, uri: str, parent: Path, *, runs_dir: Path) -> RunFolder:
    """Download the recipe and the result of a run from its MLflow record; return a run folder of them below ``parent``.

    Raises:
        UsageError: neither the store nor ``runs_dir`` has such a run, or it isn't one of Paceline's.
        PacelineError: the store doesn't answer, or the run has not finished.
    """
    store = f"MLflow at {tracking.public_uri(uri)}"
    database = tracking.sqlite_path(uri)
    if database is not None and not database.exists():
        raise UsageError(
            f"run={run_id}: no such run under {runs_dir}, and there is no {database} to ask",
            hint="tracking.uri=<the tracking server that knows it>",
        )
    download = parent / "record"
    argv = tracking.fetch_command(run_id, download, uri)
    done = process.run(argv, env=process.child_environment(tracking.recorder_env(uri)), timeout_s=_FETCH_S)
    if done.code == tracking.NO_SUCH_RUN:
        raise UsageError(
            f"run={run_id}: no such run under {runs_dir}, and {store} knows none either",
            hint="tracking.uri=<the tracking server that knows it>",
        )
    if done.code != 0:
        why = done.stderr.strip().splitlines()[-1:]
        raise PacelineError(f"run={run_id} is not under {runs_dir}, and {store} can't tell: {'; '.join(why)}")
    key = str((RunFolder(download).read_json(run_folder.KEY) or {}).get("key"))
    if not re.fullmatch(f"[0-9a-f]{{{KEY_LENGTH}}}", key):
        raise UsageError(f"run={run_id}: that run of {store} is none of Paceline's; it has no key.json")
    folder = RunFolder(download.rename(parent / key))
    folder.refuse_newer()
    entries, summary = journal.read(folder.journal), folder.read_summary()
    if not entries or entries[-1].state is not State.FINISHED or summary is None:
        state = f"it ended {entries[-1].state}" if entries else "as far as its record goes, it has not ended"
        raise PacelineError(f"run={run_id} ({folder.key}) has no result to compare with: {state}")
    # the record has no result.json, which is written after it
    documents.write_sealed(folder.result, {**summary, "key": folder.key, "mlflow_run_id": run_id, "files": {}})
    return folder


# ----------------------------------------------------------------------------------------------------------- git
_WITHOUT_SETTINGS = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
"""Makes git ignore the user's configuration, so that attributes of a foreign commit can't run a filter program."""
_LARGEST_BYTES = 16 << 30  # unpacked size of a commit from an archive
_ALONE = ("--window=0", "--no-reuse-object", "--compression=0", "--threads=1")  # equal commits give equal bytes


def clone_commit(repository: Path, checkout_dir: Path, commit: str) -> None:
    """Read a commit into the index of a new repository at ``checkout_dir``, without files. Raises PacelineError."""
    _run(repository, "clone", "--quiet", "--shared", "--no-checkout", str(repository), str(checkout_dir))
    _read_into_index(checkout_dir, commit)


def pack_commit(repository: Path, commit: str, to: Path) -> None:
    """Write the commit, without history, as a git pack into the folder ``to``. Raises PacelineError."""
    env = {**git.without_checkout(repository), "GIT_NO_REPLACE_OBJECTS": "1"}
    listed = _run(repository, "rev-list", "--objects", "--no-walk", commit, env=env)
    ids = "".join(f"{line.partition(' ')[0]}\n" for line in listed.split("\n") if line).encode()
    # git makes a pack in an object folder: a temporary one, as the repository's may be read-only or on another disk
    with tempfile.TemporaryDirectory(dir=to) as objects:
        alternate = json.dumps(str(repository / "objects"), ensure_ascii=False)  # quoted as git wants it
        env |= {"GIT_OBJECT_DIRECTORY": objects, "GIT_ALTERNATE_OBJECT_DIRECTORIES": alternate}
        made = _run(repository, "pack-objects", "--quiet", *_ALONE, f"{objects}/made", env=env, input_=ids).strip()
        Path(objects, f"made-{made}.pack").rename(to / f"{commit}.pack")


def unpack_commit(packs: Sequence[Path], checkout_dir: Path, commit: str) -> None:
    """Read the commit of ``packs`` into the index of a new repository at ``checkout_dir``, like ``clone_commit``.

    Raises PacelineError: a pack is damaged, the packs lack the commit or some of its files or hold more than 16 GiB, or
    a path of the commit leads out of the repository or into its git folder."""
    kind = ("--object-format=sha256",) if len(commit) == 64 else ()
    checkout_dir.mkdir(parents=True)
    _run(checkout_dir, "init", "--quiet", "--template=", *kind, env=_WITHOUT_SETTINGS)
    for path in packs:
        target = checkout_dir / ".git" / "objects" / "pack" / f"pack-{path.name}"
        shutil.copyfile(path, target)
        _run(checkout_dir, "index-pack", str(target), env=_WITHOUT_SETTINGS)
    sizes = _run(checkout_dir, "cat-file", "--batch-all-objects", "--batch-check=%(objectsize)", env=_WITHOUT_SETTINGS)
    total, most = sum(map(int, sizes.split())), min(_LARGEST_BYTES, shutil.disk_usage(checkout_dir).free)
    if total > most:
        raise PacelineError(f"{packs[0].parent.name} of the archive unpacks to {total:,} bytes, of at most {most:,}")
    if not git.has_commit(checkout_dir, commit):
        raise PacelineError(f"{packs[0].parent.name} of the archive doesn't hold commit {commit}, which the run names")
    _read_into_index(checkout_dir, commit)


def _read_into_index(checkout_dir: Path, commit: str) -> None:
    _run(checkout_dir, "update-ref", "--no-deref", "HEAD", commit)
    _run(checkout_dir, "read-tree", commit)


def _run(folder: Path, *words: str, env: Mapping[str, str] | None = None, input_: bytes | None = None) -> str:
    done = git.git(folder, *words, env=env, input_=input_, errors="surrogateescape")
    if done is None or done.code != 0:
        why = done.stderr.strip() if done else "git is missing"
        raise PacelineError(f"git {words[0]} in {folder} failed: {why}")
    return done.stdout
