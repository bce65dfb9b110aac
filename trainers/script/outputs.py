"""The results of a script on one host after a good end: files that it wrote in its working directory are moved into its
output folder (``{run}`` in a script's arguments) and hashed. The first node writes summary.json last, because it holds
the digests of the other files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from trainers.contract import run_folder
from trainers.core.files import sha256_file
from trainers.observation import unkeyed as unkeyed_inputs
from trainers.observation.input_record import InputRecord
from trainers.observation.unkeyed import Unkeyed, outside_warning
from trainers.script.files import NOTE, WARNING, in_words, printable, say, work_folder, write_json, write_sealed
from trainers.script.metrics.recorder import Recorder
from trainers.script.settings import ScriptConfig
from trainers.script.workdir import Node, below, copy_of, written_by_script


class Results:
    """What a script leaves on this host after a good end. ``began_s``: the script's start in unix seconds."""

    def __init__(self, node: Node, settings: ScriptConfig, name: str, began_s: float) -> None:
        self.node, self.settings, self.name, self.began_s = node, settings, name, began_s

    def keep(self, recorder: Recorder | None, record: InputRecord, unkeyed: Sequence[Unkeyed]) -> int:
        """Gather this node's outputs and write the results, summary.json last; return the exit code. Raises OSError."""
        node, outputs = self.node, self.node.outputs
        folder = work_folder(node.run_dir, node.rank)
        if outputs.is_symlink() or (outputs.exists() and not outputs.is_dir()):
            obstacle = "a link" if outputs.is_symlink() else "a file"
            say(
                f"error: {self.name} has put {obstacle} in the place of its folder {{run}}, {outputs}; it is to write "
                "there"
            )
            return 1
        try:
            gathered = gather(node, self.settings)
        except MissingOutputsError as error:
            say(f"error: {self.name} ended with exit code 0 without {error}")
            return 1
        # warn of what can't be kept; of a sent run folder, the controller does that when it fetches the files
        in_work = unreadable(node.run_dir, folder / run_folder.ABOVE)
        unkept = {name: why for name, why in in_work.items() if why != LEADS_OUT}  # a link there is no result
        unkept |= unreadable(node.run_dir, outputs, node.run_dir / run_folder.CHECKPOINTS)
        if unkept and not node.is_sent:
            names = in_words([f"{name} ({why})" for name, why in unkept.items()])
            say(f"{WARNING}not kept with what the script wrote: {names}")
        remaining = self._keep_on_host() if gathered.over_limit else None
        self._report(gathered, remaining)
        if recorder is not None:
            self._write(recorder, gathered, record, unkeyed, unkept)
        elif self.settings.seal != "off":
            outputs.parent.mkdir(parents=True, exist_ok=True)
            full_record = {**record, "unkeyed": unkeyed_inputs.as_json(unkeyed)}
            write_sealed(outputs.parent / run_folder.DEPENDENCIES, full_record)
        # after a move nothing is left to remove; of a sent folder the agent fetches what given.json doesn't list
        if gathered.over_limit or node.is_sent:
            return 0
        if any(name in in_work and why not in NO_FILES for name, why in unkept.items()):
            remaining = self._keep_on_host()
            say(f"{WARNING}what can't be read stays on this host in {remaining / run_folder.WORK_COPY}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another node's folder lies there
                folder.parent.rmdir()
        return 0

    def _report(self, gathered: Gathered, remaining: Path | None) -> None:
        """Print which files of the working directory were kept or renamed, or stay in ``remaining`` (the limit)."""
        folder = self.node.place(self.node.outputs, run_folder.OUTPUTS)
        if gathered.renamed:
            names = in_words([f"{name} is {folder}/{target}" for name, target in gathered.renamed.items()])
            say(f"{WARNING}files of the working directory whose place another file of the run has: {names}")
        if gathered.kept:
            files = in_words([*gathered.kept], sum(gathered.kept.values()))
            say(f"{NOTE}wrote in its working directory: {files}; kept in {folder}/{WORKDIR}")
        if remaining is not None:
            files = in_words([*gathered.over_limit], sum(gathered.over_limit.values()))
            gib = self.settings.outputs_limit or 0.0
            say(
                f"{WARNING}wrote in its working directory more than program.outputs_limit={gib:g} GiB: {files}; they "
                f"stay on this host in {remaining / run_folder.WORK_COPY}; program.outputs=['GLOB'] or a "
                "higher limit bring such files back"
            )

    def _keep_on_host(self) -> Path:
        """Move the working directory, whose files can't all be fetched, to its final place. Raises OSError."""
        folder = work_folder(self.node.run_dir, self.node.rank)
        final_place = folder.with_name(f"{folder.name}-left")
        shutil.rmtree(final_place, ignore_errors=True)
        folder.replace(final_place)
        return final_place

    def _write(
        self,
        recorder: Recorder,
        gathered: Gathered,
        record: InputRecord,
        unkeyed: Sequence[Unkeyed],
        unkept: Mapping[str, str],
    ) -> None:
        """Write the files of results of the first node, summary.json last."""
        run_dir, metrics = self.node.run_dir, recorder.metrics
        if self.settings.seal != "off" and (outside := [*record["files"]]):
            say(f"{WARNING}{outside_warning(outside)}")
        write_sealed(run_dir / run_folder.DEPENDENCIES, record)
        digests = {name: digest.as_json() for name, digest in gathered.digests.items()}
        write_json(run_dir / run_folder.OUTPUT_DIGESTS, digests)
        nonfinite = {name: values.as_json() for name, values in metrics.left_out.items()}
        summary = {
            "steps": metrics.step,
            "metrics": metrics.last,
            **({"nonfinite": nonfinite} if nonfinite else {}),
            "unkeyed": unkeyed_inputs.as_json(unkeyed),
            "duration_s": round(time.time() - self.began_s, 3),
            "outputs_sha256": digests_of_results(run_dir, unkept),
            **({"not_kept": {printable(name): why for name, why in unkept.items()}} if unkept else {}),
        }
        write_sealed(run_dir / run_folder.SUMMARY, summary)


class MissingOutputsError(Exception):
    """A pattern matched nothing. The text names all such patterns."""


class OutputDigest(NamedTuple):
    sha256: str
    size_bytes: int

    def as_json(self) -> dict[str, str | int]:
        return {"sha256": self.sha256, "bytes": self.size_bytes}


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What became of the files that a script wrote on this host."""

    digests: dict[str, OutputDigest]  # of the requested files, by path in the outputs
    # of other files, by path from the working directory:
    kept: dict[str, int]  # sizes in bytes of those moved to the outputs
    over_limit: dict[str, int]  # sizes in bytes of those that stay on this host
    renamed: dict[str, str]  # path in the outputs of files whose name was taken


LEADS_OUT = "a link that leads out of the run folder"
NO_FILES = (LEADS_OUT, "a pipe", "a socket", "a device")
"""Reasons of ``unreadable`` for paths without a content to keep."""
WORKDIR = "workdir"
"""Folder among the outputs for files of the working directory that no pattern matches."""


def gather(node: Node, settings: ScriptConfig) -> Gathered:
    """Move the script's files into {run}, and hash those that program.outputs requests. No file replaces another. Of
    files that no pattern matches the smallest are kept, up to the limit. Raises MissingOutputsError, OSError.
    """
    workdir, outputs = copy_of(node.run_dir, node.rank) / settings.workdir, node.outputs
    written, limit_bytes = written_by_script(node.run_dir, node.rank), settings.outputs_limit_bytes
    unreadable_paths = [node.run_dir / name for name in unreadable(node.run_dir, outputs)]
    # the requested files: some lie in {run} already, the others are moved there from the working directory
    names_in_run: set[str] = set()
    requested: dict[Path, str] = {}
    missing = []
    for pattern in settings.outputs:
        glob = pattern.removeprefix("{run}/")
        in_run = {
            path.relative_to(outputs).as_posix() for path in _files(outputs, glob) if path not in unreadable_paths
        }
        in_workdir = set(written) & set(_files(workdir, glob)) if glob == pattern else set()
        requested |= {path: path.relative_to(workdir).as_posix() for path in in_workdir}
        names_in_run |= in_run
        missing += [] if in_run or in_workdir else [pattern]
    if missing and node.is_first:
        raise MissingOutputsError(", ".join(missing))
    others = sorted(set(written) - requested.keys()) if limit_bytes is not None else []
    kept, over_limit = _split_by_limit(others, limit_bytes or 0)
    targets = {path: requested[path] for path in sorted(requested)}  # file → name in {run}
    # files below the working directory first: up/x and ../x both become up/x, and the first one keeps the name
    for path in sorted(kept, key=lambda path: (not path.is_relative_to(workdir), path)):
        targets[path] = f"{WORKDIR}/{below(path, workdir)}"
    renamed, unmoved = {}, set()
    for path, name in targets.items():
        target = _free(outputs, name)
        if target != name:
            renamed[os.path.relpath(path, workdir)] = targets[path] = target
        try:
            _move(path, outputs / target)
        except PermissionError:  # ``unreadable`` has noted a file that was not requested
            if path in requested:
                raise
            unmoved.add(target)
    kept = {path: size for path, size in kept.items() if targets[path] not in unmoved}
    return Gathered(
        digests={
            name: OutputDigest(sha256_file(outputs / name), (outputs / name).stat().st_size)
            for name in sorted(names_in_run | {targets[path] for path in requested})
        },
        kept={targets[path].removeprefix(f"{WORKDIR}/"): size for path, size in kept.items()},
        over_limit={below(path, workdir): size for path, size in over_limit.items()},
        renamed=renamed,
    )


def _free(outputs: Path, name: str) -> str:
    """Return a free name in ``outputs``: numbered (``m-2.pt``, ``a-2/m.pt``) if it or a folder of it is taken."""
    free = Path()
    *folders, last = Path(name).parts
    for folder in folders:
        free /= _numbered(folder, lambda path: path.is_dir() or not os.path.lexists(path), outputs / free)
    return (free / _numbered(last, lambda path: not os.path.lexists(path), outputs / free)).as_posix()


def _numbered(name: str, is_free: Callable[[Path], bool], folder: Path) -> str:
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  (of a name alone)
    candidates = chain([name], (f"{stem}-{number}{suffix}" for number in count(2)))
    return next(candidate for candidate in candidates if is_free(folder / candidate))


def _split_by_limit(paths: Sequence[Path], limit_bytes: int) -> tuple[dict[Path, int], dict[Path, int]]:
    """Return path → size of the files that are kept, the smallest first, and of the others."""
    sizes = {path: path.stat().st_size for path in paths}
    total, kept = 0, dict[Path, int]()
    for path in sorted(paths, key=lambda path: sizes[path]):
        total += sizes[path]
        if total <= limit_bytes:
            kept[path] = sizes[path]
    return kept, {path: size for path, size in sizes.items() if path not in kept}


def digests_of_results(run_dir: Path, unreadable_names: Collection[str] = ()) -> dict[str, str]:
    """Return path in the run folder → sha256 of each file that an attempt leaves. Raises OSError."""
    folders = (run_dir / run_folder.CHECKPOINTS, run_dir / run_folder.OUTPUTS)
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for name in (run_folder.METRICS, run_folder.OUTPUT_DIGESTS) if (path := run_dir / name).exists()]
    names = {path.relative_to(run_dir).as_posix(): path for path in [*files, *kept]}
    return {name: sha256_file(path) for name, path in names.items() if name not in unreadable_names}


def unreadable(run_dir: Path, *folders: Path) -> dict[str, str]:
    """Return path in the run folder → why it can't be kept: unreadable, no file, or a link out of the run folder."""
    top, reasons = os.path.realpath(run_dir), dict[str, str]()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            reasons[os.path.relpath(error.filename, run_dir)] = str(error.strerror)

    for folder in folders:
        for parent, inside, names in os.walk(folder, onerror=note):
            links = [name for name in inside if Path(parent, name).is_symlink()]
            # in place, so that os.walk visits only these folders
            inside[:] = sorted(name for name in inside if name != "__pycache__")
            for path in (Path(parent, name) for name in [*links, *names]):
                try:
                    if why := _why_not(path, top):
                        reasons[path.relative_to(run_dir).as_posix()] = why
                except OSError as error:
                    note(error)
    return dict(sorted(reasons.items()))


def _why_not(path: Path, top: str) -> str:
    """Return why a path can't be kept, in the words of the agent's files/results.py; '' if it can. Raises OSError."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(top):
        return LEADS_OUT
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return "" if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
    if stat.S_ISDIR(mode):
        return ""
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files that match a glob, and all files below folders that match."""
    for path in sorted(folder.glob(pattern)):
        for inside in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if inside.is_file() and "__pycache__" not in inside.parts:
                yield inside


def _move(path: Path, target: Path) -> None:
    """Move a file, or copy it if its folder can't be written to. Raises OSError: it can't be read either."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.replace(target)
    except PermissionError:
        shutil.copyfile(path, target)
