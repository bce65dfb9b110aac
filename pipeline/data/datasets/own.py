"""``dataset=own``: arrays that a function of yours returns. ``load`` runs in the process of ``data.own_process``."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.processes.threads import named
from pipeline.data.base import RawSet, Workspace
from pipeline.data.datasets import arrays
from pipeline.data.sources.source import files_below, local_path, refuse_special
from trainers.core.config import DatasetConfig, check_target

_WANTED = "images, labels, and where you have them test_images, test_labels, classes"
_OPTIONAL = ("test_images", "test_labels", "classes")


@dataclass(kw_only=True)
class OwnDatasetConfig(DatasetConfig):
    """A function of yours that returns a mapping with ``images`` (uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]) and
    ``labels`` (integers [N]), and ``test_images``, ``test_labels`` and ``classes`` (names) if you have them.

    An array may be a numpy.memmap. The function gets ``source`` (a pathlib.Path, or None) if it has such a parameter.
    The data is made anew when the function, a module of the project that it imports, or a file of the source changes.

    Attributes:
        target: the function, as package.module:name.
        args: its other arguments, by name.
    """

    name: str = "own"
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        DatasetConfig.__post_init__(self)
        check_target("dataset.target", self.target)


def local_inputs(config: DatasetConfig) -> list[Path] | dict[str, Path]:
    path = _source(config)
    if path is None or not path.is_dir():
        return [] if path is None else [path]
    return files_below(path)


def load(config: OwnDatasetConfig, work: Workspace) -> RawSet:
    returned = _call_or_explain(config, work.root)
    if not isinstance(returned, Mapping) or not {"images", "labels"} <= {*returned}:
        is_mapping = isinstance(returned, Mapping)
        seen = f"a mapping with {', '.join(map(str, returned))}" if is_mapping else type(returned).__name__
        raise DataError(f"{config.target} returned {seen}; wanted: a mapping with {_WANTED}")
    unknown = [str(name) for name in returned if name not in ("images", "labels", *_OPTIONAL)]
    if unknown:
        raise DataError(f"{config.target} returned {', '.join(unknown)} too; wanted: {_WANTED}")
    raw = arrays.raw_set(returned, source="images of a function", origin=config.target)
    names = _class_names(returned.get("classes", raw.classes), config.target)
    if len(names) != len(raw.classes):
        raise DataError(f"{config.target} returned {len(names)} names of classes; its labels have {len(raw.classes)}")
    return replace(raw, classes=names)


def _class_names(names: Any, target: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise DataError(f"{target} returned classes={names!r}; wanted: a list of names")
    return tuple(map(str, names))


def _source(config: DatasetConfig) -> Path | None:
    path = local_path(config.source)
    if path is None and config.source is not None:
        raise DataError(
            f"dataset.source={config.source} is an address, and dataset=own reads files that are here",
            hint="dataset.source=<a file or folder>, or have your function download it",
        )
    if path is not None and not path.is_dir():
        refuse_special(config.source, path)
    return path


def _call_or_explain(config: OwnDatasetConfig, root: Path) -> Any:
    """Call the function; if it raises anything (sys.exit too), raise a DataError that names the line."""
    try:
        return _call(config, root)
    except DataError:
        raise
    except BaseException as error:
        raise DataError(f"dataset.target={config.target} raised {named(error)}{_location(error, root)}") from error


def _call(config: OwnDatasetConfig, root: Path) -> Any:
    module, _, name = config.target.partition(":")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    make = getattr(importlib.import_module(module), name)
    arguments: dict[str, Any] = {}
    if "source" in inspect.signature(make).parameters:
        arguments["source"] = _source(config)
    # sorted, because the pack's name doesn't depend on their order either
    return make(**{**arguments, **dict(sorted(config.args.items()))})


def _location(error: BaseException, root: Path) -> str:
    """Return `` (my_package/data.py:12)``: the innermost frame in the project's code, else the innermost frame."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename.startswith(f"{root}/") and "site-packages" not in frame.filename]
    return "".join(f" ({frame.filename.removeprefix(f'{root}/')}:{frame.lineno})" for frame in (own or frames)[-1:])
