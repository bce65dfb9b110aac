"""A person's own defaults: a file for all of their projects, and ``conf/local.yaml`` of this one, which no commit has.

conf/config.yaml names both in its defaults list, before the experiment: what an experiment or the command line sets
goes before them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT

GROUP = "own_defaults"
"""Under which Hydra finds them: ``own_defaults/user`` and ``own_defaults/project``."""
VARIABLE = "PACELINE_DEFAULTS"
"""Names a file in place of both; if it is empty, there are none."""
_instead: list[Mapping[str, Any]] = []


def files(root: Path | None = None) -> dict[str, Path]:
    """The files that are there, in the order in which they are merged, by their names for Hydra."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        places = {"user": Path(named).expanduser()} if named else {}
    else:
        from platformdirs import user_config_path  # not before: what asks for no file needs no name of a folder

        places = {
            "user": user_config_path("paceline") / "defaults.yaml",
            "project": (root or ROOT) / "conf" / "local.yaml",
        }
    return {f"{GROUP}/{name}": path for name, path in places.items() if path.is_file()}


def called(path: Path) -> str:
    """A file of them as it is shown: ``conf/local.yaml``, or with its whole path."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def content(name: str) -> dict[str, Any]:
    """What a file holds for Hydra's merging. An entry of its defaults list chooses an option, with ``override`` or not.

    Args:
        name: ``user`` or ``project``.
    """
    if _instead:
        return dict(_instead[-1]) if name == "project" else {}
    from omegaconf import DictConfig, OmegaConf  # not before: the no-op command knows a composition without Hydra

    path = files().get(f"{GROUP}/{name}")
    if path is None:
        return {}
    read = OmegaConf.load(path)
    if not isinstance(read, DictConfig):
        raise ValueError(f"In '{GROUP}/{name}': a list stands there")  # explained like a file of conf/
    held: dict[str, Any] = OmegaConf.to_container(read)  # type: ignore[assignment]  # a mapping
    if "defaults" in held:
        held["defaults"] = _choices(held["defaults"], path)
    return held


def _choices(entries: Any, path: Path) -> list[dict[str, Any]]:
    """``tracking: none`` and ``override /tracking: none`` alike: conf/config.yaml has chosen one already.

    Raises UsageError: an entry that chooses no option.
    """
    chosen = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, Mapping):
            chosen += [{f"override /{group(key)}": option} for key, option in entry.items()]
        elif entry != "_self_":
            raise UsageError(
                f"{called(path)}: {entry!r} chooses no option, and its defaults list does nothing else",
                hint="- tracking: none",
            )
    return chosen


def group(key: Any) -> str:
    """The group of an entry's key: ``tracking`` of ``override /tracking``."""
    return str(key).removeprefix("override ").strip().lstrip("/")


def merged() -> dict[str, Any]:
    """Both files as one, for a run's provenance."""
    if not _instead and not files():
        return {}
    from omegaconf import OmegaConf

    user, project = content("user"), content("project")
    chosen = [*user.pop("defaults", ()), *project.pop("defaults", ())]
    options = {key: option for entry in chosen for key, option in entry.items()}  # the project's come last
    both: Any = OmegaConf.to_container(OmegaConf.merge(user, project))
    return {**({"defaults": [{key: option} for key, option in options.items()]} if options else {}), **both}


def words(held: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The fields that they set, as overrides."""
    for name, value in held.items():
        if isinstance(value, Mapping):
            yield from words(value, f"{above}{name}.")
        elif name != "defaults":
            yield f"{above}{name}={value}"


@contextmanager
def replaced(held: Mapping[str, Any]) -> Iterator[None]:
    """Compositions have these defaults and no file's: those of a run that is made again."""
    _instead.append(held)
    try:
        yield
    finally:
        _instead.pop()
