"""The memo of compositions: it stores what Hydra composed, so that a repeated command saves Hydra's import of 0.5 s.

A composition is found again by its overrides and all configuration and code files. It isn't stored if it depends on
anything else (an environment variable, the clock).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import conf_files
from pipeline.config.conf_files import choice_of, config_file, runs_dir
from pipeline.config.schema import OPTIONS, installed_programs
from pipeline.core.cache import Cache
from pipeline.core.files import canonical_json, sha256_bytes, sha256_text
from pipeline.core.places import code_of, conf_dirs
from pipeline.core.redact import without_secrets
from pipeline.keys.installed import version

_MAX_ENTRIES = 64
_CODE = ("pipeline", "trainers", "hydra_plugins")
_OUTSIDE = re.compile(r"\$\{(?![^${}:]+\}|oc\.(?:create|decode|deprecated|select|dict\.\w+):)")
"""A resolver that may read something besides conf/ and the overrides: ``oc.env``, ``now``, one of the user."""
_READS_VARIABLES = re.compile(r"\b(?:environ|getenv)\b")


class ComposeMemo:
    """The stored composition of some overrides (``words``) in one project."""

    def __init__(self, root: Path, words: Sequence[str]) -> None:
        self._root, self._words = root, words
        self._runs_dir = runs_dir(root, words)
        self._entries = Cache(self._runs_dir or root, "composed", most=_MAX_ENTRIES)

    def recall(self) -> dict[str, Any] | None:
        """Return the resolved configuration as plain containers; None if it is not stored for the current files."""
        entry = self._entries.get(self._name) if self._name else None
        return entry if isinstance(entry, dict) else None

    def keep(self, resolved: dict[str, Any]) -> None:
        """Store a composition, unless it contains a secret or depends on more than what the entry's name covers."""
        # a later command looks for the entry in the runs folder that its words show
        if self._name is None or self._runs_dir != self._root / str(resolved.get("paths", {}).get("runs")):
            return
        if self._takes_values_from_outside() or _uses_other_packages(resolved):
            return
        if json.loads(json.dumps(resolved)) == resolved == without_secrets(resolved):
            self._entries.keep({self._name: resolved})

    @cached_property
    def _name(self) -> str | None:
        """The name of the entry: the digest of all that the composition reads; None if that is unknown."""
        if self._runs_dir is None or self._files is None or any("hydra" in word for word in self._words):
            return None
        composed_from = {
            "words": list(self._words),
            "files": {name: sha256_bytes(content) for name, content in self._files.items()},
            "versions": [sys.version, version("hydra-core"), version("omegaconf")],
        }
        return sha256_text(canonical_json(composed_from))

    @cached_property
    def _files(self) -> dict[str, bytes] | None:
        """Path → content of all configuration files and of Paceline's code; None if Hydra searches other places."""
        if "searchpath" in config_file(conf_dirs(self._root)).read_text(encoding="utf-8"):
            return None
        ending_by_folder = {str(folder): ".yaml" for folder in conf_dirs(self._root)}
        ending_by_folder |= {f"{code_of(self._root)}/{name}": ".py" for name in _CODE}
        below = (path for folder, ending in ending_by_folder.items() for path in _files_below(folder, ending))
        own = (str(path) for path in conf_files.own_files(self._root).values())
        return {path: Path(path).read_bytes() for path in (*below, *own)}

    def _takes_values_from_outside(self) -> bool:
        """True if a word, a configuration file or an option's settings may read a variable or another source."""
        trainer_packages = [options.package for options in OPTIONS.values() if options.package.startswith("trainers.")]
        folders = tuple(f"{code_of(self._root)}/{package.replace('.', '/')}/" for package in trainer_packages)
        texts = [*self._words]
        for path, content in (self._files or {}).items():
            text = content.decode(errors="replace")
            if path.startswith(folders) and _READS_VARIABLES.search(text):
                return True
            texts += [text] if path.startswith(folders) or not path.endswith(".py") else []
        return any(map(_OUTSIDE.search, texts))


def _uses_other_packages(resolved: Mapping[str, Any]) -> bool:
    """True if an option or the program comes from an installed package other than Paceline."""
    for group, options in OPTIONS.items():
        name = (resolved.get(group) or {}).get(choice_of(group))
        if (group, name) in (("search", "none"), ("tracking", None)) or group not in resolved:
            continue
        if not options.target(str(name)).startswith(f"{options.package}."):
            return True
    script = str((resolved.get("program") or {}).get("script") or "")
    return script.startswith("/") and script in installed_programs().values()


def _files_below(folder: str, ending: str, parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield all files with this ending; follow links as Hydra does, but not to a folder above (``parents``)."""
    real_path = os.path.realpath(folder)
    if real_path in parents or not os.path.isdir(folder):  # noqa: PTH112
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files_below(entry.path, ending, (*parents, real_path))
            elif entry.name.endswith(ending):
                yield entry.path
