"""Build a pack in a temporary folder that is renamed into place. Imports numpy and Pillow."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pipeline.core.files import fsync, remove_leftovers, temporary_prefix
from pipeline.data import datasets, own_process, packing
from pipeline.data.base import ImageFilesConfig, Source, Workspace
from pipeline.data.manifest import Pack
from pipeline.data.progress import OnProgress
from pipeline.data.reading import images
from pipeline.data.request import Request
from trainers.core.config import OWN, DatasetConfig


def build(dataset: DatasetConfig, target: Path, wanted: Request, report: OnProgress) -> Pack:
    """Build the pack ``target``; the caller holds the data set's lock. Raises DataError, OSError."""
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
            if isinstance(loaded, Source):
                assert isinstance(dataset, ImageFilesConfig)  # no other data set has the settings of images
                loaded = images.raw_set(loaded, dataset, report)
            folder.mkdir()
            made = packing.write(loaded, dataset, folder, report)
            wanted.refuse_changed()  # the pack's name stands for the content that was hashed
        fsync(folder)
        if target.exists():  # altered or incomplete, so that `request.intact` has refused it
            target.rename(building / "refused")
        folder.rename(target)
        fsync(target.parent)
        return Pack(target, made)
    finally:
        shutil.rmtree(building, ignore_errors=True)
