"""A finished run made again from its provenance, in a checkout of its own, and compared: weights and metrics.

The user's checkout is never touched: the commit goes to a detached worktree (or is unpacked from the archive), the
patch is applied there, the training runs from there into a folder of its own, and the worktree is removed again.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import data, git, key, shell
from pipeline.closure import Closure
from pipeline.errors import DataError, PacelineError, TrainingError
from pipeline.export import SOURCE
from pipeline.files import sha256_bytes, write_json
from pipeline.interrupt import Interruptible
from pipeline.provenance import LOCK
from pipeline.runfolder import RunFolder
from pipeline.why import Difference, differences
from trainers import config as node

WHERE = ("cluster", "paths", "tracking", "dataset.source")
"""What a reproduction may be told anew: none of it counts in the key, but for how the ranks are spread."""
FOLDER = ".reproduced"
_COMPARED = ("weights_sha256", "steps", "epochs", "nnodes", "world_size")
_ADDRESSES = ("ssh_config", "hostfile")  # files of the cluster group, relative to the project
_QUIET = ("hostname", "memory_bytes")  # differ from host to host and decide nothing

Say = Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is known of a finished run: everything that is needed to make it again."""

    folder: RunFolder
    result: Mapping[str, Any]
    parts: Mapping[str, Any]
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    patch: bytes

    @property
    def commit(self) -> str:
        return str(self.provenance["git_commit"])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``outcome`` differs in weights, metrics or steps (empty: reproduced); ``key`` and ``surroundings`` say why."""

    run: str
    again: str
    outcome: tuple[Difference, ...]
    key: tuple[Difference, ...]
    surroundings: tuple[Difference, ...]

    @property
    def reproduced(self) -> bool:
        return not self.outcome


def reproduce(
    folder: RunFolder,
    *,
    root: Path,
    work: Path,
    data_dir: Path,
    overrides: Sequence[str],
    keep: bool,
    say: Say,
) -> Verdict:
    """Make the run again below ``work`` and compare.

    Args:
        root: the project, whose repository has the run's commit (or the folder is of an archive that brings it).
        overrides: what this time says of WHERE; it replaces what the run was told of the same group.
        keep: leave the checkout of the run's code in ``work``.

    Raises:
        PacelineError: the run can't be made again, or the training failed; the text says what is missing.
    """
    recipe = read(folder)
    here = _environment_changes(recipe, root)
    for item in here:
        say(f"  environment  {item}")
    for name in recipe.provenance.get("left_out", ()):
        say(f"  not kept     {name}")
    runs_dir = work / "runs"
    with _alone(work), _checkout(recipe, root=root, place=work / "code", keep=keep) as project:
        shutil.rmtree(runs_dir, ignore_errors=True)  # of an earlier reproduction: this one has to train
        source = _source(recipe, overrides, (root, project))
        _check_data(recipe, source, data_dir)
        words = _overrides(recipe, overrides, root=root, project=project, source=source)
        where = [f"paths.runs={_quoted(str(runs_dir))}", f"paths.data={_quoted(str(data_dir.absolute()))}"]
        command = [sys.executable, "-m", "doit", "--db-file", str(work / "doit.db"), "train"]
        say(f"training {recipe.commit[:10]}{' with its patch' if recipe.patch else ''}: {' '.join(words)}")
        environment = {**git.environment(), "PYTHONPATH": str(project)}
        with Interruptible():
            code = shell.attached([*command, *words, *where, "tracking=none"], cwd=project, env=environment)
    made = [RunFolder(path.parent) for path in runs_dir.glob("*/result.json")]
    if code != 0 or len(made) != 1:
        raise TrainingError(
            f"run {recipe.folder.key} could not be made again: its training ended with exit code {code} (see above)",
            try_=f"doit reproduce run={recipe.folder.key} keep=1, then look into {work}",
        )
    verdict = compare(recipe, made[0])
    write_json(work / "verdict.json", {**asdict(verdict), "reproduced": verdict.reproduced})
    return verdict


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """One reproduction of a run at a time: they share a folder."""
    from filelock import FileLock

    work.mkdir(parents=True, exist_ok=True)
    with FileLock(work.parent / f"{work.name}.lock"):
        yield


# ----------------------------------------------------------------------------------------- recipe
def read(folder: RunFolder) -> Recipe:
    """Raises PacelineError: the run isn't finished, or has no commit, or its patch was lost or altered."""
    result, provenance = folder.read_json("result.json"), folder.read_json("provenance.json")
    parts, config = folder.read_json("key.json"), folder.read_json("config.json")
    if result is None:
        raise PacelineError(
            f"run {folder.key} has no result to compare with: it isn't finished", try_=f"doit status run={folder.key}"
        )
    if provenance is None or parts is None or config is None:
        raise PacelineError(f"run {folder.key} can't be made again: its provenance, key or configuration is missing")
    if provenance.get("git_commit") is None:
        raise PacelineError(
            f"run {folder.key} was not made from a git repository, so its code can't be brought back as a whole",
            try_=f"the trainer's own files are in {folder.path / 'code'}",
        )
    path = folder.path / "changes.patch"
    patch = path.read_bytes() if path.exists() else b""
    if sha256_bytes(patch) != provenance.get("patch_sha256", sha256_bytes(patch)):
        raise PacelineError(
            f"{path} is {'altered' if path.exists() else 'missing'}: the uncommitted changes of run {folder.key} "
            "can't be brought back",
            try_="another copy of the run folder, or its export",
        )
    return Recipe(
        folder=folder, result=result, parts=parts, config=config, provenance=provenance, patch=patch
    )  # fmt: skip


# --------------------------------------------------------------------------------------- checkout
@contextmanager
def _checkout(recipe: Recipe, *, root: Path, place: Path, keep: bool) -> Iterator[Path]:
    """The project's folder at the run's commit with its patch applied."""
    _remove(root, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        if git.has_commit(root, recipe.commit):
            done = git.git(root, "worktree", "add", "--detach", "--force", str(place), recipe.commit)
            if done is None or done.code != 0:
                raise PacelineError(f"git worktree add failed: {done.stderr.strip() if done else 'git is missing'}")
        elif (recipe.folder.path / SOURCE).is_file():
            with tarfile.open(recipe.folder.path / SOURCE) as archive:
                archive.extractall(place, filter="data")
        else:
            raise PacelineError(
                f"commit {recipe.commit} of run {recipe.folder.key} is not in this clone ({root})",
                try_="git fetch --all (or git fetch from the clone that has it), then the same command",
            )
        _apply(recipe, place)
        yield place / recipe.provenance.get("git_prefix", "")
    finally:
        if not keep:
            _remove(root, place)


def _remove(root: Path, place: Path) -> None:
    """Take the worktree (also one that an earlier, killed call left) out of the repository, and the folder away."""
    git.git(root, "worktree", "remove", "--force", "--force", str(place))
    shutil.rmtree(place, ignore_errors=True)


def _apply(recipe: Recipe, place: Path) -> None:
    if not recipe.patch:
        return
    path = recipe.folder.path.absolute() / "changes.patch"
    ceiling = {"GIT_CEILING_DIRECTORIES": str(place.absolute().parent)}  # an unpacked archive is no repository
    done = git.git(place, "apply", "--binary", "--whitespace=nowarn", str(path), env=ceiling)
    if done is None or done.code != 0:
        why = done.stderr.strip() if done else "git is missing"
        raise PacelineError(
            f"the uncommitted changes of run {recipe.folder.key} don't apply to its commit {recipe.commit}:\n{why}",
            try_=f"git apply --reject {path}, in a checkout of that commit",
        )


# ------------------------------------------------------------------------------- overrides and data
def _overrides(
    recipe: Recipe, given: Sequence[str], *, root: Path, project: Path, source: str | None
) -> list[str]:  # fmt: skip
    """The run's own words; what says where is taken from this call, and files of the checkout by absolute path."""
    told = {_group(word) for word in given}
    words = [word for word in recipe.provenance["overrides"] if _group(word) not in ("paths", "tracking", *told)]
    words = [word for word in words if not word.lstrip("+").startswith("dataset.source=")]
    words += [word for word in given if _group(word) == "cluster"]
    if source is not None:
        words.append(f"dataset.source={_quoted(source)}")
    if "cluster" not in told:
        for name in _ADDRESSES:
            file = (recipe.config.get("cluster") or {}).get(name)
            if file and not (project / Path(file).expanduser()).exists():  # a lab's ssh_config is no source
                words.append(f"cluster.{name}={_quoted(str(root / file))}")
    return words


def _group(word: str) -> str:
    """``cluster`` of ``cluster.env=…``, ``+cluster=…`` and ``~cluster``."""
    name = word.lstrip("+~").partition("=")[0]
    return name if name == "dataset.source" else name.partition(".")[0].partition("@")[0]


def _source(recipe: Recipe, given: Sequence[str], roots: Sequence[Path]) -> str | None:
    """Where the data comes from: as this call says, else as the run was told; a path becomes absolute.

    ``roots``: a relative path is taken from the first of them that has it (the patch may have brought it along).
    """
    told = [word.partition("=")[2] for word in given if _group(word) == "dataset.source"]
    source = told[-1].strip("'\"") if told else (recipe.config.get("dataset") or {}).get("source")
    if source is None or "://" in source:
        return source
    places = [root / Path(source).expanduser() for root in roots]
    return str(next((place for place in places if place.exists()), places[0]))


def _check_data(recipe: Recipe, source: str | None, data_dir: Path) -> None:
    """The run's data, found or fetched. Raises PacelineError: it is gone, or other data."""
    wanted = str(recipe.parts["data"])
    try:
        dataset = node.parse({**recipe.config, "dataset": {**recipe.config["dataset"], "source": source}}).dataset
    except (node.ConfigError, TypeError, KeyError):
        return  # another version's fields: its own code looks for the data
    lost = f"the data of run {recipe.folder.key} (digest {wanted[:12]}) is gone"
    mend = "dataset.source=<where it is now>, or paths.data=<a folder that has its pack>"
    try:
        found = data.find(dataset, data_dir) or data.fetch(dataset, data_dir)
    except DataError as error:
        raise PacelineError(f"{lost}: {error.what}", try_=mend) from error
    if found.digest != wanted:
        item = Difference(part="data", field="digest", old=wanted, new=found.digest)
        raise PacelineError(f"{lost}; what is found in its place is other data\n  {item}", try_=mend)


def _quoted(text: str) -> str:
    """As a Hydra value."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# ------------------------------------------------------------------------------------- comparison
def _environment_changes(recipe: Recipe, root: Path) -> list[Difference]:
    """What the key says of Python and libraries, and the lock, against what is here."""
    old = dict(recipe.parts.get("environment") or {})
    names = tuple(name for name in old if name != "python")
    new = key.environment(Closure(files=(), third_party=names))
    return differences({"environment": old}, {"environment": new})


def compare(recipe: Recipe, again: RunFolder) -> Verdict:
    """Field by field: what came out, the parts of the key, and what the hosts had installed."""
    result, parts = again.read_json("result.json") or {}, again.read_json("key.json") or {}
    provenance = again.read_json("provenance.json") or {}
    return Verdict(
        run=recipe.folder.key,
        again=again.key,
        outcome=tuple(differences(_outcome(recipe.result), _outcome(result))),
        key=tuple(differences(recipe.parts, parts)),
        surroundings=tuple(differences(_surroundings(recipe.provenance), _surroundings(provenance))),
    )


def _outcome(result: Mapping[str, Any]) -> dict[str, Any]:
    """As ``differences`` takes it: all under one part, so that each line shows field, old and new."""
    return {"config": {**{name: result.get(name) for name in _COMPARED}, **(result.get("metrics") or {})}}


def _surroundings(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """By node rank, not by name: the hosts may be called otherwise here."""
    hosts = list((provenance.get("environments") or {}).values())
    told = {f"node{rank}": {name: host[name] for name in host if name not in _QUIET} for rank, host in enumerate(hosts)}
    return {"config": {**told, LOCK: provenance.get("lock_sha256")}}


def text(verdict: Verdict) -> str:
    """The verdict for a terminal."""
    lines = []
    if verdict.reproduced:
        lines.append(f"REPRODUCED {verdict.run}: weights_sha256, metrics and steps are equal")
    else:
        lines.append(f"NOT REPRODUCED {verdict.run}: {len(verdict.outcome)} field(s) differ")
        lines += [f"  {item}" for item in verdict.outcome]
    if verdict.again != verdict.run:
        lines.append(f"its key is {verdict.again} here, because of:")
        lines += [f"  {item}" for item in verdict.key]
    else:
        lines.append("its key is the same")
    if verdict.surroundings:
        lines.append("hosts and lock differ in:")
        lines += [f"  {item}" for item in verdict.surroundings]
    return "\n".join(lines)
