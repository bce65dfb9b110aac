"""The initial weights of a run, if ``init.weights`` (a file, an address, a published name, a run's key) or ``init.run``
(another configuration, whose run is trained first) names some. Only their digest counts in the key.

A copy of each is stored by its digest in the data folder, so that runs are resumed even if the original is gone."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.config.build import RunConfig
from pipeline.core.cache import Cache
from pipeline.core.errors import DataError, PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import (
    changing,
    expanded,
    fingerprints,
    link_or_copy,
    sha256_file,
    sha256_text,
    temporary_prefix,
    write_json,
)
from pipeline.core.locks import held
from pipeline.core.processes.process import python_answer
from pipeline.data.progress import reporting
from pipeline.data.sources.download import DownloadRequest, retrieve
from pipeline.data.sources.source import file_name, local_path, scheme, without_login
from pipeline.keys.installed import version
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import why_altered
from trainers.contract import run_folder

_RUN_KEY = re.compile(r"[0-9a-f]{4,12}")
_PUBLISHED_NAME = re.compile(r"[A-Z][A-Z0-9_]*|default")
_SUFFIXES = (".pt", ".pth", ".th", ".bin", ".ckpt")


class InitialWeights(NamedTuple):
    """The initial weights of a configuration.

    ``setting`` is the override that names them, for messages; ``run`` the key of the run that trained them. ``sha256``
    is None while the weights are unknown, ``path`` is None while they aren't on this computer; ``pending`` then says
    what must be done first. ``url`` is the address to fetch them from."""

    setting: str
    run: str | None = None
    sha256: str | None = None
    path: Path | None = None
    pending: str = ""
    url: str | None = None
    named_file: Path | None = None  # the user's file that init.weights names

    def with_digest(self, config: RunConfig) -> RunConfig:
        """Return the configuration with init.sha256 set, which is what the key counts."""
        init = {**(config.resolved.get("init") or {}), "sha256": self.sha256}
        return dataclasses.replace(config, resolved={**config.resolved, "init": init})

    def put_into(self, folder: Path, data_dir: Path) -> None:
        """Put the weights and a description of their origin into a run folder. Raises PacelineError, OSError."""
        assert self.sha256 is not None, "a run has a key only once its weights are known"
        target = folder / run_folder.INITIAL_WEIGHTS
        if not (target.is_file() and sha256_of(target, data_dir) == self.sha256):
            if self.path is None:
                raise PacelineError(f"{self.setting}: the weights aren't on this computer: {self.pending}")
            link_or_copy(store(self.path, self.sha256, data_dir), target)
        notes = {"said": self.setting, "run": self.run, "sha256": self.sha256}
        write_json(folder / run_folder.INITIAL_WEIGHTS_NOTES, notes)

    def fetch(self, config: RunConfig) -> None:
        """Download the weights from their address, if they have one. Raises DataError."""
        if self.url is not None:
            is_torchvisions = "://" not in str(config.train.init.weights)
            fetch(self.url, config.data_dir, setting=self.setting, hash_in_name=is_torchvisions)


ParentRun = tuple[RunFolder | None, str]
"""(folder, why it isn't finished) of the run that ``init.run`` names. None: its key isn't known yet; '': finished."""


def find(config: RunConfig, root: Path, parent_of: Callable[[RunConfig], ParentRun]) -> InitialWeights:
    """Return the initial weights of a configuration that names some. Starts nothing.

    ``parent_of`` looks up the run that ``init.run`` names. Raises UsageError: no such run, file or published weights; a
    file that can't hold weights; another digest than init.sha256."""
    init = config.train.init
    named_file = local_file(config, root)
    # a repetition of a run states the digest: the original may be gone, or have changed
    if init.sha256 is not None and (path := stored_copy(init.sha256, config.data_dir)) is not None:
        return InitialWeights(setting=init.setting, sha256=init.sha256, path=path, named_file=named_file)
    try:
        if config.parent is None:
            initial = _of_setting(config, root)
        else:
            initial = _of_parent(*parent_of(config.parent), init.setting)
    except (DataError, OSError) as error:
        why = os_reason(error) if isinstance(error, OSError) else error.what
        raise UsageError(f"{init.setting}: {why}") from error
    if init.sha256 is not None and initial.sha256 not in (None, init.sha256):
        raise UsageError(f"{init.setting} has the sha256 {initial.sha256}, and init.sha256 says {init.sha256}")
    return initial._replace(sha256=init.sha256 or initial.sha256, named_file=named_file)


def local_file(config: RunConfig, root: Path) -> Path | None:
    """Return the local file that ``init.weights`` names; None if it names something else."""
    text = config.train.init.weights
    if config.script is not None or text is None:
        return None
    path = local_path(text) if scheme(text) else root / expanded(text, config.train.init.setting)
    return path if path is not None and path.is_file() else None


def _of_parent(folder: RunFolder | None, pending: str, setting: str) -> InitialWeights:
    if folder is None or pending:
        return InitialWeights(setting=setting, run=folder.key if folder is not None else None, pending=pending)
    return of_finished_run(folder, setting)


def of_finished_run(folder: RunFolder, setting: str) -> InitialWeights:
    """Return a finished run's final weights. Raises UsageError: not finished, a script's run, or damaged weights."""
    result = folder.read_result()
    if result is None:
        raise UsageError(f"{setting}: run {folder.key} isn't finished", hint=f"doit status {folder.key}")
    final = result.files.get(run_folder.FINAL_WEIGHTS)
    if final is None:
        raise UsageError(
            f"{setting}: run {folder.key} has no final weights ({run_folder.FINAL_WEIGHTS}), because it ran a script"
        )
    if (why := why_altered(folder.path / run_folder.FINAL_WEIGHTS, final)) is not None:
        raise UsageError(
            f"{setting}: {folder.path / run_folder.FINAL_WEIGHTS} {why}", hint="doit train with the words of that run"
        )
    return InitialWeights(
        setting=setting, run=folder.key, sha256=final.sha256, path=folder.path / run_folder.FINAL_WEIGHTS
    )


# -------------------------------------------------------------------------------------- init.weights
def _of_setting(config: RunConfig, root: Path) -> InitialWeights:
    """Return the weights that ``init.weights`` names. Raises UsageError, DataError, OSError."""
    init = config.train.init
    text = str(init.weights)
    if scheme(text) and local_path(text) is None:  # an address, but not file://…
        return _of_address(init.setting, text, config.data_dir)
    path = local_path(text) if scheme(text) else root / expanded(text, init.setting)
    if path is not None and path.is_file():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"{init.setting}: a file of weights ends in {', '.join(_SUFFIXES)}", hint=_SAFETENSORS_HINT
            )
        return InitialWeights(setting=init.setting, sha256=sha256_of_torch_file(path, config.data_dir), path=path)
    # a file of that name would have come first
    if _PUBLISHED_NAME.fullmatch(text):
        arch = getattr(config.train.model, "arch", None)
        if config.train.model.name != "torchvision" or arch is None:
            raise UsageError(
                f"{init.setting} is a name of torchvision's weights", hint="model=torchvision model.arch=…"
            )
        return _of_address(init.setting, published_address(arch, text, root), config.data_dir)
    if _RUN_KEY.fullmatch(text):
        try:
            folder = index.find(config.runs_dir, text)
        except UsageError as error:
            # the setting names the key already
            why = error.what.removeprefix(text) if error.what.startswith(text) else f": {error.what}"
            raise UsageError(f"{init.setting}{why}", hint=error.hint) from error
        return of_finished_run(folder, init.setting)
    raise UsageError(
        f"{init.setting}: there is no file {path}{_similar_file(path)}", hint="a file, an address, or a run's key"
    )


_SAFETENSORS_HINT = "torch.save(safetensors.torch.load_file('FILE.safetensors'), 'FILE.pt') converts it"


def _similar_file(path: Path | None) -> str:
    names = [item.name for item in path.parent.glob("*.pt*")] if path is not None and path.parent.is_dir() else []
    return f"; {suggestion(path.name, names)}" if path is not None and names else ""


def _of_address(setting: str, url: str, data_dir: Path) -> InitialWeights:
    path = downloaded(url, data_dir)
    if path is None:
        return InitialWeights(setting=setting, url=url, pending="to be fetched first")
    return InitialWeights(setting=setting, sha256=sha256_of_torch_file(path, data_dir), path=path)


_FOLDER = "weights"
_HASH = re.compile(r"-([0-9a-f]{8})\.pth$")  # torchvision's file names contain the start of the sha256
_IMPORT_S = 300.0  # for an import of torchvision from a slow disk
_INSTEAD = "init.weights=<the address, or a file>"
# runs in a child process: the controller never imports torch
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
    """Return the sha256 of a file of torch.save. Raises DataError: it is another file, or cut off; OSError."""
    with path.open("rb") as file:
        head = file.read(16)
    is_pickle = re.match(rb"\x80[\x02-\x05]", head) is not None  # the format before torch 1.6
    if not zipfile.is_zipfile(path) and not is_pickle:
        size = path.stat().st_size
        what = "is cut off" if head.startswith(b"PK") else "is no file of torch.save" if size else "is empty"
        start = f" and begins with {head!r}" if size else ""
        raise DataError(f"{path} {what}: it has {size} bytes{start}; copy or fetch it again (take this one away first)")
    return sha256_of(path, data_dir)


# --------------------------------------------------------------------------------------- kept copies
def stored_copy(sha256: str, data_dir: Path) -> Path | None:
    """Return the stored copy of the weights with this digest, if it exists and is intact."""
    path = data_dir.absolute() / _FOLDER / f"{sha256}.pt"
    return path if path.is_file() and sha256_of(path, data_dir) == sha256 else None


def store(source: Path, sha256: str, data_dir: Path) -> Path:
    """Store a copy of a file with this digest, atomically; return it. Raises DataError: the file changed; OSError."""
    if (copied := stored_copy(sha256, data_dir)) is not None:
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
def downloaded(url: str, data_dir: Path) -> Path | None:
    """Return the file that was downloaded from an address before, or None."""
    path = _download_path(url, data_dir)
    return path if path.is_file() else None


def fetch(url: str, data_dir: Path, *, setting: str, hash_in_name: bool = False) -> Path:
    """Download a file unless that was done; ``hash_in_name``: its name has digits of its sha256. Raises DataError."""
    path = _download_path(url, data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.parent / f".{path.name}.lock"
    with reporting(None) as report, held(lock, meanwhile=lambda: report(f"waiting for {lock}", 0, None)):
        if path.is_file():
            return path
        outcome = retrieve(DownloadRequest(name=f"{path.name}.new", urls=[url], sha256=None), path.parent, report)
        if not isinstance(outcome, Path):  # the failures of all addresses
            raise DataError(
                f"{setting}: {without_login(url)} can't be had: {outcome[-1].text}",
                hint="get the file by other means, then init.weights=<its path>",
            )
        wanted = _HASH.search(path.name) if hash_in_name else None
        if wanted and not sha256_file(outcome).startswith(wanted[1]):
            outcome.unlink()
            raise DataError(
                f"{setting}: what came from {without_login(url)} has another sha256 than its name says: {wanted[1]}…"
            )
        outcome.replace(path)
    return path


def _download_path(url: str, data_dir: Path) -> Path:
    name = file_name(url) or "weights.pt"
    return data_dir.absolute() / "downloads" / _FOLDER / sha256_text(url)[:12] / name


# ----------------------------------------------------------------------------- torchvision's own
def published_address(arch: str, name: str, root: Path) -> str:
    """Return the address of weights that torchvision publishes, by ``model.arch`` and their name (IMAGENET1K_V1).
    Raises UsageError: torchvision isn't here, or knows no such weights."""
    release = version("torchvision")
    if release is None:
        raise UsageError(
            f"init.weights={name}: torchvision, which knows the address, is not installed here", hint=_INSTEAD
        )
    cache, entry = Cache(root, "published", most=64), f"{release} {arch}"
    addresses: dict[str, str] | None = cache.get(entry)
    if addresses is None:  # not asked yet: an import of torchvision takes seconds
        try:
            addresses = python_answer(_ADDRESSES, arch, timeout_s=_IMPORT_S)
        except PacelineError as error:
            what = f"init.weights={name}: torchvision, which knows the address, can't be imported here: {error.what}"
            raise UsageError(what, hint=_INSTEAD) from error
        cache.keep({entry: addresses})
    if not addresses:
        raise UsageError(f"init.weights={name}: torchvision publishes none for model.arch={arch}")
    if name.upper() not in addresses:
        near = suggestion(name.upper(), addresses)
        raise UsageError(f"init.weights={name}: model.arch={arch} has no such; {near}")
    return addresses[name.upper()]
