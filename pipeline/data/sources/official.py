"""Data sets with a fixed list of published files (CIFAR-10, MNIST): finds or downloads the files, and verifies each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file
from pipeline.data.base import Workspace
from pipeline.data.sources import folder as folders
from pipeline.data.sources.download import DownloadRequest, download, retrieve, unreachable
from pipeline.data.sources.source import file_name, local_path, refuse_special, without_login
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.sources.transfer import TransferError


@dataclass(frozen=True, kw_only=True)
class OfficialFile:
    """A published file, as it is known to be."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """One published form of a set (CIFAR-10 is published as pickles and as binary files)."""

    title: str
    folders: tuple[str, ...]  # where the files may lie below the source, besides the source itself
    train: tuple[OfficialFile, ...]
    test: tuple[OfficialFile, ...]

    def required_files(self, config: DatasetConfig) -> tuple[OfficialFile, ...]:
        """Return the required files; a hold-out needs no official test files."""
        return self.train if config.holdout else (*self.train, *self.test)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All that is published of a set."""

    layouts: tuple[PublishedLayout, ...]
    downloads: tuple[DownloadRequest, ...]  # archives or single files
    holdout: int  # images; the hint suggests it if only the test files are missing


@dataclass(frozen=True, kw_only=True)
class OfficialFiles:
    """Verified files of one layout. ``origin`` is their source for messages."""

    layout: PublishedLayout
    files: dict[str, Path]
    origin: str

    def paths(self, files: Sequence[OfficialFile]) -> list[Path]:
        return [self.files[file.name] for file in files]

    @property
    def source_files(self) -> dict[str, str]:
        published = (*self.layout.train, *self.layout.test)
        return {file.name: file.sha256 for file in published if file.name in self.files}


def local_inputs(config: DatasetConfig, catalogue: Catalogue) -> list[Path]:
    """Return the local files whose content decides the pack: the archive, or the known files in a folder.

    ``data.request`` hashes them for the pack's name, so that a changed file gives another pack. Empty if the set is
    downloaded.
    """
    path = local_path(config.source)
    if path is None:
        return []
    if path.is_dir():
        layout, folder = _most_complete_layout(path, config, catalogue)
        return [folder / file.name for file in layout.required_files(config) if (folder / file.name).is_file()]
    refuse_special(config.source, path)
    return [path]


def collect(config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> OfficialFiles:
    """Return the verified files from ``config.source``. Raises DataError."""
    path = local_path(config.source)
    if config.source is None:
        folder, origin = _download_official(config, catalogue, work), "official addresses"
    elif path is None:
        folder, origin = _download_from(config.source, config, catalogue, work), without_login(config.source)
    else:
        folder, origin = path if path.is_dir() else _unpack(path, catalogue, work), str(path)
    layout, folder = _most_complete_layout(folder, config, catalogue)
    files = {file.name: folder / file.name for file in layout.required_files(config)}
    _check_complete(config, catalogue, layout, folder, origin)
    for file in layout.required_files(config):
        _verify(file, files[file.name])
        work.report(f"verifying {config.name}", file.size_bytes, None)
    return OfficialFiles(layout=layout, files=files, origin=origin)


def _most_complete_layout(folder: Path, config: DatasetConfig, catalogue: Catalogue) -> tuple[PublishedLayout, Path]:
    """Return the layout that lacks the fewest files in ``folder`` or below it, and the folder of its files."""
    candidates = [(layout, folder / below) for layout in catalogue.layouts for below in ("", *layout.folders)]
    return min(candidates, key=lambda candidate: len(_missing(candidate[0], candidate[1], config)))


def _missing(layout: PublishedLayout, folder: Path, config: DatasetConfig) -> list[OfficialFile]:
    return [file for file in layout.required_files(config) if not (folder / file.name).is_file()]


def _check_complete(
    config: DatasetConfig, catalogue: Catalogue, layout: PublishedLayout, folder: Path, origin: str
) -> None:
    missing = _missing(layout, folder, config)
    if not missing:
        return
    names = ", ".join(file.name for file in missing)
    if len(missing) == len(layout.required_files(config)):
        names_by_layout = [", ".join(file.name for file in each.required_files(config)) for each in catalogue.layouts]
        raise DataError(
            f"dataset={config.name}: none of its files is in {origin}; wanted: {'; or '.join(names_by_layout)}",
            hint="dataset.source=<the folder or archive that holds them>, or leave it out to download",
        )
    hint = f"add {names}, or leave dataset.source out to download the whole set"
    if all(file in layout.test for file in missing):
        hint = f"dataset.holdout={catalogue.holdout}, which takes the test split from the training images"
    raise DataError(f"dataset={config.name}: {names} is missing in {origin} ({layout.title})", hint=hint)


def _verify(file: OfficialFile, path: Path) -> None:
    """Refuse a file of another content than the published one. Raises DataError."""
    # the size first: this costs nothing, and distinguishes a truncated file from an altered one
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise DataError(
            f"{path} is {'truncated' if size_bytes < file.size_bytes else 'too long'}: "
            f"expected {file.size_bytes} bytes, seen {size_bytes}",
            hint="copy it again from its origin",
        )
    digest = sha256_file(path)
    if digest != file.sha256:
        raise DataError(
            f"{path} is altered: expected sha256 {file.sha256}, seen {digest}", hint="copy it again from its origin"
        )


def _unpack(archive: Path, catalogue: Catalogue, work: Workspace) -> Path:
    """Unpack the published files; return the folder of the first, wherever the archive has it."""
    names = tuple(file.name for layout in catalogue.layouts for file in (*layout.train, *layout.test))
    folder = work.folder / "unpacked"
    folder.mkdir()
    work.report(f"unpacking {archive.name}", 0, None)
    folders.extract(archive, names, folder)
    return next((path.parent for path in sorted(folder.rglob("*")) if path.name in names), folder)


def _download_official(config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> Path:
    """Download the set from its official addresses, and return the folder of its files. Raises DataError."""
    # a hold-out needs no official test files
    unneeded = {file.name for layout in catalogue.layouts for file in layout.test} if config.holdout else set()
    for download_request in catalogue.downloads:
        if download_request.name in unneeded:
            continue
        path = download(config, download_request, work.downloads, work.report)
        if download_request.name.endswith(folders.ARCHIVES):
            return _unpack(path, catalogue, work)
    return work.downloads


def _download_from(url: str, config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> Path:
    """Download an archive or a folder of the files from a user's address, and return the folder of the files."""
    name = file_name(url)
    if not name.endswith(folders.ARCHIVES):
        return _download_files(url, config, catalogue, work)
    published = {official.name: official.sha256 for official in catalogue.downloads}
    download_request = DownloadRequest(name=name, urls=(url,), sha256=published.get(name))
    # only a file with a known digest can be used again, so others aren't kept
    folder = work.folder if download_request.sha256 is None else work.downloads
    return _unpack(download(config, download_request, folder, work.report), catalogue, work)


def _download_files(url: str, config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> Path:
    """Download the single files of the first layout whose first file exists. `_check_complete` reports missing ones."""
    absent: list[TransferError] = []  # the first file of each layout
    for layout in catalogue.layouts:
        for file in layout.required_files(config):
            address = f"{url.rstrip('/')}/{file.name}"
            download_request = DownloadRequest(name=file.name, urls=(address,), sha256=file.sha256)
            path_or_failures = retrieve(download_request, work.downloads, work.report)
            if isinstance(path_or_failures, Path):
                continue
            if not path_or_failures[0].absent:
                raise unreachable(config, file.name, path_or_failures)
            if file is layout.train[0]:
                absent += path_or_failures
                break  # try the next layout
        else:
            return work.downloads
    raise unreachable(config, "its first file", absent)
