"""A run as one archive, and such an archive read back. Equal run folders give equal bytes."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pipeline import git, leftovers
from pipeline.errors import PacelineError, UsageError
from pipeline.files import write_atomic
from pipeline.key import KEY_LENGTH
from pipeline.redact import hide
from pipeline.runfolder import RunFolder

SOURCE = "source.tar"
"""The commit's files: with them an archive needs no clone that has the commit."""
_KEPT = (
    "config.json", "config.yaml", "key.json", "provenance.json", "changes.patch", "requirements.lock", "plan.json",
    "journal.jsonl", "metrics.jsonl", "summary.json", "predictions.json", "result.json", "tracking.json",
    "data/manifest.json", "evaluation/*", "attempts/*/*.log", "attempts/*/*.exit.json", "code/**/*.py", SOURCE,
)  # fmt: skip
_WEIGHTS = ("checkpoints/final.pt", "checkpoints/final.json")
_MAY_HOLD_ADDRESSES = (".json", ".yaml", ".log")  # a password in a URL must not travel
_LARGEST_BYTES = 16 << 30  # of all that an archive unpacks to
_MOST_MEMBERS = 100_000


def export(folder: RunFolder, *, root: Path, to: Path, weights: bool) -> int:
    """Write the archive atomically; its size in bytes.

    Raises:
        AlteredError: what would be exported isn't what was written.
        PacelineError: the run has no provenance, or its weights are asked for and gone.
        OSError: the archive can't be written.
    """
    provenance = folder.read_json("provenance.json")
    if provenance is None or folder.read_json("key.json") is None:
        raise PacelineError(f"run {folder.key} was never started: it has no provenance.json", try_="doit runs")
    folder.read_key(), folder.read_summary(), folder.read_result()  # refuse what was altered
    if weights and not (folder.path / _WEIGHTS[0]).is_file():
        raise PacelineError(f"{folder.path / _WEIGHTS[0]} is missing", try_="leave weights=1 away")
    members = dict(_members(folder, (*_KEPT, *(_WEIGHTS if weights else ()))))
    commit = provenance.get("git_commit")
    if SOURCE not in members and commit is not None and git.has_commit(root, commit):
        members[SOURCE] = _source(root, commit)
    archive = _packed(folder.key, members)
    write_atomic(to, archive)
    return len(archive)


def unpack(archive: Path, place: Path) -> RunFolder:
    """The run of an archive, unpacked below ``place``.

    Only plain files with paths inside the run's own folder are taken, and no more than 16 GiB of them.

    Raises:
        UsageError: it is no such archive, or holds something that none of ours holds.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = _checked(tar, archive)
            tar.extractall(place, members=members, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UsageError(f"run={archive} can't be read as an exported run: {error}") from error
    folder = RunFolder(place / PurePosixPath(members[0].name).parts[0])
    if folder.read_json("key.json") is None:
        raise UsageError(f"run={archive} is no exported run: key.json is missing or torn")
    folder.refuse_newer()
    return folder


def _members(folder: RunFolder, patterns: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for pattern in patterns:
        for path in sorted(folder.path.glob(pattern)):
            if path.is_file():
                name = path.relative_to(folder.path).as_posix()
                content = path.read_bytes()
                yield name, _without_logins(content) if name.endswith(_MAY_HOLD_ADDRESSES) else content


def _without_logins(content: bytes) -> bytes:
    return hide(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _source(root: Path, commit: str) -> bytes:
    """``git archive`` of the whole repository at that commit."""
    top = git.answer(root, "rev-parse", "--show-toplevel") or str(root)
    with tempfile.TemporaryDirectory(prefix=leftovers.of_system("git")) as scratch:
        path = Path(scratch) / SOURCE
        done = git.git(Path(top.removesuffix("\n")), "archive", "--format=tar", f"--output={path}", commit)
        if done is None or done.code != 0:
            raise PacelineError(f"git archive {commit} failed: {done.stderr.strip() if done else 'no git'}")
        return path.read_bytes()


def _packed(key: str, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, content in sorted(members.items()):
            info = tarfile.TarInfo(f"{key}/{name}")  # owner, time and mode stay at their defaults: 0, 0, 0644
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _checked(tar: tarfile.TarFile, archive: Path) -> list[tarfile.TarInfo]:
    """All members, or UsageError at the first that is not as ``export`` writes it. Read before anything is written."""
    members: list[tarfile.TarInfo] = []
    total = 0
    for member in tar:
        path = PurePosixPath(member.name)
        total += member.size
        if not member.isreg():
            raise UsageError(f"run={archive}: {member.name!r} is no plain file; an exported run has only these")
        if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or "\\" in member.name:
            raise UsageError(f"run={archive}: {member.name!r} leads out of the run's folder")
        if members and path.parts[0] != PurePosixPath(members[0].name).parts[0]:
            raise UsageError(f"run={archive} holds more than one run: {member.name!r}")
        if total > _LARGEST_BYTES or len(members) >= _MOST_MEMBERS:
            raise UsageError(f"run={archive} unpacks to more than {_LARGEST_BYTES >> 30} GiB or {_MOST_MEMBERS} files")
        members.append(member)
    if not members or len(PurePosixPath(members[0].name).parts[0]) != KEY_LENGTH:
        raise UsageError(f"run={archive} is no exported run: there is no folder with a run's key in it")
    return members
