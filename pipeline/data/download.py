"""Get one file from the first address that gives it, with retries. pooch checks it and puts it in place."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.progress import OnProgress
from pipeline.data.source import WEB, scheme
from pipeline.data.transports import HTTP, TIMEOUT_S, Filesystem, Part

if TYPE_CHECKING:
    from requests import HTTPError

PAUSES_S = (0.5, 1.5)  # between rounds over all addresses that gave nothing
_PATIENCE_S = 8.0  # no new round after this long without a byte
_MAX_ROUNDS = 50  # of rounds that did bring bytes
_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Failure:
    """Why an address did not give the file. ``final``: asking again would not help."""

    url: str
    text: str
    final: bool = False
    absent: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One file to get: its name here, its addresses in order of preference, its sha256 where one is known."""

    name: str
    urls: Sequence[str]
    sha256: str | None


def retrieve(wanted: Wanted, folder: Path, report: OnProgress) -> Path | list[Failure]:
    """The verified file in ``folder``, or why each address failed. A file that is there with the right
    sha256 is taken as it is; one without a known sha256 is always fetched anew.

    Raises:
        DataError: the disk is full, or a protocol's driver is missing.
    """
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
                outcome = _attempt(url, wanted, part, report)
                if isinstance(outcome, Path):
                    return outcome
                failures[url] = outcome
        if 0 < part.reached_bytes == reached[-1]:
            break  # where the round before ended too: it isn't the connection
        if part.reached_bytes > before:
            pauses, progress_s = list(PAUSES_S), time.monotonic()
        reached.append(part.reached_bytes)
        given_up = all(failure.final for failure in failures.values())
        if given_up or not pauses or time.monotonic() - progress_s > _PATIENCE_S:
            break
        time.sleep(pauses.pop(0))
    return list(failures.values())


def _attempt(url: str, wanted: Wanted, part: Part, report: OnProgress) -> Path | Failure:
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    web = scheme(url) in WEB
    download = HTTP(part, report) if web else Filesystem(report)
    path = part.path.with_name(wanted.name)
    if wanted.sha256 is None:
        path.unlink(missing_ok=True)  # pooch would keep it unseen
    try:
        pooch.retrieve(url, wanted.sha256, fname=path.name, path=path.parent, downloader=download)
    except requests.HTTPError as error:
        return _refused(url, error)
    except (requests.RequestException, OSError) as error:
        absent = isinstance(error, FileNotFoundError)
        return Failure(url, _why(error), final=absent or isinstance(error, PermissionError), absent=absent)
    except ValueError as error:  # pooch: the checksum is wrong
        return Failure(url, str(error).partition(". Deleted")[0], final=not download.resumed)
    return path


def _refused(url: str, error: HTTPError) -> Failure:
    assert error.response is not None  # raise_for_status attaches it
    status = error.response.status_code
    text = f"HTTP {status} {error.response.reason}"
    return Failure(url, text, final=status not in _RETRIED_STATUS, absent=status in (404, 410))


def _why(error: Exception) -> str:
    """The operating system's words where they are inside (requests nests them four deep)."""
    found = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    if found:
        return found[1]
    if "timed out" in str(error):
        return f"no answer within {TIMEOUT_S[0]:g} s (connect) or {TIMEOUT_S[1]:g} s (read)"
    return f"{type(error).__name__}: {error}"
