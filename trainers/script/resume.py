"""The choice of the checkpoint for ``{resume}``: the newest complete one, by the layouts that training libraries use,
or by the user's pattern. Standard library only and without effects, because the controller looks in the same way."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NOTES = (".json", ".yaml", ".yml", ".txt", ".log", ".csv", ".md", ".jsonl", ".sha256", ".py")
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".bad")
_WEIGHTS = (".pt", ".pth", ".th", ".ckpt", ".tar", ".bin", ".model", ".safetensors")
_TORN = -1  # in place of a time: the file was cut short while it was written

_HF = re.compile(r"checkpoint[-_]\d+")
_NUMBERED = re.compile(r"(?i)(.*[-_.])?(step|epoch|iter|iteration|global_?step|ckpt|checkpoint|state)s?[-_=]?\d+")
_LAST = re.compile(r"(?i)(^|[-_.])(last|latest)([-_.]|$)")
_BEST = re.compile(r"(?i)(^|[-_.])best([-_.]|$)")
_PARTS = re.compile(r"(?i)(optim|scheduler|random_states|rng_state|trainer_state|training_state)")
_OF_TRANSFORMERS = re.compile(r"(model|pytorch_model|adapter_model)\b.*\.(safetensors|bin)")
_RANDOM_STATE = re.compile(r"rng_state(_\d+)?\.pth")  # of each rank; one may be written before any weights
_LONGEST_HEADER = 100 << 20  # bytes, by safetensors' own limit
_POINTERS = ("latest", "latest_checkpointed_iteration.txt")
_KINDS = ("transformers", "distributed", "lightning", "timm", "last", "other")
"""Layouts by priority: the first one of which a folder has a complete checkpoint counts."""

IsOutput = Callable[[Path], bool]
"""Tells if the script has written a file, which wasn't there before."""


@dataclass(frozen=True)
class _Candidate:
    """A file or folder from which a script could continue. ``time_ns``: time of the newest write."""

    path: Path
    kind: str
    time_ns: int

    @property
    def order(self) -> tuple[int, bool, bool, str]:
        """The key for sorting, newest last; on a tie (two names of one file) ``last`` wins, and ``best`` loses."""
        return self.time_ns, not _BEST.search(self.path.name), bool(_LAST.search(self.path.name)), self.path.name


def newest_checkpoint(folder: Path, pattern: str | None = None, *, is_output: IsOutput | None = None) -> Path | None:
    """Return the newest complete checkpoint below a folder, by ``pattern`` or the layouts of ``_KINDS``, if any.
    ``is_output`` is given for a working directory: only what the script has written counts, and without ``pattern`` a
    single file needs a suffix of ``_WEIGHTS``. Without ``is_output``, every file except notes counts.
    """
    if pattern is not None:
        matches = [path for path in folder.glob(pattern) if is_output is None or _has_output(path, is_output)]
        candidates = [_Candidate(path, "other", time_ns) for path in matches if (time_ns := whole_since(path)) > 0]
    else:
        candidates = [*_candidates(folder, is_output)] if folder.is_dir() else []
    for kind in _KINDS:
        of_kind = [item for item in candidates if item.kind == kind]
        # a copy of the best weights may be newer than the checkpoint to go on from
        preferred = [item for item in of_kind if not _BEST.search(item.path.name)] or of_kind
        if preferred:
            return max(preferred, key=lambda item: item.order).path
    return None


def is_best(path: Path) -> bool:
    """Return True if a name says that a file holds the best weights so far, not the newest."""
    return _BEST.search(path.name) is not None


def is_checkpoint(path: Path) -> bool:
    """Return True if a file is named like weights, or a folder is one checkpoint and not one of a whole run."""
    if path.is_dir():
        return _kind_of_folder(path) is not None
    return path.is_file() and path.name.lower().endswith(_WEIGHTS)


def _candidates(folder: Path, is_output: IsOutput | None) -> Iterator[_Candidate]:
    """Yield files, and folders that are one checkpoint; other folders (of a run, of a version) are searched."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  (names)
    except OSError:
        return
    if (pointer := _pointer(folder, names)) is not None and (is_output is None or is_output(pointer)):
        yield _Candidate(folder, "last", max(pointer.stat().st_mtime_ns, 1))
        return
    for name in names:
        path = folder / name
        if _is_unfinished(name):
            continue
        if path.is_dir():
            if (kind := _kind_of_folder(path)) is None:  # not one checkpoint: search it
                yield from _candidates(path, is_output) if not path.is_symlink() else ()
                continue
            is_wanted = is_output is None or _has_output(path, is_output)
        else:
            kind = _kind_of_file(name)
            is_wanted = is_output is None or (name.lower().endswith(_WEIGHTS) and is_output(path))
        if is_wanted and (time_ns := whole_since(path)) > 0:
            yield _Candidate(path, kind, time_ns)


def _has_output(path: Path, is_output: IsOutput) -> bool:
    files = (inside for inside in path.rglob("*") if inside.is_file()) if path.is_dir() else [path]
    return any(map(is_output, files))


def _kind_of_file(name: str) -> str:
    if _HF.fullmatch(name):
        return "transformers"
    if name.endswith(".ckpt"):
        return "lightning"
    if name.endswith(".pth.tar"):
        return "timm"
    return "last" if _LAST.search(name) else "other"


def _kind_of_folder(path: Path) -> str | None:
    """Return the layout of a checkpoint folder; None for other folders."""
    names = os.listdir(path)  # noqa: PTH208
    if _HF.fullmatch(path.name):
        return "transformers"
    if path.name.endswith(".ckpt"):
        return "lightning"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "distributed"
    is_one = _NUMBERED.fullmatch(path.name) or any(
        _PARTS.match(name) or _OF_TRANSFORMERS.fullmatch(name) for name in names
    )
    if not is_one:
        return None
    return "last" if _LAST.search(path.name) else "other"


def _pointer(folder: Path, names: list[str]) -> Path | None:
    """Return DeepSpeed's or Megatron's file that names the newest checkpoint of the folder; None if there is none. It
    is written last, so the checkpoint that it names is complete.
    """
    for name in _POINTERS:
        path = folder / name
        if name in names and path.is_file() and path.stat().st_size < 256:
            word = path.read_text(encoding="utf-8", errors="replace").strip()
            if word in names or (word.isdecimal() and f"iter_{int(word):07d}" in names):
                return path
    return None


def _is_unfinished(name: str) -> bool:
    name = name.lower()
    return name.startswith((".", "~", "tmp")) or name.endswith(("~", *_UNFINISHED)) or ".tmp" in name


def whole_since(path: Path) -> int:
    """Return when a complete checkpoint was last written (ns; of a folder: its newest file). 0: it is no checkpoint.
    _TORN: its writing was cut short.
    """
    name = path.name.lower()
    if _is_unfinished(name):
        return 0
    try:
        if path.is_dir():
            return _folder_whole_since(path)
        if name.endswith(_NOTES) or "tfevents" in name:
            return 0
        state = path.stat()
        if _is_torn(path):
            return _TORN
        return state.st_mtime_ns if state.st_size else 0
    except OSError:
        return 0


def _folder_whole_since(path: Path) -> int:
    """Return ``whole_since`` of a folder; _TORN if the file is missing that torch or transformers writes last."""
    inside = [*path.iterdir()]
    names = {item.name for item in inside}
    has_shards = any(name.endswith(".distcp") for name in names)
    of_trainer = any(name == "training_args.bin" or _RANDOM_STATE.fullmatch(name) for name in names)
    if (has_shards and ".metadata" not in names) or (of_trainer and "trainer_state.json" not in names):
        return _TORN
    times = [whole_since(item) for item in inside]
    return _TORN if _TORN in times else max(times, default=0)


def _is_torn(path: Path) -> bool:
    """Return True for a zip (of torch.save) or a safetensors file that was cut short."""
    with path.open("rb") as file:
        head = file.read(8)
        if path.suffix == ".safetensors":
            return _is_cut_short(file, int.from_bytes(head, "little"), path.stat().st_size)
    if not head.startswith(b"PK\x03\x04"):
        return False
    import zipfile  # most runs begin without a checkpoint

    return not zipfile.is_zipfile(path)


def _is_cut_short(file: IO[bytes], header_bytes: int, size_bytes: int) -> bool:
    """Return True if a safetensors file is shorter than its header says; ``file`` is positioned at the header."""
    if header_bytes > _LONGEST_HEADER:  # another format of that name
        return False
    if 8 + header_bytes > size_bytes:
        return size_bytes >= 8
    try:
        header = json.loads(file.read(header_bytes))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return bool(8 + header_bytes + max(ends, default=0) > size_bytes)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):  # another format of that name
        return False
