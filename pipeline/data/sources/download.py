"""Download one file from the first address that works, with retries. pooch verifies it and moves it into place."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.data.progress import OnProgress
from pipeline.data.sources.source import shown
from pipeline.data.sources.wanted import Failure, Part, Wanted
from trainers.core.config import DatasetConfig

PAUSES_S = (0.5, 1.5)  # between rounds over all addresses without new bytes
_PATIENCE_S = 8.0  # no new round after this long without a byte
_MAX_ROUNDS = 50  # including rounds with new bytes


def retrieve(wanted: Wanted, folder: Path, report: OnProgress) -> Path | list[Failure]:
    """Return the verified file in ``folder``, or the failure of each address.

    An existing file with the right sha256 is used as it is; without a known sha256 the file is always downloaded.

    Raises:
        DataError: the disk is full, or a protocol's driver is missing.
    """
    from pipeline.data.sources.transfer import attempt  # loads pooch and requests: most runs download nothing

    folder.mkdir(parents=True, exist_ok=True)
    part = Part(folder / f"{wanted.name}.part")
    failures: dict[str, Failure] = {}
    pauses = list(PAUSES_S)
    progress_s = time.monotonic()
    reached = [0]  # bytes of the file, round by round
    for _ in range(_MAX_ROUNDS):
        before, part.reached_bytes = max(reached), 0
        for url in wanted.urls:
            if url not in failures or not failures[url].final:
                outcome = attempt(url, wanted, part, report)
                if isinstance(outcome, Path):
                    return outcome
                failures[url] = outcome
        if 0 < part.reached_bytes == reached[-1]:
            break  # the previous round ended at the same byte, so the connection isn't the cause
        if part.reached_bytes > before:
            pauses, progress_s = list(PAUSES_S), time.monotonic()
        reached.append(part.reached_bytes)
        given_up = all(failure.final for failure in failures.values())
        if given_up or not pauses or time.monotonic() - progress_s > _PATIENCE_S:
            break
        time.sleep(pauses.pop(0))
    return list(failures.values())


def download(config: DatasetConfig, wanted: Wanted, folder: Path, report: OnProgress) -> Path:
    """Return the file of ``retrieve``. Raises DataError if every address failed."""
    path = retrieve(wanted, folder, report)
    if not isinstance(path, Path):
        raise unreachable(config, wanted.name, path)
    return path


def unreachable(config: DatasetConfig, name: str, failures: list[Failure]) -> DataError:
    """Return an error with every address's failure and three alternatives."""
    lines = "".join(f"\n  {shown(failure.url)}: {failure.text}" for failure in failures)
    return DataError(
        f"dataset={config.name}: {name} could not be downloaded; every address failed:{lines}",
        hint=f"the same command later; or dataset.source=<folder, archive or mirror that has {name}>; "
        "or dataset=digits, which needs no download",
    )
