"""One attempt to download a file from one address: by HTTP with resume, or by any fsspec protocol.

Both are implemented as pooch downloaders.
"""

from __future__ import annotations

import gzip
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pooch
import requests
import urllib3

from pipeline.core.errors import DataError
from pipeline.data import disk
from pipeline.data.progress import OnProgress
from pipeline.data.sources.filesystems import login_hint, open_filesystem, reason_of
from pipeline.data.sources.source import WEB, scheme, shown
from pipeline.data.sources.wanted import Failure, Part, Wanted

TIMEOUT_S = (3.0, 10.0)  # connect; between two reads
_ENCODED = (".gz", ".tgz")  # some servers declare these files as gzip encoded; they must not be decoded
_CHUNK_BYTES = 1 << 16
_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


def attempt(url: str, wanted: Wanted, part: Part, report: OnProgress) -> Path | Failure:
    """Return the verified file in the folder of ``part``, or the failure of this address. Raises DataError."""
    pooch.get_logger().setLevel("WARNING")
    web = scheme(url) in WEB
    download = HTTP(part, report) if web else Filesystem(report)
    path = part.path.with_name(wanted.name)
    if wanted.sha256 is None:
        path.unlink(missing_ok=True)  # without a checksum pooch would keep an existing file
    try:
        pooch.retrieve(url, wanted.sha256, fname=path.name, path=path.parent, downloader=download)
    except requests.HTTPError as error:
        return _refused(url, error)
    except (requests.RequestException, OSError) as error:
        absent = isinstance(error, FileNotFoundError)
        return Failure(url, _why(error), final=absent or isinstance(error, PermissionError), absent=absent)
    except ValueError as error:  # raised by pooch for a wrong checksum
        return Failure(url, str(error).partition(". Deleted")[0], final=not download.resumed)
    return path


def _refused(url: str, error: requests.HTTPError) -> Failure:
    assert error.response is not None  # raise_for_status attaches it
    status = error.response.status_code
    text = f"HTTP {status} {error.response.reason}"
    return Failure(url, text, final=status not in _RETRIED_STATUS, absent=status in (404, 410))


def _why(error: Exception) -> str:
    """Return the operating system's message from inside the exception (requests nests it four deep)."""
    match = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", str(error))
    if match:
        return match[1]
    if "timed out" in str(error):
        return f"no answer within {TIMEOUT_S[0]:g} s (connect) or {TIMEOUT_S[1]:g} s (read)"
    return f"{type(error).__name__}: {error}"


class HTTP:
    """A pooch downloader that resumes a broken download."""

    def __init__(self, part: Part, report: OnProgress) -> None:
        self.part, self.report = part, report
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        offset, validator = self.part.resumable(url)
        headers = {"Accept-Encoding": "identity"}  # so that lengths and offsets refer to the file itself
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": validator}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code == 416:  # the partial file is as long as the file, or longer
                self.part.discard()
                raise requests.ConnectionError("the server refused to resume")
            response.raise_for_status()
            self.resumed = _resumes(response, offset)
            if not self.resumed:
                offset = 0
                self.part.begin(url, response.headers)
            self._save(response, offset)
            encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ("", "identity") and not url.partition("?")[0].endswith(_ENCODED):
            _decode(self.part, encoding)
        self.part.move_to(Path(output_file))

    def _save(self, response: requests.Response, offset: int) -> None:
        stated = response.headers.get("Content-Length", "")
        left = int(stated) if stated.isdecimal() else 0
        total = offset + left if left else None
        done = offset
        try:
            mode = "ab" if offset else "wb"
            with disk.room(self.part.path.parent, left), self.part.path.open(mode) as file:
                for chunk in response.raw.stream(_CHUNK_BYTES, decode_content=False):
                    file.write(chunk)
                    done += len(chunk)
                    self.part.reached_bytes = max(self.part.reached_bytes, done)
                    self.report(f"downloading {self.part.path.stem}", done, total)
        except urllib3.exceptions.HTTPError as error:  # response.raw is read directly, so errors come from urllib3
            raise requests.ConnectionError(str(error)) from error
        except DataError:
            self.part.discard()
            raise
        if total is not None and done != total:
            raise requests.ConnectionError(f"the connection ended after {done} of {total} bytes")


def _resumes(response: requests.Response, offset: int) -> bool:
    """Return True if the response begins exactly where the partial file ends; a 200 is the whole file again."""
    begins = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
    return offset > 0 and response.status_code == 206 and begins


def _decode(part: Part, encoding: str) -> None:
    """Decode a response that the server encoded against the request.

    Raises DataError if the disk is full, ValueError if a retry would give the same.
    """
    if encoding not in ("gzip", "x-gzip"):
        part.discard()
        raise ValueError(f"the server sends it encoded ({encoding}), though it was asked not to")
    decoded = part.path.with_name(f"{part.path.name}.decoded")
    try:
        with gzip.open(part.path) as source, disk.room(part.path.parent, 0), decoded.open("wb") as file:
            shutil.copyfileobj(source, file)
        decoded.replace(part.path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        part.discard()
        raise ValueError(f"the server calls it {encoding} encoded, which it isn't ({error})") from error
    finally:
        decoded.unlink(missing_ok=True)


class Filesystem:
    """A pooch downloader for all other protocols of fsspec."""

    resumed = False

    def __init__(self, report: OnProgress) -> None:
        self.report = report

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        filesystem, path = open_filesystem(url)
        name = path.rpartition("/")[2]
        try:
            total = filesystem.size(path)
            with filesystem.open(path, "rb") as source, disk.room(Path(output_file).parent, total or 0):
                _copy(source, Path(output_file), lambda done: self.report(f"downloading {name}", done, total))
        except (OSError, DataError) as error:
            if (hint := login_hint(url, error)) is not None:
                raise DataError(f"dataset.source={shown(url)} can't be read: {reason_of(error)}", hint=hint) from error
            raise
        except Exception as error:  # drivers have error classes of their own
            raise PermissionError(reason_of(error)) from error


def _copy(source: Any, path: Path, report: Any) -> None:
    done = 0
    with path.open("wb") as file:
        while block := source.read(_CHUNK_BYTES):
            file.write(block)
            done += len(block)
            report(done)
