"""Compositions of earlier calls, so that a call which finds its run finished needs no Hydra (most of its time).

An entry's name is a digest of the overrides and of the content of everything that a composition is made from. What is
known of that content is remembered too, as long as no file has been written or replaced.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.config import basis
from pipeline.config.basis import Basis
from pipeline.config.groups import choice_of, config_file
from pipeline.core.cache import Remembered
from pipeline.core.files import canonical_json, sha256_bytes, sha256_file, sha256_text
from pipeline.core.places import code_of, conf_dirs
from pipeline.core.redact import without_secrets
from pipeline.core.stamps import settles_in
from pipeline.keys.installed import version

_PLAIN = re.compile(r"""(?P<quote>['"]?)(?P<path>[\w./ -]+)(?P=quote)""")
_DEFAULT = re.compile(r"^paths:\n  runs: (?P<path>[\w./-]+)$", re.MULTILINE)
_MOST = 128  # entries, two for a command line
OPTION_FOLDERS = {
    "dataset": "pipeline/data/datasets",
    "model": "trainers/models",
    "optimizer": "trainers/optimizers",
    "schedule": "trainers/schedules",
    "strategy": "trainers/strategies",
    "cluster": "pipeline/cluster/launchers",
    "search": "pipeline/sweep/samplers",
    "tracking": "pipeline/tracking/trackers",
}
"""The packages of ``pipeline.config.schema.OPTIONS``, which a finished run doesn't import."""

_BUILDERS = ("pipeline/cluster", "pipeline/core")
"""What ``pipeline.config.build`` types and checks a composition with."""

_MODULES = (
    "pipeline/core/options.py",
    *(f"pipeline/keys/{name}.py" for name in ("canonical", "content_key", "order", "rank_environment")),
    *(f"trainers/{name}.py" for name in ("core/config", "core/fields", "core/trainer_config", "script/settings")),
)
_OUTSIDE = re.compile(r"\$\{(?![^${}:]+\}|oc\.(?:create|decode|deprecated|select|dict\.\w+):)")
"""A resolver that takes a value from elsewhere than conf/ and the words, or may: ``oc.env``, ``now``, anybody's own."""
_READS = re.compile(r"\b(?:environ|getenv)\b")  # of an option's settings: their defaults may be anything


class Composition:
    """What these words are composed to in one project. ``root`` is the project's folder."""

    def __init__(self, root: Path, words: Sequence[str]) -> None:
        self._runs_dir = runs_dir(root, words)
        self._root = root
        self.known = Remembered(self._runs_dir or root, "composed", most=_MOST)
        self._looked = Remembered(self._runs_dir or root, "looked", most=_MOST)
        self.name = self._named(words) if self._runs_dir else None

    def _named(self, words: Sequence[str]) -> str | None:
        """The name of the entry, or None where the words or the files take something from outside."""
        searched = _searched(config_file(conf_dirs(self._root)).read_text(encoding="utf-8"))
        if searched is None:
            self._seen = None
            return None
        sources = dict(_sources(self._root, searched))
        self._seen = _seen(words, sources)
        found = self._looked[self._seen] if self._seen else None
        if isinstance(found, str):
            return found
        name = _name(words, sources)
        if name and self.known[name] is not None:  # the same files as before, written anew: a checkout
            self._note(name)
        return name

    def _note(self, name: str) -> None:
        if self._seen:
            self._looked.keep({self._seen: name})

    def recall(self) -> dict[str, Any] | None:
        """The resolved configuration, or None where these words were not composed before."""
        found = self.known[self.name] if self.name else None
        return found if isinstance(found, dict) else None

    def keep(self, resolved: dict[str, Any]) -> None:
        """Secrets aren't kept, nor what puts its runs elsewhere than its words said, nor what has an option of another
        installed package, whose sources aren't looked at, nor what is installed as a program."""
        if self._runs_dir != self._root / str(resolved.get("paths", {}).get("runs")):
            return
        if not all(self._is_own(group, resolved[group]) for group in OPTION_FOLDERS if group in resolved):
            return
        if _is_installed(str((resolved.get("program") or {}).get("script") or "")):
            return
        if self.name and json.loads(json.dumps(resolved)) == resolved == without_secrets(resolved):
            self.known.keep({self.name: resolved})
            self._note(self.name)

    def _is_own(self, group: str, section: dict[str, Any]) -> bool:
        name = section.get(choice_of(group))
        place = code_of(self._root) / OPTION_FOLDERS[group] / f"{name}.py"
        return (group, name) in (("search", "none"), ("tracking", None)) or place.is_file()


def _is_installed(script: str) -> bool:
    """Whether an entry point may have named the script, and may name another one tomorrow."""
    if not script.startswith("/"):
        return False
    from pipeline.config.schema import installed_programs

    return script in installed_programs().values()


class BuiltBasis:
    """The basis that a composition was built to on this computer, with the hosts that its hostfile names now."""

    def __init__(self, composition: Composition, root: Path, local_gpus: int) -> None:
        self._composition, self._root, self._local_gpus = composition, root, local_gpus

    def recall(self) -> Basis | None:
        """None where it was not built before: then ``pipeline.config.build`` is needed, which checks every field."""
        name = self._name
        found = self._composition.known[name] if name else None
        return basis.from_json(found, self._root) if isinstance(found, dict) else None

    def keep(self, built: Basis) -> None:
        """Where its composition was kept, which has no secrets then."""
        found = basis.to_json(built)
        if self._name and found is not None:
            self._composition.known.keep({self._name: found})

    @property
    def _name(self) -> str | None:
        resolved = self._composition.recall()
        if resolved is None:
            return None
        hostfile = resolved["cluster"]["hostfile"]
        try:
            path = self._root / Path(hostfile).expanduser() if hostfile else None
            if path is not None and not path.is_file():  # a pipe would be waited for
                return None
            hosts = sha256_file(path) if path is not None else None
        except (OSError, RuntimeError):  # RuntimeError: no such home
            return None
        decided = [self._composition.name, str(self._root), self._local_gpus, hosts]
        if (resolved.get("program") or {}).get("script") and resolved["cluster"]["nproc_per_node"] == "auto":
            from pipeline.keys import process_groups  # of a script alone

            decided.append(process_groups.are_asked_for(resolved, self._root))
        return sha256_text(canonical_json(decided))


def runs_dir(root: Path, words: Sequence[str]) -> Path | None:
    """Where these words put the runs, as far as that can be seen without composing them; None where it can't."""
    told = [word.partition("=")[2] for word in words if word.startswith("paths.runs=")]
    plain = _PLAIN.fullmatch(told[-1]) if told else _DEFAULT.search(config_file(conf_dirs(root)).read_text("utf-8"))
    return root / plain["path"] if plain else None


def _seen(words: Sequence[str], sources: Mapping[str, str]) -> str | None:
    """A digest of the words and of what changes when a file is written or replaced; None where one was a moment ago,
    as a second writing within the clock's step changes nothing."""
    found = {name: os.stat(place) for name, place in sources.items()}  # noqa: PTH116  (there are hundreds)
    if settles_in(max(about.st_ctime_ns for about in found.values())):
        return None
    rows = [
        f"{name} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino} {about.st_dev}"
        for name, about in found.items()
    ]
    return sha256_text(canonical_json([*words, sorted(rows), _versions()]))


def _versions() -> list[str | None]:
    return [sys.version, *(version(name) for name in ("hydra-core", "omegaconf"))]


def _name(words: Sequence[str], sources: Mapping[str, str]) -> str | None:
    texts = {name: Path(place).read_bytes() for name, place in sources.items()}
    told = {
        name: text.decode(errors="replace") for name, text in texts.items() if name.startswith(("conf/", "trainers/"))
    }
    if any("hydra" in word for word in words) or any(_OUTSIDE.search(text) for text in (*words, *told.values())):
        return None
    if any(_READS.search(text) for name, text in told.items() if name.startswith("trainers/")):
        return None
    made_from = {
        "words": list(words),
        "files": {name: sha256_bytes(text) for name, text in texts.items()},
        "versions": _versions(),
    }
    return sha256_text(canonical_json(made_from))


def _searched(text: str) -> list[str] | None:
    """The folders of ``hydra.searchpath`` in config.yaml, the only file that may set it; None: what it names is no
    folder, or only Hydra can tell which one."""
    if "searchpath" not in text:
        return []
    import yaml  # type: ignore[import-untyped]  # hardly anybody sets it, and the import takes as long as all of this

    try:
        named = (yaml.safe_load(text).get("hydra") or {}).get("searchpath") or []
        folders = [_folder(str(entry)) for entry in named]
    except (yaml.YAMLError, AttributeError, TypeError, ImportError, ValueError):
        return None
    return None if None in folders else [folder for folder in folders if folder is not None]


def _folder(entry: str) -> str | None:
    """Of ``file:///shared/conf``, ``/shared/conf`` or ``pkg://package.conf``. Raises ImportError, ValueError."""
    scheme, _, place = entry.rpartition("://")
    if "${" in entry or scheme not in ("", "file", "pkg"):
        return None
    if scheme != "pkg":
        return os.path.abspath(place)  # noqa: PTH100
    found = find_spec(place.replace("/", "."))
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return places[0] if len(places) == 1 else None


def _sources(root: Path, searched: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every configuration file and option, and the code that turns them into a composition: a name, and where it is."""
    code = code_of(root)
    trees = [("conf", str(folder), ".yaml") for folder in (*conf_dirs(root), *searched)]
    trees += [(name, f"{code}/{name}", ".py") for name in ("pipeline/config", "hydra_plugins")]
    for top, start, ending in trees:
        for folder, names in _walk(start):
            told = (f"{folder}/{name}" for name in names if name.endswith(ending))
            yield from ((f"{top}/{place}", place) for place in told)
    for folder in (*OPTION_FOLDERS.values(), *_BUILDERS):
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(code / folder) if name.endswith(".py")]  # noqa: PTH208
            yield from ((f"{folder}/{name}", f"{code}/{folder}/{name}") for name in names)
    for name in _MODULES:
        yield name, f"{code}/{name}"


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Each folder with the names in it, those behind symbolic links too: Hydra follows them."""
    place = os.path.realpath(folder)
    if place in above or not os.path.isdir(folder):  # noqa: PTH112  (a link that leads up again, or no such folder)
        return
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    yield folder, [name for name, is_folder in found if not is_folder]
    for name, is_folder in found:
        if is_folder and name != "__pycache__":
            yield from _walk(f"{folder}/{name}", (*above, place))
