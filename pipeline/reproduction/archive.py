"""Exported runs: a run as one archive (`doit export`), and an archive's run (`doit reproduce ARCHIVE`).

Equal runs give equal bytes. An archive may come from anybody: its sealed manifest.json has the run's key and each
file's sha256, and an archive that contradicts its manifest, key or result is refused before anything of it is used."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from pipeline.core import documents, tars
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import sha256_bytes, sha256_file, temporary_prefix, write_atomic
from pipeline.core.processes import git
from pipeline.core.redact import hide
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.reproduction.recipe import SOURCE, pack_commit
from pipeline.runs import acceptance
from pipeline.runs.folder import RunFolder, check_parts, leads_out, link_warning
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder

_EXPORTED = (
    run_folder.CONFIG, run_folder.CONFIG_YAML, run_folder.KEY, run_folder.PROVENANCE, run_folder.CHANGES,
    "requirements.lock", run_folder.PLAN, run_folder.JOURNAL, run_folder.METRICS, run_folder.SYSTEM_METRICS,
    run_folder.SUMMARY, run_folder.PREDICTIONS, run_folder.RESULT, run_folder.TRACKING, run_folder.INITIAL_WEIGHTS,
    run_folder.INITIAL_WEIGHTS_NOTES, "data/manifest.json", "evaluation/*", "attempts/*/*.log",
    "attempts/*/*.exit.json", "code/**/*", f"{SOURCE}/*.pack",
)  # fmt: skip
_WEIGHTS = (run_folder.FINAL_WEIGHTS, run_folder.FINAL_WEIGHTS_NOTES)
_MASKED = (".json", ".yaml", ".log")  # in these kinds of files, passwords in addresses are masked
MANIFEST = "manifest.json"
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
_VERSION = 1
# files that can't be masked, because other files hold their digests
_UNMASKABLE = (run_folder.KEY, run_folder.SUMMARY, run_folder.RESULT, run_folder.PROVENANCE, run_folder.PLAN)
_AGAIN = "another copy of the archive, or doit export KEY once more where the run's folder is"
_LARGEST_BYTES = 16 << 30  # unpacked size of the whole archive
_LARGEST_JSON = 256 << 20  # JSON files are read into memory
_LARGEST_MANIFEST = 64 << 20  # 160 bytes per file for the maximal number of files


def export(
    folder: RunFolder, *, root: Path, to: Path, weights: bool, say: Callable[[str], None] = lambda _: None
) -> int:
    """Write the archive atomically to ``to`` and return its size in bytes. ``say`` gets notes about skipped files.

    Raises:
        AlteredError: a file to export isn't what was written.
        PacelineError: the run was never trained, has no key or provenance, or lacks the requested weights.
        OSError: the archive can't be written.
    """
    if not folder.path.is_dir():
        raise PacelineError(
            f"run {folder.key} was never trained here: there is no folder {folder.path}",
            hint="the command that started it, then export",
        )
    key, provenance = folder.read_key(), folder.read_json(run_folder.PROVENANCE)
    folder.read_summary()  # like read_key and read_result it refuses an altered file
    result = folder.read_result()
    if key is None or provenance is None:
        path = folder.path / (run_folder.KEY if key is None else run_folder.PROVENANCE)
        seen = "is damaged" if path.exists() else "is missing"
        raise PacelineError(
            f"{path} {seen}: nothing could tell where an export of run {folder.key} comes from",
            hint="another copy of the run folder, or its MLflow run: doit reproduce <its MLflow id>",
        )
    if result is not None:
        check_parts(folder, key, result, root)
    if weights and not (folder.path / _WEIGHTS[0]).is_file():
        raise PacelineError(f"{folder.path / _WEIGHTS[0]} is missing", hint="leave --weights away")
    patterns = (*_EXPORTED, *(_WEIGHTS if weights else ()))
    matched = [path for pattern in patterns for path in sorted(folder.path.glob(pattern)) if path.is_file()]
    paths = [path for path in matched if "__pycache__" not in path.parts]  # local runs leave one in code/
    linked = [path for path in paths if leads_out(path, folder.path)]
    if linked:
        say(link_warning(linked, folder.path))
    members = dict(_member(folder, path) for path in paths if path not in linked)
    _, accepted = acceptance.result_or_accepted(folder)
    if accepted is not None:  # the importer doesn't have the accepted run: its result travels with the acceptance
        base, imported = acceptance.base_of(folder, accepted), folder.path / acceptance.BASE_RESULT_FILE
        members[acceptance.FILE] = (folder.path / acceptance.FILE).read_bytes()
        members[acceptance.BASE_RESULT_FILE] = (imported if imported.exists() else base.result).read_bytes()
    commit = provenance.get("git_commit")
    if commit is not None and git.has_commit(root, str(commit)):
        members |= _packed_commit(root, commit)
    files = {name: sha256_bytes(content) for name, content in sorted(members.items())}
    manifest = {"version": _VERSION, "key": folder.key, "digest": key.digest, "files": files}
    members[MANIFEST] = documents.sealed(manifest).encode()
    # no time, owner or mode of this computer: equal runs give equal archives
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, content in sorted(members.items()):
            info = tarfile.TarInfo(f"{folder.key}/{name}")  # owner, time and mode stay at their defaults: 0, 0, 0644
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    write_atomic(to, buffer.getvalue())
    return buffer.tell()


def unpack(archive: Path, target: Path, *, root: Path) -> RunFolder:
    """Check an archive and unpack it below ``target``, a new folder; return the run. ``root``: the project.

    Only plain files with paths inside the run's folder are accepted, at most 16 GiB in total. Raises UsageError: it is
    no such archive, was altered, or holds something that ``export`` never writes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = temporary_prefix(f".{target.name}")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as scratch:
        try:  # checked in a temporary folder: nothing of a refused archive stays
            folder = RunFolder(Path(scratch) / _extract(archive, Path(scratch)))
            folder.refuse_newer()
            key, result = folder.read_key(), folder.read_result()
            folder.read_summary()
            if key is None:
                raise UsageError(f"run={archive} is no exported run: key.json is missing")
            check_parts(folder, key, result, root)
            acceptance.result_or_accepted(folder)
        except AlteredError as error:
            raise UsageError(f"run={archive}: {error.what.replace(f'{scratch}/', '')}", hint=_AGAIN) from error
        except (OSError, *tars.DAMAGE) as error:
            raise UsageError(f"run={archive} can't be read as an exported run: {error}", hint=_AGAIN) from error
        target.mkdir(parents=True, exist_ok=True)
        return RunFolder(folder.path.rename(target / folder.key))


def _extract(archive: Path, target: Path) -> str:
    """Unpack all members below ``target``, check them by the manifest, and return the top folder.

    Raises:
        UsageError: a member or the manifest isn't as ``export`` writes it.
        DamagedError: the manifest's seal is wrong.
        OSError, and what reading a tar may raise.
    """
    with archive.open("rb") as file:
        if file.read(len(_GZIP)) != _GZIP:
            raise UsageError(f"run={archive} is no archive of doit export")
    top, seen = "", set[str]()  # the run's folder, and the names so far in lower case
    with gzip.open(archive) as packed:
        for member in tars.members(packed, most_bytes=_LARGEST_BYTES):
            top = top or member.name.partition("/")[0]
            _refuse_misfit(archive, member, top, seen)
            seen.add(member.name.casefold())
            member.write(target)
        # gzip checks its checksum at the end of the file; before it, tar has a few blocks of zeros
        if any(packed.read(tars.BLOCK_BYTES)) or packed.read(1):
            raise tars.UnfitError("something stands behind its last file")
    if len(top) != KEY_LENGTH:
        raise UsageError(f"run={archive} is no exported run: there is no folder with a run's key in it")
    run_dir = target / top
    if not (run_dir / MANIFEST).is_file():
        raise UsageError(
            f"run={archive} has no {MANIFEST}: it isn't an exported run, or an older Paceline wrote it",
            hint="doit export KEY once more where the run's folder is",
        )
    manifest = documents.read_sealed(run_dir / MANIFEST)
    files = manifest.get("files")
    if manifest.get("version") != _VERSION or manifest.get("key") != top or not isinstance(files, dict):
        raise UsageError(
            f"run={archive}: {MANIFEST} is that of run {manifest.get('key')}, version {manifest.get('version')}; "
            f"the folder is {top}, and version {_VERSION} is known here",
            hint=_AGAIN,
        )
    paths = {path.relative_to(run_dir).as_posix(): path for path in run_dir.rglob("*") if path.is_file()}
    del paths[MANIFEST]  # it can't list its own sha256
    for name in sorted(paths.keys() | files.keys()):
        if name not in files:
            raise UsageError(f"run={archive}: {name!r} was added; {MANIFEST} doesn't name it", hint=_AGAIN)
        if name not in paths:
            raise UsageError(f"run={archive}: {name!r} was taken out; {MANIFEST} names it", hint=_AGAIN)
        if sha256_file(paths[name]) != files[name]:
            raise UsageError(f"run={archive}: {name!r} was altered; its sha256 isn't that of {MANIFEST}", hint=_AGAIN)
    return top


def _member(folder: RunFolder, path: Path) -> tuple[str, bytes]:
    """Return a file's name in the archive, and its content without passwords. Raises PacelineError: a file whose digest
    is recorded elsewhere contains a password."""
    name, content = path.relative_to(folder.path).as_posix(), path.read_bytes()
    masked = content
    if name.endswith(_MASKED):
        masked = hide(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    if masked != content and (name in _UNMASKABLE or name.startswith(f"{run_folder.CODE}/")):
        raise PacelineError(
            f"{path} holds a login in an address (https://user:password@…): without it, it would be "
            "another file than the run was made of",
            hint="the login in a variable of cluster.env whose name says so, as in PROXY_PASSWORD",
        )
    return name, masked


def _packed_commit(root: Path, commit: str) -> dict[str, bytes]:
    """Return the members of the archive from which the importer restores the commit: git packs."""
    with tempfile.TemporaryDirectory(prefix=temporary_prefix("paceline-git")) as scratch:
        pack_commit(git.common_folder(root) or root, commit, Path(scratch))
        return {f"{SOURCE}/{path.name}": path.read_bytes() for path in Path(scratch).iterdir()}


def _refuse_misfit(archive: Path, member: tars.Member, top: str, seen: Collection[str]) -> None:
    """Refuse members that ``export`` never writes; ``seen`` are earlier names in lower case. Raises UsageError."""
    parts = PurePosixPath(member.name).parts
    if member.is_folder:
        raise UsageError(f"run={archive}: {member.name!r} is no plain file; an exported run has only these")
    if len(parts) < 2:
        raise UsageError(f"run={archive}: {member.name!r} leads out of the run's folder")
    if parts[0] != top:
        raise UsageError(f"run={archive} holds more than one run: {member.name!r}")
    if member.name.casefold() in seen:  # macOS would write both into one file
        raise UsageError(f"run={archive} holds {member.name!r} twice")
    most = _LARGEST_JSON if parts[-1].endswith(".json") else _LARGEST_BYTES
    if parts[1:] == (MANIFEST,):
        most = _LARGEST_MANIFEST
    if member.size > most:
        raise UsageError(f"run={archive}: {member.name!r} has {member.size:,} bytes, of at most {most:,}")
