"""Readers of conf/ that need no Hydra: the user's own defaults, the groups with their options, the runs folder.

A user's own defaults are ``~/.config/paceline/defaults.yaml`` for all projects, and this project's ``conf/local.yaml``.
They replace values of conf/config.yaml; experiments and overrides replace them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_config_path

from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT, conf_dirs, shown

OWN_GROUP = "own_defaults"  # the group of both files in Hydra: ``own_defaults/user`` and ``own_defaults/project``
OWN_VARIABLE = "PACELINE_DEFAULTS"  # the environment variable that names one file instead of both; empty for no file
_replacements: list[Mapping[str, Any]] = []
"""The fields of each open ``own_replaced`` block, the innermost last: they are used instead of the files."""


def own_files(root: Path | None = None) -> dict[str, Path]:
    """Return the existing files of own defaults in the order of merging: name in Hydra → path."""
    only_file = os.environ.get(OWN_VARIABLE)
    if only_file is not None:
        paths = {"user": Path(only_file).expanduser()} if only_file else {}
    else:
        paths = {
            "user": user_config_path("paceline") / "defaults.yaml",
            "project": (root or ROOT) / "conf" / "local.yaml",
        }
    return {f"{OWN_GROUP}/{name}": path for name, path in paths.items() if path.is_file()}


def own_content(name: str) -> dict[str, Any]:
    """Return the fields of the file ``user`` or ``project`` for Hydra to merge; {} if there is no such file.

    Raises UsageError: an entry of the defaults list that chooses no option; ValueError: the file holds a list.
    """
    if _replacements:  # these are both files merged
        return dict(_replacements[-1]) if name == "project" else {}
    from omegaconf import DictConfig, OmegaConf  # imported late: the command of a finished run needs no OmegaConf

    path = own_files().get(f"{OWN_GROUP}/{name}")
    if path is None:
        return {}
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"In '{OWN_GROUP}/{name}': a list stands there")  # composition_errors.py adds the place
    fields: dict[str, Any] = OmegaConf.to_container(loaded)  # type: ignore[assignment]  # a mapping
    if "defaults" in fields:
        fields["defaults"] = _choices(fields["defaults"], path)
    return fields


def _choices(entries: Any, path: Path) -> list[dict[str, Any]]:
    """Return the entries of a defaults list as ``override /GROUP: OPTION``, because conf/config.yaml chooses first."""
    choices = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, Mapping):
            choices += [{f"override /{group_of(key)}": option} for key, option in entry.items()]
        elif entry != "_self_":
            raise UsageError(
                f"{shown(path, ROOT)}: {entry!r} chooses no option, and its defaults list does nothing else",
                hint="- tracking: none",
            )
    return choices


def group_of(key: Any) -> str:
    """Return the group in the key of a defaults list's entry: ``tracking`` for ``override /tracking``."""
    return str(key).removeprefix("override ").strip().lstrip("/")


def own_merged() -> dict[str, Any]:
    """Return both files merged into one mapping, for a run's provenance; the project's file wins."""
    if not _replacements and not own_files():
        return {}
    from omegaconf import OmegaConf  # imported late, as in own_content

    user, project = own_content("user"), own_content("project")
    choices = [*user.pop("defaults", ()), *project.pop("defaults", ())]
    option_by_key = {key: option for choice in choices for key, option in choice.items()}
    defaults = {"defaults": [{key: option} for key, option in option_by_key.items()]} if option_by_key else {}
    fields = OmegaConf.to_container(OmegaConf.merge(user, project))
    assert isinstance(fields, dict)
    return {**defaults, **fields}


def own_words(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield fields of own defaults as overrides; ``prefix`` is the section that they belong to: ``trainer.``."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from own_words(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}={value}"


@contextmanager
def own_replaced(fields: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, compose with these own defaults instead of those in files, to reproduce a run that had them."""
    _replacements.append(fields)
    try:
        yield
    finally:
        _replacements.pop()


# ------------------------------------------------------------------------------- groups and folders
_QUOTED_PATH = re.compile(r"""(?P<quote>['"]?)(?P<path>[\w./ -]+)(?P=quote)""")
_DEFAULT_RUNS = re.compile(r"^paths:\n(?:  .*\n)*?  runs: (?P<path>[\w./-]+)$", re.MULTILINE)
_CHOICE_FIELDS = {"cluster": "launcher", "tracking": "tracker"}  # in other groups: name
_COMMENT = re.compile(r"^# (?!@package)(.*)", re.MULTILINE)
_DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<option>\w+)$", re.MULTILINE)


def choice_of(group: str) -> str:
    """Return the field of a group's section that holds the name of the chosen option."""
    return _CHOICE_FIELDS.get(group, "name")


class OptionGroup(NamedTuple):
    """A group of conf/: its options with a description of each, and the default option, if any."""

    name: str
    options: Mapping[str, str]
    default: str | None


def groups(root: Path = ROOT) -> list[OptionGroup]:
    """Return the groups in the order of config.yaml. Raises OSError."""
    folders = conf_dirs(root)
    defaults = dict(_DEFAULT.findall(config_file(folders).read_text(encoding="utf-8")))  # group → option
    option_groups = []
    for name, option in defaults.items():
        if any((folder / name).is_dir() for folder in folders):
            # the project's files come last, because they replace Paceline's of the same name
            files = {path.stem: path for folder in reversed(folders) for path in (folder / name).glob("*.yaml")}
            heads = {stem: _COMMENT.search(path.read_text(encoding="utf-8")) for stem, path in sorted(files.items())}
            options = {stem: head[1] if head else "" for stem, head in heads.items()}  # the first comment describes it
            default = None if option == "null" else option
            option_groups.append(OptionGroup(name=name, options=options, default=default))
    return option_groups


def config_file(folders: Sequence[Path]) -> Path:
    """Return the config.yaml that Hydra uses: the first one in these folders."""
    paths = [folder / "config.yaml" for folder in folders]
    return next((path for path in paths if path.is_file()), paths[-1])


def runs_dir(root: Path, words: Sequence[str]) -> Path | None:
    """Return the runs folder that these words set, without composing them; None if composing is needed."""
    values = [word.partition("=")[2] for word in words if word.startswith("paths.runs=")]
    if values:
        match = _QUOTED_PATH.fullmatch(values[-1])
    else:
        own = reversed(own_files(root).values())
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (*own, config_file(conf_dirs(root)))]
        # the first file that says "runs" decides; if it does so in a form unknown here, Hydra has to read it
        match = _DEFAULT_RUNS.search(next((text for text in texts if "runs" in text), ""))
    return root / match["path"] if match else None
