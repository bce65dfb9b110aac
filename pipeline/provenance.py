"""Where a run comes from: commit, uncommitted changes, command line, lock, data, and what each host had installed."""

from __future__ import annotations

import platform
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import git, leftovers
from pipeline.errors import PacelineError
from pipeline.files import sha256_bytes, sha256_file, write_atomic
from pipeline.redact import in_word
from pipeline.types import NodeFacts

LOCK = "requirements.lock"
_LARGEST_UNTRACKED_BYTES = 8 << 20
_DIFF = (  # what the user's own configuration could change about a diff is said here
    "diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--no-relative",
    "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What provenance.json holds. Without git, ``git_commit`` is None and ``git_dirty`` too.

    ``git_prefix`` is the project's folder inside the repository ('' as a rule), ``lock_sha256`` that of
    requirements.lock (None: there is none). ``environments`` maps each host to what its probe told; it is filled in
    when the hosts have been asked.
    """

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
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(
    *,
    root: Path,
    argv: Sequence[str],
    overrides: Sequence[str],
    hosts: Sequence[str],
    outputs: Sequence[Path],
    data_digest: str,
    unix_time: float,
) -> tuple[Provenance, bytes]:
    """The provenance and the binary patch (untracked files included) that turns the commit into this tree.

    ``outputs`` are folders of results: what lies there is no source. Untracked files over 8 MiB are named
    in ``left_out`` and not in the patch.
    """
    commit = git.answer(root, "rev-parse", "HEAD")
    inside = [str(path.relative_to(root)) for path in outputs if path.is_relative_to(root) and path != root]
    patch, left_out = _changes(root, inside) if commit is not None else (b"", [])
    prefix = git.answer(root, "rev-parse", "--show-prefix") if commit is not None else None
    provenance = Provenance(
        git_commit=commit.strip() if commit is not None else None,
        git_dirty=bool(patch or left_out) if commit is not None else None,
        git_prefix=(prefix or "").removesuffix("\n"),
        patch_sha256=sha256_bytes(patch),
        left_out=tuple(left_out),
        command=shlex.join(_without_secrets(argv)),
        overrides=tuple(_without_secrets(overrides)),
        hosts=tuple(hosts),
        controller=platform.node(),
        python=platform.python_version(),
        data_digest=data_digest,
        lock_sha256=sha256_file(root / LOCK) if (root / LOCK).is_file() else None,
        unix_time=unix_time,
    )
    return provenance, patch


def of_another(
    origin: Provenance, *, overrides: Sequence[str], hosts: Sequence[str], data_digest: str, unix_time: float
) -> Provenance:
    """The provenance of another run of the same command and code."""
    words = tuple(_without_secrets(overrides))
    return replace(origin, overrides=words, hosts=tuple(hosts), data_digest=data_digest, unix_time=unix_time)


def environment(fact: NodeFacts) -> dict[str, Any]:
    """What a host's probe told of its software and hardware: what provenance.json keeps of it."""
    hardware = fact.extra.get("hardware") or {}
    return {
        "hostname": fact.hostname,
        "python": fact.python_version,
        "torch": fact.torch_version,
        "cpus": fact.cpus,
        "memory_bytes": fact.memory_bytes,
        "gpus": fact.gpus,
        **hardware,
        "packages": fact.extra.get("packages") or {},
    }


def keep_lock(root: Path, run_dir: Path) -> None:
    """requirements.lock into the run folder. The folders of one lock share one file: it is large beside a small run."""
    source, target = root / LOCK, run_dir / LOCK
    target.unlink(missing_ok=True)
    if not source.is_file():
        return
    shared = run_dir.parent / ".locks" / sha256_file(source)
    if not shared.is_file():
        write_atomic(shared, source.read_bytes())
    try:
        target.hardlink_to(shared)
    except OSError:  # a file system without hard links
        shutil.copyfile(shared, target)


def _changes(root: Path, outputs: Sequence[str]) -> tuple[bytes, list[str]]:
    """``git diff HEAD`` with untracked files, and the names of what had to stay out of it.

    Index and objects go to a throw-away folder, so .git stays as it is. git writes the patch to a file: sources may
    hold any bytes. Where git refuses, its words stand among the names: a patch that lacks something says so.
    """
    objects = git.answer(root, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory(prefix=leftovers.of_system("git")) as folder:
        patch = Path(folder) / "patch"
        (Path(folder) / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(Path(folder) / "index"),
            "GIT_OBJECT_DIRECTORY": str(Path(folder) / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": (objects or "").strip(),
        }
        try:
            _demand(root, "read-tree", "HEAD", env=env)
            _demand(root, "add", "--update", "--", ".", env=env)
            listed = _demand(root, "ls-files", "--others", "--exclude-standard", "-z", env=env)
            taken, left_out = _sorted_out(root, listed.split("\0"), outputs)
            names = "\0".join(taken).encode(errors="surrogateescape")
            _demand(root, "update-index", "--add", "-z", "--stdin", env=env, input_=names)
            _demand(root, *_DIFF, f"--output={patch}", "HEAD", env=env)
        except PacelineError as error:
            return b"", [f"all changes: {error.what}"]
        return patch.read_bytes() if patch.exists() else b"", left_out


def _demand(root: Path, *arguments: str, env: Mapping[str, str], input_: bytes | None = None) -> str:
    done = git.git(root, *arguments, env=env, input_=input_)
    if done is None or done.code != 0:
        raise PacelineError(f"git {arguments[0]} failed: {done.stderr.strip() if done else 'git is missing'}")
    return done.stdout


def _sorted_out(root: Path, untracked: Sequence[str], outputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The untracked files that belong into the patch, and those that would make it a copy of a data set."""
    taken: list[str] = []
    large: list[str] = []
    for name in untracked:
        inside = any(name == output or name.startswith(f"{output}/") for output in outputs)
        if not name or name.endswith("/") or inside:  # a folder in this list is a repository of its own
            continue
        path = root / name
        is_large = path.is_file() and path.stat().st_size > _LARGEST_UNTRACKED_BYTES
        (large if is_large else taken).append(name)
    return taken, large


def _without_secrets(words: Sequence[str]) -> list[str]:
    return [in_word(word) for word in words]
