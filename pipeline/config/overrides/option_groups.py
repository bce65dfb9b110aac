"""Facts read from conf/ without Hydra, so that help is quick.

These are the groups, their options with a line about each, and the runs folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.config import own_defaults
from pipeline.core.places import ROOT, conf_dirs

_QUOTED_PATH = re.compile(r"""(?P<quote>['"]?)(?P<path>[\w./ -]+)(?P=quote)""")
_DEFAULT_RUNS = re.compile(r"^paths:\n(?:  .*\n)*?  runs: (?P<path>[\w./-]+)$", re.MULTILINE)
_CHOICES = {"cluster": "launcher", "tracking": "tracker"}
_COMMENT = re.compile(r"^# (?!@package)(.*)", re.MULTILINE)
_DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<option>\w+)$", re.MULTILINE)


def choice_of(group: str) -> str:
    """Return the field of a group's section that holds the name of the chosen option."""
    return _CHOICES.get(group, "name")


class OptionGroup(NamedTuple):
    """A group of conf/: its options with a description of each, and the default option, if any."""

    name: str
    options: Mapping[str, str]
    default: str | None


def groups(root: Path = ROOT) -> list[OptionGroup]:
    """Return the groups in the order of config.yaml. Raises OSError."""
    folders = conf_dirs(root)
    chosen = dict(_DEFAULT.findall(config_file(folders).read_text(encoding="utf-8")))
    known = []
    for name, option in chosen.items():
        if any((folder / name).is_dir() for folder in folders):
            files = {path.stem: path for folder in reversed(folders) for path in (folder / name).glob("*.yaml")}
            heads = {stem: _COMMENT.search(path.read_text(encoding="utf-8")) for stem, path in sorted(files.items())}
            options = {stem: head[1] if head else "" for stem, head in heads.items()}
            known.append(OptionGroup(name=name, options=options, default=None if option == "null" else option))
    return known


def config_file(folders: Sequence[Path]) -> Path:
    """Return the config.yaml that Hydra uses."""
    named = [folder / "config.yaml" for folder in folders]
    return next((path for path in named if path.is_file()), named[-1])


def runs_dir(root: Path, words: Sequence[str]) -> Path | None:
    """Return the runs folder that these words set, without composing them; None if composing is needed."""
    values = [word.partition("=")[2] for word in words if word.startswith("paths.runs=")]
    if values:
        match = _QUOTED_PATH.fullmatch(values[-1])
    else:
        own = reversed(own_defaults.files(root).values())
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in (*own, config_file(conf_dirs(root)))]
        match = _DEFAULT_RUNS.search(next((text for text in texts if "runs" in text), ""))
    return root / match["path"] if match else None
