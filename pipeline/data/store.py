"""The store of data packs in ``paths.data``: finds a data set's pack, or builds it once for all who want it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import fsync, remove_leftovers, temporary_prefix
from pipeline.core.locks import held
from pipeline.core.places import ROOT
from pipeline.data import datasets, manifest
from pipeline.data.base import ImageFilesConfig, ImageSource, Workspace
from pipeline.data.manifest import Pack
from pipeline.data.progress import OnProgress, reporting
from pipeline.data.request import Request, request, stale_because
from pipeline.data.sources.source import local_path, refuse_protocol
from trainers.core.config import OWN, DatasetConfig


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
    """Refuse a missing or useless source, or a URL that nothing here can read, before reading. Raises DataError."""
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
        pack_request = request(dataset, data_dir)
        target = data_dir / pack_request.name
        pack = intact(target)
        if pack is not None:
            return pack
        lock = data_dir / f".{dataset.name}.lock"  # one per data set, so that two packs of one set share a download
        with held(lock, meanwhile=lambda: report(f"waiting for another process that holds {lock}", 0, None)):
            pack_request = request(dataset, data_dir)  # its inputs may have changed during the wait
            target = data_dir / pack_request.name
            if (pack := intact(target)) is not None:
                return pack
            return _build(dataset, target, pack_request, report)


def _build(dataset: DatasetConfig, target: Path, pack_request: Request, report: OnProgress) -> Pack:
    """Build the pack in a temporary folder, then move it to ``target``. The caller holds the data set's lock."""
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
            pack_manifest = own_process.pack(dataset, pack_request, work, target)
        else:
            loaded = datasets.module(dataset.name).load(dataset, work)
            if isinstance(loaded, ImageSource):
                assert isinstance(dataset, ImageFilesConfig)  # no other data set has the settings of images
                loaded = images.raw_set(loaded, dataset, report)
            folder.mkdir()
            pack_manifest = packing.write(loaded, dataset, folder, report)
            pack_request.refuse_changed()  # the pack's name stands for the content that was hashed
        fsync(folder)
        if target.exists():  # altered or incomplete, so that `intact` has refused it
            target.rename(building / "refused")
        folder.rename(target)
        fsync(target.parent)
        return Pack(target, pack_manifest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _os_errors_as_data_errors(dataset: DatasetConfig, data_dir: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # The hint depends on which side failed: reading the source, or writing the pack.
        source = local_path(dataset.source) if dataset.source else None
        failed_path = Path(error.filename) if isinstance(error.filename, str) else None
        is_of_source = failed_path is not None and source is not None and failed_path.is_relative_to(source)
        if failed_path is not None and data_dir is not None and failed_path.is_relative_to(data_dir):
            is_of_source = False  # paths.data may lie inside the source's folder
        hint = "dataset.source=<what you can read>" if is_of_source else "paths.data=<a folder that you can write to>"
        raise DataError(f"dataset={dataset.name} could not be packed: {os_reason(error)}", hint=hint) from error


def intact(folder: Path) -> Pack | None:
    """Return the pack; None if it is altered, or if a file changed after the function of ``dataset=own`` read it."""
    pack = manifest.read(folder)
    return pack if pack is not None and stale_because(folder, ROOT) is None else None
