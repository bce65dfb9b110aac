"""Find a pack, or have it built once however many processes want it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import masking
from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import (
    Stamp,
    canonical_json,
    changing,
    fingerprints,
    fsync,
    remove_leftovers,
    sha256_text,
    stamp,
    temporary_prefix,
)
from pipeline.core.locks import held
from pipeline.core.places import ROOT
from pipeline.core.redact import hide
from pipeline.data import datasets, manifest
from pipeline.data.base import ImageFilesConfig, ImageSource, Workspace
from pipeline.data.manifest import Pack
from pipeline.data.progress import OnProgress, reporting
from pipeline.data.sources.source import local_path, refuse_protocol
from pipeline.keys import rank_environment
from pipeline.keys.content_key import order_in
from pipeline.keys.import_closure import Closure, import_closure
from trainers.contract.data_pack import VERSION
from trainers.core.config import OWN, DatasetConfig
from trainers.observation.input_record import first_change, record_inputs
from trainers.observation.notes import Notes


def find(dataset: DatasetConfig, data_dir: Path) -> Pack | None:
    """Look up the pack for these settings; None if there is no intact one, or its source is gone. Needs no network."""
    data_dir = data_dir.absolute()
    if not any(data_dir.glob(f"{dataset.name}-*")):
        return None  # avoids hashing a large source that was never packed
    try:
        return intact(data_dir / request(dataset, data_dir).name)
    except (DataError, OSError):  # the source is gone or unreadable; `fetch` reports it
        return None


def refuse(dataset: DatasetConfig) -> None:
    """Refuse a missing or useless source, or an unreadable protocol, before anything is read. Raises DataError."""
    with _os_errors_as_data_errors(dataset, None):
        datasets.module(dataset.name).local_inputs(dataset)
        if dataset.source is not None:
            refuse_protocol(dataset.source)


def fetch(dataset: DatasetConfig, data_dir: Path, *, on_progress: OnProgress | None = None) -> Pack:
    """Find the pack or build it; blocks while another process builds it.

    ``data_dir`` holds the packs (``<name>-<12 hex>/``) and ``downloads/``. Raises DataError: the data is missing,
    altered, malformed or unreachable, or the disk is full.
    """
    data_dir = data_dir.absolute()
    with _os_errors_as_data_errors(dataset, data_dir), reporting(on_progress) as report:
        data_dir.mkdir(parents=True, exist_ok=True)
        wanted = request(dataset, data_dir)
        target = data_dir / wanted.name
        pack = intact(target)
        if pack is not None:
            return pack
        lock = data_dir / f".{dataset.name}.lock"  # one per data set, so that two packs of one set share a download
        with held(lock, meanwhile=lambda: report(f"waiting for another process that holds {lock}", 0, None)):
            wanted = request(dataset, data_dir)  # its inputs may have changed during the wait
            target = data_dir / wanted.name
            if (pack := intact(target)) is not None:
                return pack
            return _build(dataset, target, wanted, report)


def _build(dataset: DatasetConfig, target: Path, wanted: Request, report: OnProgress) -> Pack:
    # these load numpy and Pillow, and looking up a pack needs neither
    from pipeline.data import images, own_process, packing

    downloads = target.parent / "downloads" / dataset.name
    # under the lock any temporary file among the downloads belongs to a dead process
    for left_over in downloads.glob("tmp*"):
        left_over.unlink()
    remove_leftovers([target.parent])
    building = Path(tempfile.mkdtemp(prefix=temporary_prefix(f".building-{dataset.name}"), dir=target.parent))
    work, folder = Workspace(folder=building, downloads=downloads, report=report), building / "pack"
    try:
        if dataset.name == OWN:
            made = own_process.pack(dataset, wanted, work, target)
        else:
            loaded = datasets.module(dataset.name).load(dataset, work)
            if isinstance(loaded, ImageSource):
                assert isinstance(dataset, ImageFilesConfig)  # no other data set has the settings of images
                loaded = images.raw_set(loaded, dataset, report)
            folder.mkdir()
            made = packing.write(loaded, dataset, folder, report)
            wanted.refuse_changed()  # the pack's name stands for the content that was hashed
        fsync(folder)
        if target.exists():  # altered or incomplete, so that `intact` has refused it
            target.rename(building / "refused")
        folder.rename(target)
        fsync(target.parent)
        return Pack(target, made)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _os_errors_as_data_errors(dataset: DatasetConfig, data_dir: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        local = local_path(dataset.source) if dataset.source else None
        failed = Path(error.filename) if isinstance(error.filename, str) else None
        of_pack = failed is None or (data_dir is not None and failed.is_relative_to(data_dir))
        of_source = local is not None and failed is not None and failed.is_relative_to(local) and not of_pack
        hint = "dataset.source=<what you can read>" if of_source else "paths.data=<a folder that you can write to>"
        raise DataError(f"dataset={dataset.name} could not be packed: {os_reason(error)}", hint=hint) from error


_PACKING = "pipeline.data.packing"
_IMAGES = "pipeline.data.images"
# Applied by the ranks during training; all other settings count in the pack's name.
_TRAINING_ONLY = (
    *("crop_padding", "crop_border", "flip", "alternate_flip", "cutout", "normalise"),
    *("augmentation", "augmentation_args", "random_resized_crop"),
)
# Modules that can't change an image: they move bytes, report or check. The pack layout counts by VERSION.
_GIVEN = (
    "pipeline", "pipeline.data", "pipeline.data.base", "pipeline.data.datasets",
    "pipeline.data.sources.download", "pipeline.data.sources.transfer",
    "pipeline.data.manifest", "pipeline.data.progress",
    "pipeline.core.errors", "pipeline.core.files", "pipeline.core", "pipeline.core.redact",
    "pipeline.core.processes.threads", "pipeline.core.tables",
    "pipeline.core.places",  # names the module that imports all of Paceline
    "trainers.contract", "trainers.contract.data_pack", "trainers.contract.run_folder",
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
    """Compute the request for a pack.

    Local source files count by content; their names only if the module returns names. An address counts by its text,
    without the login. Raises DataError: a local source is missing or changed while it was hashed; OSError; UsageError:
    an unknown data set, or its module has an unresolvable import.
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
        "version": VERSION,
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
    decoding = (_IMAGES,) if isinstance(dataset, ImageFilesConfig) else ()
    own = (getattr(dataset, "target", "").partition(":")[0],) if dataset.name == OWN else ()
    return (datasets.DATASETS.target(dataset.name), _PACKING, *decoding, *own)


def intact(folder: Path) -> Pack | None:
    """Return the pack, unless it is altered or another file that its function read has changed."""
    pack = manifest.read(folder)
    return pack if pack is not None and stale_because(folder, ROOT) is None else None


def _code(modules: tuple[str, ...]) -> Closure:
    return import_closure(ROOT, modules, given=_GIVEN)


def _source_in_name(dataset: DatasetConfig, *, has_files: bool) -> str | None:
    if dataset.source is None:
        return None
    path = local_path(dataset.source)
    if path is None:
        return hide(dataset.source)
    return "files" if has_files else str(path)


READ = "read.json"
"""File in a pack that records what a user-defined function read in addition, in the format of ``record_inputs``."""


def record_reads(
    notes: Notes, root: Path, keyed: Collection[str], bytewise: Collection[str], own: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a program read besides its key (as ``record_inputs``); ``own`` are variables that it was given."""
    record = masking.without_secret_names({**record_inputs(notes, root, keyed, bytewise)})
    digests = rank_environment.variable_digests(os.environ, own)
    return {**record, "values": {name: digests.get(name, "") for name in record["own_variables"]}}


def reads_changed(record: Mapping[str, Any], root: Path, versions: Collection[str] = ()) -> str | None:
    """Explain what of ``record_reads`` has changed; None: nothing. ``versions``: distributions that the key holds."""
    changed = first_change(record, root, versions)
    return changed or rank_environment.changed_variables(record, record.get("values"), os.environ)


def stale_because(folder: Path, root: Path) -> str | None:
    """Explain which additional input of the pack's function has changed since; None if none has."""
    try:
        return reads_changed(json.loads((folder / READ).read_text(encoding="utf-8")), root)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, AttributeError):
        return f"{READ} is damaged"
