"""One attempt to download a file from one address, by HTTP or any fsspec protocol; pooch verifies and places it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pooch
import requests
import urllib3

from pipeline.core.errors import DataError
from pipeline.data.progress import OnProgress, room
from pipeline.data.sources.source import WEB, login_hint, open_filesystem, reason_of, scheme, without_login

TIMEOUT_S = (3.0, 10.0)  # connect; between two reads
_ENCODED = (".gz", ".tgz")  # some servers declare these files as gzip encoded; they must not be decoded
_CHUNK_BYTES = 1 << 16
_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


class TransferError(Exception):
    """An address did not deliver the file. ``final``: a retry would not help; ``absent``: it has no such file."""

    def __init__(self, url: str, text: str, *, final: bool = False, absent: bool = False) -> None:
        self.url, self.text, self.final, self.absent = url, text, final, absent
        super().__init__(text)


def attempt(url: str, sha256: str | None, path: Path, report: OnProgress) -> None:
    """Download to ``path``, unless a file with this ``sha256`` is there already. Raises TransferError, DataError."""
    pooch.get_logger().setLevel("WARNING")
    if sha256 is None:
        path.unlink(missing_ok=True)  # without a checksum pooch would keep an existing file

    def save(address: str, output_file: str, _: object, check_only: bool = False) -> None:
        opened = _http if scheme(address) in WEB else _filesystem
        with opened(address) as (read, total), room(path.parent, total or 0), Path(output_file).open("wb") as file:
            done = 0
            while block := read(_CHUNK_BYTES):
                file.write(block)
                done += len(block)
                report(f"downloading {path.name}", done, total)

    try:
        pooch.retrieve(url, sha256, fname=path.name, path=path.parent, downloader=save)
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        absent = isinstance(error, FileNotFoundError)
        final = absent or isinstance(error, PermissionError)
        raise TransferError(url, _reason(error), final=final, absent=absent) from error
    except ValueError as error:  # pooch's message about a wrong checksum: "… Deleted the downloaded file"
        raise TransferError(url, str(error).partition(". Deleted")[0], final=True) from error


def _reason(error: Exception) -> str:
    """Return the operating system's message from inside the exception (requests nests it four deep)."""
    match = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    if match:
        return match[1]
    if "timed out" in str(error):
        return f"no answer within {TIMEOUT_S[0]:g} s (connect) or {TIMEOUT_S[1]:g} s (read)"
    return f"{type(error).__name__}: {error}"


_Opened = Iterator[tuple[Callable[[int], bytes], int | None]]
"""A function that reads so many bytes, and the size of the file, if it is known."""


@contextmanager
def _http(url: str) -> _Opened:
    decodes = not url.partition("?")[0].endswith(_ENCODED)
    headers = {"Accept-Encoding": "identity"}  # so that the length is that of the file itself
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if not response.ok:
            status, final = response.status_code, response.status_code not in _RETRIED_STATUS
            raise TransferError(url, f"HTTP {status} {response.reason}", final=final, absent=status in (404, 410))
        length = response.headers.get("Content-Length", "")
        is_encoded = decodes and response.headers.get("Content-Encoding", "identity") != "identity"
        total = int(length) if length.isdecimal() and not is_encoded else None
        yield lambda count: response.raw.read(count, decode_content=decodes), total


@contextmanager
def _filesystem(url: str) -> _Opened:
    filesystem, path = open_filesystem(url)
    try:
        total = filesystem.size(path)
        with filesystem.open(path, "rb") as source:
            yield source.read, total
    except (OSError, DataError) as error:
        if (hint := login_hint(url, error)) is not None:
            what = f"dataset.source={without_login(url)} can't be read: {reason_of(error)}"
            raise DataError(what, hint=hint) from error
        raise
    except Exception as error:  # a driver's own class of errors; `attempt` doesn't try again after a PermissionError
        raise PermissionError(reason_of(error)) from error
