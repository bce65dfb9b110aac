"""The initial weights of a run: the setting that names them, their digest, and what has to be done to get them.

``init.weights`` and ``init.run`` name them; in the key only their digest counts.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.config.build import RunConfig
from pipeline.core.errors import DataError, PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import expanded, write_json
from pipeline.data import weights
from pipeline.data.sources.source import local_path, scheme
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import changed
from trainers.contract import run_folder

_KEY = re.compile(r"[0-9a-f]{4,12}")
_PUBLISHED = re.compile(r"[A-Z][A-Z0-9_]*|default")
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


class Start(NamedTuple):
    """The initial weights of a configuration, as data.

    ``said`` is the setting. ``run`` is the key of the run whose final weights they are, once it is known. Without
    ``sha256`` the weights are still unknown, and without ``path`` they aren't here; ``waits`` says what comes first.
    ``url`` is their address.
    """

    said: str
    run: str | None = None
    sha256: str | None = None
    path: Path | None = None
    waits: str = ""
    url: str | None = None


def of(config: RunConfig, root: Path, of_parent: Callable[[RunConfig, str], Start]) -> Start | None:
    """Return the initial weights; None for fresh ones. Starts nothing.

    Args:
        root: the project.
        of_parent: finds the final weights of the run that ``init.run`` names, by its configuration and the setting's
        words.

    Raises:
        UsageError: no such run, file or published weights, a file that can't hold any, or another digest than
        init.sha256.
    """
    init = config.train.init
    if config.script is not None or not init.said:
        return None
    if init.sha256 is not None and (path := weights.kept(init.sha256, config.data_dir)) is not None:
        return Start(said=init.said, sha256=init.sha256, path=path)
    try:
        start = of_parent(config.parent, init.said) if config.parent else _named(config, root)
    except (DataError, OSError) as error:
        why = os_reason(error) if isinstance(error, OSError) else error.what
        raise UsageError(f"{init.said}: {why}") from error
    if init.sha256 is not None:
        if start.sha256 not in (None, init.sha256):
            raise UsageError(f"{init.said} has the sha256 {start.sha256}, and init.sha256 says {init.sha256}")
        return start._replace(sha256=init.sha256)
    return start


def file_of(config: RunConfig, root: Path) -> Path | None:
    """Return the local file that ``init.weights`` names; None if it names none. The run keeps a copy of it."""
    text = config.train.init.weights
    if config.script is not None or text is None:
        return None
    path = local_path(text) if scheme(text) else root / expanded(text, config.train.init.said)
    return path if path is not None and path.is_file() else None


def with_digest(config: RunConfig, start: Start) -> RunConfig:
    """Return the configuration with the digest of the weights, as the key holds it."""
    init = {**(config.resolved.get("init") or {}), "sha256": start.sha256}
    return dataclasses.replace(config, resolved={**config.resolved, "init": init})


def lay_down(start: Start, folder: Path, data_dir: Path) -> None:
    """Put the weights into a run folder, with a description beside them.

    Raises:
        PacelineError: they aren't here.
        OSError: they can't be written.
    """
    assert start.sha256 is not None, "a run has a key only once they are known"
    target = folder / run_folder.INITIAL_WEIGHTS
    there = target.is_file() and weights.sha256_of(target, data_dir) == start.sha256
    if not there:
        if start.path is None:
            raise PacelineError(f"{start.said}: the weights aren't here: {start.waits}")
        _link(weights.keep(start.path, start.sha256, data_dir), target)
    write_json(
        folder / run_folder.INITIAL_WEIGHTS_NOTES, {"said": start.said, "run": start.run, "sha256": start.sha256}
    )


def _link(source: Path, target: Path) -> None:
    """Hard-link the stored copy, which is never written to; copy it on file systems without links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def of_run(folder: RunFolder, said: str) -> Start:
    """Return a finished run's final weights. ``said``: the setting, for messages. Raises UsageError: there are none."""
    result = folder.read_result()
    if result is None:
        raise UsageError(f"{said}: run {folder.key} isn't finished", hint=f"doit status {folder.key}")
    final = result.files.get(run_folder.FINAL_WEIGHTS)
    if final is None:
        raise UsageError(
            f"{said}: run {folder.key} has no final weights ({run_folder.FINAL_WEIGHTS}); it is a script's"
        )
    if (why := changed(folder.path / run_folder.FINAL_WEIGHTS, final)) is not None:
        raise UsageError(
            f"{said}: {folder.path / run_folder.FINAL_WEIGHTS} {why}", hint="doit train with the words of that run"
        )
    return Start(said=said, run=folder.key, sha256=final.sha256, path=folder.path / run_folder.FINAL_WEIGHTS)


# -------------------------------------------------------------------------------------- init.weights
def _named(config: RunConfig, root: Path) -> Start:
    """Return what ``init.weights`` names: an address, a file, published weights or a run."""
    init = config.train.init
    text = str(init.weights)
    if scheme(text) and local_path(text) is None:
        return _of_address(init.said, text, config.data_dir)
    path = local_path(text) if scheme(text) else root / expanded(text, init.said)
    if path is not None and path.is_file():
        if path.suffix.lower() not in _ENDINGS:
            raise UsageError(f"{init.said}: a file of weights ends in {', '.join(_ENDINGS)}", hint=_AS_PT)
        return Start(said=init.said, sha256=weights.sha256_of_saved(path, config.data_dir), path=path)
    # a file of that name was looked for first, so these two are names of something else
    if _PUBLISHED.fullmatch(text):
        arch = getattr(config.train.model, "arch", None)
        if config.train.model.name != "torchvision" or arch is None:
            raise UsageError(f"{init.said} is a name of torchvision's weights", hint="model=torchvision model.arch=…")
        return _of_address(init.said, weights.published(arch, text, root), config.data_dir)
    if _KEY.fullmatch(text):
        try:
            return of_run(index.find(config.runs_dir, text), init.said)
        except UsageError as error:
            raise UsageError(error.what.replace(text, init.said, 1), hint=error.hint) from error
    raise UsageError(f"{init.said}: there is no file {path}{_near(path)}", hint="a file, an address, or a run's key")


_AS_PT = "torch.save(safetensors.torch.load_file(FILE), 'weights.pt') makes one of .safetensors"


def _near(path: Path | None) -> str:
    names = [item.name for item in path.parent.glob("*.pt*")] if path is not None and path.parent.is_dir() else []
    return f"; {suggestion(path.name, names)}" if path is not None and names else ""


def _of_address(said: str, url: str, data_dir: Path) -> Start:
    path = weights.fetched(url, data_dir)
    if path is None:
        return Start(said=said, url=url, waits="to be fetched first")
    return Start(said=said, sha256=weights.sha256_of_saved(path, data_dir), path=path)
