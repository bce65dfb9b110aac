"""Initial weights of a run, as ``init.weights`` or ``init.run`` names them. Only their digest counts in the key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.config.build import RunConfig
from pipeline.core.errors import DataError, PacelineError, UsageError, os_reason, suggestion
from pipeline.core.files import expanded, link_or_copy, write_json
from pipeline.data import weight_files
from pipeline.data.sources.source import local_path, scheme
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
    is None while the weights are unknown, ``path`` while they aren't on this computer; ``pending`` then says what must
    be done first. ``url`` is the address to fetch them from.
    """

    setting: str
    run: str | None = None
    sha256: str | None = None
    path: Path | None = None
    pending: str = ""
    url: str | None = None


def find(config: RunConfig, root: Path, of_parent: Callable[[RunConfig, str], InitialWeights]) -> InitialWeights | None:
    """Return the initial weights; None for fresh ones. Starts nothing.

    Args:
        root: the project.
        of_parent: returns the final weights of the run that ``init.run`` names, for its configuration and the setting.

    Raises:
        UsageError: no such run, file or published weights; a file that can't hold weights; a digest that differs from
        init.sha256.
    """
    init = config.train.init
    if config.script is not None or not init.setting:
        return None
    if init.sha256 is not None and (path := weight_files.kept(init.sha256, config.data_dir)) is not None:
        return InitialWeights(setting=init.setting, sha256=init.sha256, path=path)
    try:
        initial = of_parent(config.parent, init.setting) if config.parent else _of_setting(config, root)
    except (DataError, OSError) as error:
        why = os_reason(error) if isinstance(error, OSError) else error.what
        raise UsageError(f"{init.setting}: {why}") from error
    if init.sha256 is not None:
        if initial.sha256 not in (None, init.sha256):
            raise UsageError(f"{init.setting} has the sha256 {initial.sha256}, and init.sha256 says {init.sha256}")
        return initial._replace(sha256=init.sha256)
    return initial


def local_file(config: RunConfig, root: Path) -> Path | None:
    """Return the local file that ``init.weights`` names; None if it names something else."""
    text = config.train.init.weights
    if config.script is not None or text is None:
        return None
    path = local_path(text) if scheme(text) else root / expanded(text, config.train.init.setting)
    return path if path is not None and path.is_file() else None


def with_digest(config: RunConfig, initial: InitialWeights) -> RunConfig:
    """Return the configuration with init.sha256 set, which is what the key counts."""
    init = {**(config.resolved.get("init") or {}), "sha256": initial.sha256}
    return dataclasses.replace(config, resolved={**config.resolved, "init": init})


def place(initial: InitialWeights, folder: Path, data_dir: Path) -> None:
    """Put the weights and a description of their origin into a run folder.

    Raises:
        PacelineError: they aren't on this computer.
        OSError: they can't be written.
    """
    assert initial.sha256 is not None, "a run has a key only once they are known"
    target = folder / run_folder.INITIAL_WEIGHTS
    if not (target.is_file() and weight_files.sha256_of(target, data_dir) == initial.sha256):
        if initial.path is None:
            raise PacelineError(f"{initial.setting}: the weights aren't on this computer: {initial.pending}")
        link_or_copy(weight_files.keep(initial.path, initial.sha256, data_dir), target)
    notes = {"said": initial.setting, "run": initial.run, "sha256": initial.sha256}
    write_json(folder / run_folder.INITIAL_WEIGHTS_NOTES, notes)


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
    """Return the weights that ``init.weights`` names: an address, a file, published weights or a run."""
    init = config.train.init
    text = str(init.weights)
    if scheme(text) and local_path(text) is None:
        return _of_address(init.setting, text, config.data_dir)
    path = local_path(text) if scheme(text) else root / expanded(text, init.setting)
    if path is not None and path.is_file():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"{init.setting}: a file of weights ends in {', '.join(_SUFFIXES)}", hint=_SAFETENSORS_HINT
            )
        return InitialWeights(
            setting=init.setting, sha256=weight_files.sha256_of_torch_file(path, config.data_dir), path=path
        )
    # a file of that name would have come first
    if _PUBLISHED_NAME.fullmatch(text):
        arch = getattr(config.train.model, "arch", None)
        if config.train.model.name != "torchvision" or arch is None:
            raise UsageError(
                f"{init.setting} is a name of torchvision's weights", hint="model=torchvision model.arch=…"
            )
        return _of_address(init.setting, weight_files.published(arch, text, root), config.data_dir)
    if _RUN_KEY.fullmatch(text):
        try:
            return of_finished_run(index.find(config.runs_dir, text), init.setting)
        except UsageError as error:
            raise UsageError(error.what.replace(text, init.setting, 1), hint=error.hint) from error
    raise UsageError(
        f"{init.setting}: there is no file {path}{_similar_file(path)}", hint="a file, an address, or a run's key"
    )


_SAFETENSORS_HINT = "torch.save(safetensors.torch.load_file(FILE), 'weight_files.pt') makes one of .safetensors"


def _similar_file(path: Path | None) -> str:
    names = [item.name for item in path.parent.glob("*.pt*")] if path is not None and path.parent.is_dir() else []
    return f"; {suggestion(path.name, names)}" if path is not None and names else ""


def _of_address(setting: str, url: str, data_dir: Path) -> InitialWeights:
    path = weight_files.fetched(url, data_dir)
    if path is None:
        return InitialWeights(setting=setting, url=url, pending="to be fetched first")
    return InitialWeights(setting=setting, sha256=weight_files.sha256_of_torch_file(path, data_dir), path=path)
