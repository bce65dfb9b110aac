"""Data sets with a fixed list of published files: find, download or unpack the files, and verify each one."""

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
from pipeline.data.sources.source import file_name, local_path, refuse_special, shown
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.sources.transfer import TransferError


@dataclass(frozen=True, kw_only=True)
class OfficialFile:
    """A published file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """One published form of the set. ``folders``: where the files may lie below the source."""

    title: str
    folders: tuple[str, ...]
    train: tuple[OfficialFile, ...]
    test: tuple[OfficialFile, ...]

    def wanted(self, config: DatasetConfig) -> tuple[OfficialFile, ...]:
        """Return the required files; a hold-out needs no official test files."""
        return self.train if config.holdout else (*self.train, *self.test)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All layouts of a set, the downloads (archives or single files), and the hold-out to suggest."""

    layouts: tuple[PublishedLayout, ...]
    downloads: tuple[DownloadRequest, ...]
    holdout: int


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
        known = (*self.layout.train, *self.layout.test)
        return {file.name: file.sha256 for file in known if file.name in self.files}


def local_inputs(config: DatasetConfig, catalogue: Catalogue) -> list[Path]:
    """Return the files for `request` to fingerprint: the archive, or the known files in a folder."""
    path = local_path(config.source)
    if path is None:
        return []
    if path.is_dir():
        layout, folder = _best(path, config, catalogue)
        return [folder / file.name for file in layout.wanted(config) if (folder / file.name).is_file()]
    refuse_special(config.source, path)
    return [path]


def collect(config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> OfficialFiles:
    """Return the verified files from ``config.source``. Raises DataError."""
    path = local_path(config.source)
    if config.source is None:
        folder, origin = _download(config, catalogue, work), "official addresses"
    elif path is None:
        folder, origin = _remote(config, catalogue, work, config.source), shown(config.source)
    else:
        folder, origin = path if path.is_dir() else _unpack(path, catalogue, work), str(path)
    layout, folder = _best(folder, config, catalogue)
    files = {file.name: folder / file.name for file in layout.wanted(config)}
    _check_complete(config, catalogue, layout, folder, origin)
    for file in layout.wanted(config):
        _verify(file, files[file.name])
        work.report(f"verifying {config.name}", file.size_bytes, None)
    return OfficialFiles(layout=layout, files=files, origin=origin)


def _best(folder: Path, config: DatasetConfig, catalogue: Catalogue) -> tuple[PublishedLayout, Path]:
    """Return the layout of which ``folder`` has the most files, and the folder of these files."""
    places = [(layout, folder / sub) for layout in catalogue.layouts for sub in ("", *layout.folders)]
    return min(places, key=lambda place: len(_missing(place[0], place[1], config)))


def _missing(layout: PublishedLayout, folder: Path, config: DatasetConfig) -> list[OfficialFile]:
    return [file for file in layout.wanted(config) if not (folder / file.name).is_file()]


def _check_complete(
    config: DatasetConfig, catalogue: Catalogue, layout: PublishedLayout, folder: Path, origin: str
) -> None:
    missing = _missing(layout, folder, config)
    if not missing:
        return
    names = ", ".join(file.name for file in missing)
    if len(missing) == len(layout.wanted(config)):
        forms = "; or ".join(", ".join(f.name for f in form.wanted(config)) for form in catalogue.layouts)
        raise DataError(
            f"dataset={config.name}: none of its files is in {origin}; wanted: {forms}",
            hint="dataset.source=<the folder or archive that holds them>, or leave it out to download",
        )
    only_test = all(file in layout.test for file in missing)
    raise DataError(
        f"dataset={config.name}: {names} is missing in {origin} ({layout.title})",
        hint=f"dataset.holdout={catalogue.holdout}, which takes the test split from the training images"
        if only_test
        else f"add {names}, or leave dataset.source out to download the whole set",
    )


def _verify(file: OfficialFile, path: Path) -> None:
    """Check the size first, which costs nothing and distinguishes a truncated file from an altered one."""
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
    """Unpack the known files; return the folder of the first, wherever the archive has it."""
    wanted = tuple(file.name for form in catalogue.layouts for file in (*form.train, *form.test))
    folder = work.folder / "unpacked"
    folder.mkdir()
    work.report(f"unpacking {archive.name}", 0, None)
    folders.extract(archive, wanted, folder)
    return next((path.parent for path in sorted(folder.rglob("*")) if path.name in wanted), folder)


def _download(config: DatasetConfig, catalogue: Catalogue, work: Workspace) -> Path:
    test_only = {f.name for form in catalogue.layouts for f in form.test} if config.holdout else set()
    for wanted in catalogue.downloads:
        if wanted.name in test_only:
            continue
        path = download(config, wanted, work.downloads, work.report)
        if wanted.name.endswith(folders.ARCHIVES):
            return _unpack(path, catalogue, work)
    return work.downloads


def _remote(config: DatasetConfig, catalogue: Catalogue, work: Workspace, url: str) -> Path:
    name = file_name(url)
    if name.endswith(folders.ARCHIVES):
        known = {official.name: official.sha256 for official in catalogue.downloads}
        wanted = DownloadRequest(name=name, urls=(url,), sha256=known.get(name))
        folder = work.folder if wanted.sha256 is None else work.downloads
        return _unpack(download(config, wanted, folder, work.report), catalogue, work)
    return _remote_folder(config, catalogue, work, url)


def _remote_folder(config: DatasetConfig, catalogue: Catalogue, work: Workspace, url: str) -> Path:
    """Use the first layout whose first file exists; later absent files are reported as missing."""
    first: list[TransferError] = []
    for layout in catalogue.layouts:
        for file in layout.wanted(config):
            address = f"{url.rstrip('/')}/{file.name}"
            wanted = DownloadRequest(name=file.name, urls=(address,), sha256=file.sha256)
            got = retrieve(wanted, work.downloads, work.report)
            if isinstance(got, Path):
                continue
            if not got[0].absent:
                raise unreachable(config, file.name, got)
            if file is layout.train[0]:
                first += got
                break
        else:
            return work.downloads
    raise unreachable(config, "its first file", first)
