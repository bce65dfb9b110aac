"""Weight files: downloaded once per address, and stored by content, so that many runs share one copy."""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from pathlib import Path

from pipeline.core.cache import Cache
from pipeline.core.errors import DataError, PacelineError, UsageError, suggestion
from pipeline.core.files import changing, fingerprints, sha256_file, sha256_text, temporary_prefix
from pipeline.core.locks import held
from pipeline.core.processes.process import python_answer
from pipeline.data.progress import reporting
from pipeline.data.sources.download import DownloadRequest, retrieve
from pipeline.data.sources.source import file_name, shown
from pipeline.keys.installed import version

_FOLDER = "weights"
_HASH = re.compile(r"-([0-9a-f]{8})\.pth$")  # torchvision's file names contain the start of the sha256
_TENSOR = re.compile(r"/data/\d+$")  # the member of a torch.save archive that holds one tensor
_IMPORT_S = 300.0  # of torchvision, from a slow disk
_INSTEAD = "init.weights=<the address, or a file>"
_ADDRESSES = """
from torchvision.models import get_model_weights
def answer(arch):
    try:
        return {name: member.url for name, member in get_model_weights(arch).__members__.items()}
    except ValueError:  # no such network
        return {}
"""


def sha256_of(path: Path, data_dir: Path) -> str:
    """Return the sha256 of a file; hashes it only if its stamp changed. Raises DataError, OSError."""
    return fingerprints([path], data_dir)[path].sha256


def sha256_of_torch_file(path: Path, data_dir: Path) -> str:
    """Return the sha256 of a torch.save file: an intact zip archive, or a pickle from before torch 1.6.

    Raises:
        DataError: the file has another format, or holds no tensor.
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        begins = file.read(16)
    if not zipfile.is_zipfile(path) and not re.match(rb"\x80[\x02-\x05]", begins):
        size = path.stat().st_size
        what = "is cut off" if begins.startswith(b"PK") else "is no file of torch.save" if size else "is empty"
        start = f" and begins with {begins!r}" if size else ""
        raise DataError(f"{path} {what}: it has {size} bytes{start}; copy or fetch it again (take this one away first)")
    if begins.startswith(b"PK") and not any(_TENSOR.search(name) for name in _archived(path)):
        raise DataError(f"{path} holds no tensor; init.weights takes what torch.save has written of a state_dict()")
    return sha256_of(path, data_dir)


def _archived(path: Path) -> list[str]:
    """Return the names in an archive. Raises DataError: the archive is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is damaged: {error}; copy or fetch it again (take this one away first)") from error


# --------------------------------------------------------------------------------------- kept copies
def kept(sha256: str, data_dir: Path) -> Path | None:
    """Return the stored copy of that content, if it exists and is intact."""
    path = data_dir.absolute() / _FOLDER / f"{sha256}.pt"
    return path if path.is_file() and sha256_of(path, data_dir) == sha256 else None


def keep(source: Path, sha256: str, data_dir: Path) -> Path:
    """Store a copy of a file with that content, atomically.

    Raises:
        DataError: the file's content has changed.
        OSError: the file can't be read, or the copy can't be written.
    """
    if (copied := kept(sha256, data_dir)) is not None:
        return copied
    path = data_dir.absolute() / _FOLDER / f"{sha256}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=temporary_prefix(f".{sha256[:12]}"), dir=path.parent, delete=False) as file:
        copy = Path(file.name)
    try:
        shutil.copyfile(source, copy)
        copy.chmod(0o644)
        if sha256_file(copy) != sha256:
            raise changing(source)
        copy.replace(path)
    finally:
        copy.unlink(missing_ok=True)
    return path


# ----------------------------------------------------------------------------------------- addresses
def fetched(url: str, data_dir: Path) -> Path | None:
    """Return the file downloaded from an address before, or None."""
    path = _place(url, data_dir)
    return path if path.is_file() else None


def fetch(url: str, data_dir: Path, *, setting: str, hash_in_name: bool = False) -> Path:
    """Download a file unless that was done before; blocks while another process does it.

    Args:
        setting: the setting that names the address, for messages.
        hash_in_name: refuse content whose sha256 doesn't match the file name (``resnet18-f37072fd.pth``).

    Raises:
        DataError: the download failed, or the content doesn't match the digest in the name.
    """
    path = _place(url, data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.lock"
    with reporting(None) as report, held(lock, meanwhile=lambda: report(f"waiting for {lock}", 0, None)):
        if path.is_file():
            return path
        came = retrieve(DownloadRequest(name=f"{path.name}.new", urls=[url], sha256=None), path.parent, report)
        if not isinstance(came, Path):
            raise DataError(
                f"{setting}: {shown(url)} can't be had: {came[-1].text}",
                hint="get the file by other means, then init.weights=<its path>",
            )
        wanted = _HASH.search(path.name) if hash_in_name else None
        if wanted and not sha256_file(came).startswith(wanted[1]):
            came.unlink()
            raise DataError(
                f"{setting}: what came from {shown(url)} has another sha256 than its name says: {wanted[1]}…"
            )
        came.replace(path)
    return path


def _place(url: str, data_dir: Path) -> Path:
    name = file_name(url) or "weights.pt"
    return data_dir.absolute() / "downloads" / _FOLDER / sha256_text(url)[:12] / name


# ----------------------------------------------------------------------------- torchvision's own
def published(arch: str, name: str, root: Path) -> str:
    """Return the address of weights that torchvision publishes, cached per torchvision version.

    A subprocess imports torchvision to look it up.

    Args:
        arch: as ``model.arch``.
        name: a member of the model's weights enumeration, such as IMAGENET1K_V1, or default.
        root: the project.

    Raises:
        UsageError: torchvision isn't installed here, can't be imported, or knows no such weights.
    """
    release = version("torchvision")
    if release is None:
        raise UsageError(
            f"init.weights={name}: torchvision, which knows the address, is not installed here", hint=_INSTEAD
        )
    known, entry = Cache(root, "published", most=64), f"{release} {arch}"
    addresses: dict[str, str] | None = known.get(entry)
    if addresses is None:
        try:
            addresses = python_answer(_ADDRESSES, arch, timeout_s=_IMPORT_S)
        except PacelineError as error:
            what = f"init.weights={name}: torchvision, which knows the address, can't be imported here: {error.what}"
            raise UsageError(what, hint=_INSTEAD) from error
        known.keep({entry: addresses})
    if not addresses:
        raise UsageError(f"init.weights={name}: torchvision publishes none for model.arch={arch}")
    if name.upper() not in addresses:
        near = suggestion(name.upper(), addresses)
        raise UsageError(f"init.weights={name}: model.arch={arch} has no such; {near}")
    return addresses[name.upper()]
