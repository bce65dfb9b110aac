"""The user's own defaults: a file for all projects, and ``conf/local.yaml`` of this project, which git ignores.

conf/config.yaml names both in its defaults list, before the experiment: experiments and the command line take
precedence over them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT, shown

GROUP = "own_defaults"
"""The group of both files in Hydra: ``own_defaults/user`` and ``own_defaults/project``."""
VARIABLE = "PACELINE_DEFAULTS"
"""The environment variable that names one file instead of both; empty for no file."""
_replacements: list[Mapping[str, Any]] = []
"""The fields of each ``replaced`` block that runs, the innermost last."""


def files(root: Path | None = None) -> dict[str, Path]:
    """Return the existing files by their names in Hydra, in the order in which they are merged."""
    only_file = os.environ.get(VARIABLE)
    if only_file is not None:
        paths = {"user": Path(only_file).expanduser()} if only_file else {}
    else:
        paths = {
            "user": user_config_path("paceline") / "defaults.yaml",
            "project": (root or ROOT) / "conf" / "local.yaml",
        }
    return {f"{GROUP}/{name}": path for name, path in paths.items() if path.is_file()}


def content(name: str) -> dict[str, Any]:
    """Return the fields of the file ``user`` or ``project`` for Hydra to merge; {} if there is no such file.

    An entry of its defaults list chooses an option, with or without ``override``.

    Raises UsageError: an entry of the defaults list that chooses no option; ValueError: the file holds a list.
    """
    if _replacements:
        return dict(_replacements[-1]) if name == "project" else {}
    from omegaconf import DictConfig, OmegaConf  # not at the top: a finished run's command loads no OmegaConf

    path = files().get(f"{GROUP}/{name}")
    if path is None:
        return {}
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"In '{GROUP}/{name}': a list stands there")  # errors/config_files.py adds the place
    fields: dict[str, Any] = OmegaConf.to_container(loaded)  # type: ignore[assignment]  # a mapping
    if "defaults" in fields:
        fields["defaults"] = _choices(fields["defaults"], path)
    return fields


def _choices(entries: Any, path: Path) -> list[dict[str, Any]]:
    """Return the entries of a defaults list as ``override /GROUP: OPTION``, because conf/config.yaml chooses first."""
    chosen = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, Mapping):
            chosen += [{f"override /{group(key)}": option} for key, option in entry.items()]
        elif entry != "_self_":
            raise UsageError(
                f"{shown(path, ROOT)}: {entry!r} chooses no option, and its defaults list does nothing else",
                hint="- tracking: none",
            )
    return chosen


def group(key: Any) -> str:
    """Return the group of an entry's key: ``tracking`` for ``override /tracking``."""
    return str(key).removeprefix("override ").strip().lstrip("/")


def merged() -> dict[str, Any]:
    """Return both files merged into one mapping, for a run's provenance. Of equal choices the project's counts."""
    if not _replacements and not files():
        return {}
    from omegaconf import OmegaConf  # see ``content``

    user, project = content("user"), content("project")
    choices = [*user.pop("defaults", ()), *project.pop("defaults", ())]
    option_by_key = {key: option for choice in choices for key, option in choice.items()}
    defaults = {"defaults": [{key: option} for key, option in option_by_key.items()]} if option_by_key else {}
    fields = OmegaConf.to_container(OmegaConf.merge(user, project))
    assert isinstance(fields, dict)
    return {**defaults, **fields}


def words(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the fields of own defaults as overrides; ``prefix`` is the section of ``fields`` with a dot."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from words(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}={value}"


@contextmanager
def replaced(fields: Mapping[str, Any]) -> Iterator[None]:
    """Compose with these defaults instead of the files', such as those of a run that is reproduced."""
    _replacements.append(fields)
    try:
        yield
    finally:
        _replacements.pop()
