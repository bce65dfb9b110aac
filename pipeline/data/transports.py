"""How the bytes come: HTTP with resume, every other protocol through fsspec; both are pooch downloaders."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import DataError
from pipeline.core.files import write_json
from pipeline.data import disk
from pipeline.data.filesystems import login_hint, open_filesystem, said
from pipeline.data.progress import OnProgress
from pipeline.data.source import shown

if TYPE_CHECKING:
    from requests import Response

TIMEOUT_S = (3.0, 10.0)  # connect; between two reads
_ENCODED = (".gz", ".tgz")  # servers call these files gzip encoded; they are meant as they are
_CHUNK_BYTES = 1 << 16


class Part:
    """A broken download and what makes it safe to go on with: its address and the server's validator."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached_bytes = 0  # where the longest attempt of this round has ended
        self._note = path.with_name(f"{path.name}.json")

    def resumable(self, url: str) -> tuple[int, str]:
        """(bytes that are there, validator for If-Range); (0, "") where the download must begin anew."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if note["url"] == shown(url) and note["validator"]:
                return self.path.stat().st_size, str(note["validator"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0, ""
        return 0, ""

    def begin(self, url: str, headers: Any) -> None:
        """Note the validator: a strong ETag, else the date. Weak ETags don't promise equal bytes."""
        etag = headers.get("ETag", "")
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        write_json(self._note, {"url": shown(url), "validator": validator})

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def move_to(self, path: Path) -> None:
        self.path.replace(path)
        self._note.unlink(missing_ok=True)


class HTTP:
    """A pooch downloader that goes on where a broken download stopped."""

    def __init__(self, part: Part, report: OnProgress) -> None:
        self.part, self.report = part, report
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        import requests

        offset, validator = self.part.resumable(url)
        headers = {"Accept-Encoding": "identity"}  # lengths and offsets are those of the file
        if offset:
            headers |= {"Range": f"bytes={offset}-", "If-Range": validator}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code == 416:  # the part is as long as the file, or longer
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

    def _save(self, response: Response, offset: int) -> None:
        import requests
        from urllib3.exceptions import HTTPError

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
        except HTTPError as error:  # of urllib3, which is read directly: what travels counts, not what it encodes
            raise requests.ConnectionError(str(error)) from error
        except DataError:
            self.part.discard()
            raise
        if total is not None and done != total:
            raise requests.ConnectionError(f"the connection ended after {done} of {total} bytes")


def _resumes(response: Response, offset: int) -> bool:
    """Whether the answer begins exactly where the part ends; a 200 is the whole file again."""
    begins = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
    return offset > 0 and response.status_code == 206 and begins


def _decode(part: Part, encoding: str) -> None:
    """A server that encodes though it was asked not to. Raises DataError where the disk is full, ValueError where
    asking again gives the same."""
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
    """A pooch downloader for every other protocol that fsspec knows."""

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
                raise DataError(f"dataset.source={shown(url)} can't be read: {said(error)}", hint=hint) from error
            raise
        except Exception as error:  # drivers have error classes of their own
            raise PermissionError(said(error)) from error


def _copy(source: Any, path: Path, report: Any) -> None:
    done = 0
    with path.open("wb") as file:
        while block := source.read(_CHUNK_BYTES):
            file.write(block)
            done += len(block)
            report(done)
