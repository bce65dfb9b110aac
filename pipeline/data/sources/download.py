"""Downloads of one file that may have several addresses: tries each in turn, with retries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import DataError
from pipeline.data.progress import OnProgress
from pipeline.data.sources.source import without_login
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.sources.transfer import TransferError

PAUSES_S = (0.5, 1.5, 5.0)  # between rounds over all addresses


@dataclass(frozen=True, kw_only=True)
class DownloadRequest:
    """A file to download: its local name, its addresses in order of preference, its sha256 if known."""

    name: str
    urls: Sequence[str]
    sha256: str | None


def retrieve(request: DownloadRequest, folder: Path, report: OnProgress) -> Path | list[TransferError]:
    """Return the verified file in ``folder``, or the failure of each address.

    An existing file with the right sha256 is used as it is. Without a known sha256 the file is always downloaded.
    Raises DataError: the disk is full, or a protocol's driver is missing.
    """
    from pipeline.data.sources.transfer import TransferError, attempt  # loads pooch: most runs download nothing

    folder.mkdir(parents=True, exist_ok=True)
    failures: dict[str, TransferError] = {}
    for pause_s in (0.0, *PAUSES_S):
        # addresses that another attempt could still reach
        remaining = [url for url in request.urls if url not in failures or not failures[url].final]
        time.sleep(pause_s if remaining else 0.0)
        for url in remaining:
            try:
                attempt(url, request.sha256, folder / request.name, report)
                return folder / request.name
            except TransferError as error:
                failures[url] = error
    return list(failures.values())


def download(config: DatasetConfig, request: DownloadRequest, folder: Path, report: OnProgress) -> Path:
    """Return the file of ``retrieve``. Raises DataError if every address failed."""
    path = retrieve(request, folder, report)
    if not isinstance(path, Path):
        raise unreachable(config, request.name, path)
    return path


def unreachable(config: DatasetConfig, name: str, failures: Sequence[TransferError]) -> DataError:
    """Return an error that lists the failure of every address, with a hint of three ways out."""
    lines = "".join(f"\n  {without_login(failure.url)}: {failure.text}" for failure in failures)
    return DataError(
        f"dataset={config.name}: {name} could not be downloaded; every address failed:{lines}",
        hint=f"the same command later; or dataset.source=<folder, archive or mirror that has {name}>; "
        "or dataset=digits, which needs no download",
    )
