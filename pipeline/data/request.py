"""The inputs of a pack, known before it is built: its folder's name, and the local files that it is read from.

The code that reads and packs the images counts too: the data set's module and its project imports, except those that
can't change an image. So an edited module gives another pack; if that contains the same images, its digest and
therefore the runs' keys are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.errors import DataError
from pipeline.core.files import (
    Stamp,
    canonical_json,
    changing,
    fingerprints,
    sha256_text,
    stamp,
)
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.data import datasets, manifest
from pipeline.data.base import ImageFilesConfig
from pipeline.data.manifest import Pack
from pipeline.data.reads import stale_because
from pipeline.data.sources.source import local_path
from pipeline.keys.canonical import order_in
from pipeline.keys.import_closure import Closure, import_closure
from trainers.core.config import OWN, DatasetConfig

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
        """Raise DataError if a source file or the code changed since it was hashed, OSError if a file is gone."""
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
    path_by_name = local if isinstance(local, dict) else {str(number): path for number, path in enumerate(local)}
    prints = fingerprints([*path_by_name.values()], data_dir)
    modules = _modules(dataset)
    code = _code(modules)
    decides_pack: dict[str, Any] = {
        **settings,
        "source": _source_in_name(dataset, has_files=bool(path_by_name)),
        "inputs": {name: prints[path].sha256 for name, path in path_by_name.items()},
        "version": manifest.VERSION,
        "code": dict(code.digests),
    }
    if order := order_in({"dataset": settings}):
        decides_pack["order"] = order
    if dataset.name == OWN or not modules[0].startswith(f"{datasets.__name__}."):
        decides_pack["versions"] = dict(code.versions)  # installed packages count by their version
    return Request(
        name=f"{dataset.name}-{sha256_text(canonical_json(decides_pack))[:12]}",
        stamps={path: known.stamp for path, known in prints.items()},
        code=code.digests,
        modules=modules,
    )


def _modules(dataset: DatasetConfig) -> tuple[str, ...]:
    """Return the entries of the code that reads and packs the images, the data set's module first."""
    decoding = (_IMAGES,) if isinstance(dataset, ImageFilesConfig) else ()
    own = (getattr(dataset, "target", "").partition(":")[0],) if dataset.name == OWN else ()
    return (datasets.DATASETS.target(dataset.name), _PACKING, *decoding, *own)


def intact(folder: Path) -> Pack | None:
    """Return the pack, unless it is altered or another file that its function read has changed.

    Raises like ``manifest.read``.
    """
    pack = manifest.read(folder)
    return pack if pack is not None and stale_because(folder, ROOT) is None else None


def _code(modules: tuple[str, ...]) -> Closure:
    return import_closure(ROOT, modules, given=_GIVEN)


def _source_in_name(dataset: DatasetConfig, *, has_files: bool) -> str | None:
    """Return what counts of ``dataset.source``: an address without its login, a path if no files count instead."""
    if dataset.source is None:
        return None
    path = local_path(dataset.source)
    if path is None:
        return hide(dataset.source)
    return "files" if has_files else str(path)
