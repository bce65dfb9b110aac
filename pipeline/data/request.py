"""The inputs of a pack, known before it is built: its folder's name, and the local files that it is read from.

The code that reads and packs the images counts too: the data set's module and its project imports, except those that
can't change an image. So an edited module gives another pack; if that contains the same images, its digest and
therefore the runs' keys are unchanged.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import masking
from pipeline.core.errors import DataError
from pipeline.core.files import Stamp, canonical_json, settles_in, sha256_file, sha256_text, stamp, write_json
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.data import datasets, manifest
from pipeline.data.base import ImageFilesConfig
from pipeline.data.manifest import Pack
from pipeline.data.sources.source import local_path
from pipeline.keys import rank_environment
from pipeline.keys.canonical import order_in
from pipeline.keys.import_closure import Closure, import_closure
from trainers.core.config import OWN, DatasetConfig
from trainers.observation.input_record import first_change, record_inputs
from trainers.observation.notes import Notes

_PACKING = "pipeline.data.packing"
_IMAGES = "pipeline.data.images"
# Applied by the ranks during training; all other settings count in the pack's name.
_TRAINING_ONLY = (
    *("crop_padding", "crop_border", "flip", "alternate_flip", "cutout", "normalise"),
    *("augmentation", "augmentation_args", "random_resized_crop"),
)
# Modules that can't change an image: they move bytes, report or check. The pack layout counts by manifest.VERSION.
_GIVEN = (
    "pipeline", "pipeline.data", "pipeline.data.base", "pipeline.data.datasets",
    "pipeline.data.sources.download", "pipeline.data.sources.transfer",
    "pipeline.data.manifest", "pipeline.data.progress",
    "pipeline.core.errors", "pipeline.core.files", "pipeline.core", "pipeline.core.redact",
    "pipeline.core.places",  # names the module that imports all of Paceline
    "trainers", "trainers.core", "trainers.core.config",
)  # fmt: skip
READ = "read.json"
"""File in a pack that records what a user-defined function read in addition, in the format of ``record_inputs``."""
FINGERPRINTS = ".fingerprints.json"


class Request(NamedTuple):
    """A requested pack; ``name`` is ``<data set>-<12 hex>``.

    ``stamps`` are the source files' stamps from before they were hashed. ``code`` maps the paths of reading and packing
    code to digests; ``modules`` are the entries of that code.
    """

    name: str
    stamps: Mapping[Path, Stamp]
    code: Mapping[str, str]
    modules: tuple[str, ...]

    def refuse_changed(self) -> None:
        """Raise DataError if a source file or the code changed since it was hashed.

        Raises OSError if a file is gone.
        """
        for path, before in self.stamps.items():
            if stamp(path) != before:
                raise changing(path)
        now = _code(self.modules).digests
        if edited := sorted(name for name in {*now, *self.code} if now.get(name) != self.code.get(name)):
            raise DataError(
                f"{', '.join(edited[:3])} was edited while the data was packed", hint="the same command again"
            )


def request(dataset: DatasetConfig, data_dir: Path) -> Request:
    """Compute the request for a pack with these settings.

    Local source files count by content, in the order of the module's list; their names and folders don't count unless
    the module returns names. An address counts by its text, without the login.

    Raises:
        DataError: an unknown data set, or a local source is missing, no regular file, or changed while it was hashed.
        OSError: a source can't be read.
        UsageError: the data set's module has an unresolvable import.
    """
    settings = {name: value for name, value in asdict(dataset).items() if name not in _TRAINING_ONLY}
    local = datasets.module(dataset.name).local_inputs(dataset)
    files = local if isinstance(local, dict) else {str(number): path for number, path in enumerate(local)}
    known = fingerprints([*files.values()], data_dir)
    wanted = {**settings, "source": _source(dataset, bool(files))}
    wanted["inputs"] = {name: known[path][1] for name, path in files.items()}
    wanted["version"] = manifest.VERSION
    if order := order_in({"dataset": settings}):
        wanted["order"] = order
    module = datasets.DATASETS.target(dataset.name)
    reading = (_IMAGES,) if isinstance(dataset, ImageFilesConfig) else ()
    own = (getattr(dataset, "target", "").partition(":")[0],) if dataset.name == OWN else ()
    modules = (module, _PACKING, *reading, *own)
    code = _code(modules)
    wanted["code"] = dict(code.digests)
    if own or not module.startswith(f"{datasets.__name__}."):  # installed packages count by their version
        wanted["versions"] = dict(code.versions)
    name = f"{dataset.name}-{sha256_text(canonical_json(wanted))[:12]}"
    stamps = {path: stamp for path, (stamp, _) in known.items()}
    return Request(name=name, stamps=stamps, code=code.digests, modules=modules)


def intact(folder: Path) -> Pack | None:
    """Return the pack, unless it is altered or another file that its function read has changed.

    Raises like ``manifest.read``.
    """
    pack = manifest.read(folder)
    return pack if pack is not None and stale_because(folder, ROOT) is None else None


def stale_because(folder: Path, root: Path) -> str | None:
    """Explain which additional input of the pack's function has changed since; None if none has."""
    try:
        return reads_changed(json.loads((folder / READ).read_text(encoding="utf-8")), root)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{READ} is damaged"


def record_reads(
    notes: Notes, root: Path, keyed: Collection[str], bytewise: Collection[str], own: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a program read besides its key, for ``reads_changed``; ``own`` are variables that it was given.

    The other arguments are those of ``record_inputs``.
    """
    record = masking.without_secret_names({**record_inputs(notes, root, keyed, bytewise)})
    digests = rank_environment.variable_digests(os.environ, own)
    return {**record, "values": {name: digests.get(name, "") for name in record["own_variables"]}}


def reads_changed(record: Mapping[str, Any], root: Path, versions: Collection[str] = ()) -> str | None:
    """Explain which file or variable of ``record_reads`` has changed since; None if none has.

    ``versions``: the distributions whose versions the key holds.
    """
    changed = first_change(record, root, versions)
    return changed or rank_environment.changed_variables(record, record.get("values"), os.environ)


def _code(modules: tuple[str, ...]) -> Closure:
    return import_closure(ROOT, modules, given=_GIVEN)


def _source(dataset: DatasetConfig, has_files: bool) -> str | None:
    if dataset.source is None:
        return None
    path = local_path(dataset.source)
    if path is None:
        return hide(dataset.source)
    return "files" if has_files else str(path)


def fingerprints(paths: Sequence[Path], data_dir: Path) -> dict[Path, tuple[Stamp, str]]:
    """Return stamp and sha256 of each file; hashes only files with changed stamps.

    The cache lies in ``data_dir`` and may be lost without harm; of two concurrent writers the last one wins.
    """
    cache = _read_cache(data_dir / FINGERPRINTS)
    fresh: dict[str, list[int | str]] = {}
    by_path = {}
    for path in paths:
        now, noted = stamp(path), cache.get(str(path), [])
        if noted[:-1] == list(now):
            by_path[path] = now, str(noted[-1])
        else:
            by_path[path] = fingerprint(path)
            fresh[str(path)] = [*by_path[path][0], by_path[path][1]]
    if fresh and data_dir.is_dir():
        with suppress(OSError):  # a read-only data folder can still be read from
            write_json(data_dir / FINGERPRINTS, {**cache, **fresh})
    return by_path


def fingerprint(path: Path) -> tuple[Stamp, str]:
    """Return stamp and sha256 of a file, once no unnoticed write is possible any more. Raises DataError, OSError."""
    before = stamp(path)
    unsettled_s = settles_in(before.ctime_ns)
    if math.isfinite(unsettled_s):  # any write after this wait changes the stamp
        time.sleep(unsettled_s)
    sha256 = sha256_file(path)
    if stamp(path) != before:
        raise changing(path)
    return before, sha256


def changing(path: Path) -> DataError:
    """Return the error for a file that was written to while it was read."""
    return DataError(f"{path} was changed while it was read", hint="the same command, when nothing writes to it")


def _read_cache(path: Path) -> dict[str, list[int | str]]:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    rows = noted.items() if isinstance(noted, dict) else ()
    return {name: row for name, row in rows if isinstance(row, list) and len(row) == len(Stamp._fields) + 1}
