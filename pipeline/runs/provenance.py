"""Where a run comes from: commit, uncommitted changes, command line, lock, data, and what each host had installed."""

from __future__ import annotations

import platform
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.core import git
from pipeline.core.files import sha256_bytes, sha256_file, write_atomic
from pipeline.core.secret_words import in_word
from pipeline.core.specs import NodeFacts
from pipeline.runs import changes

LOCK = "requirements.lock"


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


@dataclass(frozen=True, kw_only=True)
class RunDetails:
    """What the provenance tells of one run besides its checkout. ``hosts`` are their labels."""

    overrides: Sequence[str]
    hosts: Sequence[str]
    data_digest: str
    unix_time: float


def collect(
    root: Path,
    argv: Sequence[str],
    run: RunDetails,
    *,
    outputs: Sequence[Path],
    secrets: Collection[str] = (),
    imported: Collection[Path] = (),
) -> tuple[Provenance, bytes]:
    """The provenance and the binary patch (untracked files included) that turns the commit into this tree.

    ``outputs`` are folders of results: what lies there is no source. What no patch can keep, and files in which one of
    ``secrets`` stands, are named in ``left_out``. Of a larger repository the project's folder counts, and what lies
    outside of it of ``imported``.
    """
    commit = git.answer(root, "rev-parse", "--verify", "--quiet", "HEAD")
    inside = [str(path.relative_to(root)) for path in outputs if path.is_relative_to(root) and path != root]
    found = changes.collect(root, inside, secrets, imported) if commit is not None else _without_commit(root)
    prefix = git.answer(root, "rev-parse", "--show-prefix") if commit is not None else None
    provenance = Provenance(
        git_commit=commit.strip() if commit is not None else None,
        git_dirty=bool(found.patch or found.left_out) if commit is not None else None,
        git_prefix=(prefix or "").removesuffix("\n"),
        patch_sha256=sha256_bytes(found.patch),
        left_out=found.left_out,
        command=shlex.join(_without_secrets(argv)),
        overrides=tuple(_without_secrets(run.overrides)),
        hosts=tuple(run.hosts),
        controller=platform.node(),
        python=platform.python_version(),
        data_digest=run.data_digest,
        lock_sha256=sha256_file(root / LOCK) if (root / LOCK).is_file() else None,
        unix_time=run.unix_time,
    )
    return provenance, found.patch


def _without_commit(root: Path) -> changes.Changes:
    """Outside of a repository nothing is promised; one before its first commit, or that git refuses to read, looks as
    if it could be kept."""
    why = git.refusal(root)
    if why is None and git.answer(root, "rev-parse", "--is-inside-work-tree") == "true\n":
        why = "the repository has no commit yet"
    return changes.Changes(patch=b"", left_out=(f"everything: {why}",) if why else ())


def of_another(origin: Provenance, run: RunDetails) -> Provenance:
    """The provenance of another run of the same command and code."""
    words, hosts = tuple(_without_secrets(run.overrides)), tuple(run.hosts)
    return replace(origin, overrides=words, hosts=hosts, data_digest=run.data_digest, unix_time=run.unix_time)


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


def _without_secrets(words: Sequence[str]) -> list[str]:
    return [in_word(word) for word in words]
