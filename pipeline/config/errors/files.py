"""Explain Hydra's errors about a configuration file: name the file, the line, the key, and the correction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from pipeline.config import own_defaults
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.places import ROOT, conf_dirs, shown

PACKAGE = "# @package _global_"
_IN_FILE = re.compile(r"In '([^']+)': ")
_FIELD = re.compile(r"full_key: (\S+)")
_NO_KEY = re.compile(r"Key '[^']+' not in '([^']+)'")
_NO_OPTION = re.compile(r"Could not find '([^']+)/([^'/]+)'")
_NO_OVERRIDE = re.compile(r"Could not override '([^'@]+)")
_TWICE = re.compile(r"Multiple values for (\S+)\. ")
_NO_NUMBER = re.compile(r"Value ('.*') of type '\w+' could not be converted to (Integer|Float)")


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file of a conf/ folder, or the user's own defaults.

    ``group`` is the group of the option in this file, such as ``experiment``; '' if the file is no option.
    """

    path: Path
    group: str
    lines: Sequence[str]

    def at(self, line: int) -> str:
        """Return a place such as ``conf/experiment/x.yaml, line 3``; ``line`` 0: only the file."""
        return f"{shown(self.path, ROOT)}{f', line {line}' if line else ''}"

    @property
    def is_global(self) -> bool:
        return any(PACKAGE.lstrip("# ") in line for line in self.lines if line.startswith("#"))

    @property
    def root(self) -> yaml.Node | None:
        """The parsed content; None if the file is empty."""
        return yaml.compose("\n".join(self.lines), Loader=yaml.SafeLoader)

    def entry(self, group: str) -> int:
        """Return the line of the defaults list that chooses an option of ``group``, or 0."""
        wanted = re.compile(rf"\s*-\s*(override\s+)?/?{re.escape(group)}(@\S+)?\s*:")
        return next((number for number, line in enumerate(self.lines, start=1) if wanted.match(line)), 0)

    def line_of(self, field: str) -> int:
        """Return the line of a field such as ``trainer.epochs``, or of the nearest section above it."""
        inside = field if self.is_global or not self.group else field.removeprefix(f"{self.group.replace('/', '.')}.")
        node, line = self.root, 0
        for part in inside.split("."):
            entries = node.value if isinstance(node, yaml.MappingNode) else []
            key, node = next((entry for entry in entries if str(entry[0].value) == part), (None, None))
            line = line if key is None else key.start_mark.line + 1
        return line


def files_named(text: str, culprit: str) -> Iterator[ConfigFile]:
    """Yield the files that an error may be about: that which it names, that which the culprit chooses, own defaults.

    The culprit is the override at fault. An error about an option doesn't say which file chooses it.
    """
    own = own_defaults.files()
    names = _IN_FILE.findall(text)[:1]
    name, equals, option = culprit.lstrip("+").partition("=")
    for choice in dict.fromkeys([*names, *([f"{name.partition('@')[0]}/{option}"] if equals else [])]):
        paths = (folder / f"{choice}.yaml" for folder in conf_dirs(ROOT))
        path = own.pop(choice, None) or next((path for path in paths if path.is_file()), None)
        if path is not None:
            group = "" if choice.startswith(own_defaults.GROUP) else choice.rpartition("/")[0]
            yield _read(path, group)
    for path in reversed(own.values()):
        yield _read(path, "")


def _read(path: Path, group: str) -> ConfigFile:
    return ConfigFile(path=path, group=group, lines=path.read_text(encoding="utf-8", errors="replace").splitlines())


def all_files() -> Iterator[Path]:
    """Yield every configuration file."""
    for folder in conf_dirs(ROOT):
        yield from (path for path in sorted(folder.rglob("*.yaml")) if path.is_file())
    yield from own_defaults.files().values()


def entry_error(text: str, culprit: str, groups: Sequence[str]) -> UsageError | None:
    """Return the error in a file's header or defaults list, or None. ``text``: of Hydra's error and its causes."""
    for file in files_named(text, culprit):
        group = file.group
        if (root := file.root) is not None and not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            place = file.at(root.start_mark.line + 1)
            return UsageError(f"{place}: {kind} stands there, and a file of conf/ has fields, as in seed: 3")
        if group and not file.is_global and (f"Key '{group}' not in 'RootConfig'" in text or f"@{group}." in text):
            return UsageError(
                f"{file.at(1)}: without {PACKAGE!r} all that it sets would be fields of {group}, which has none",
                hint=f"{PACKAGE} as the first line of the file",
            )
        match = _NO_OPTION.search(text) or _NO_OVERRIDE.search(text) or _TWICE.search(text)
        if match is None:
            continue
        name = match[1].removeprefix(f"{group}/") if group else match[1]
        if not (line := file.entry(name)):
            continue
        written = file.lines[line - 1].strip()
        if name in groups and (name != match[1] or match.re is _TWICE):
            effect = f"look into conf/{group}/{name}, as a name without / is inside of the file's own group"
            if match.re is _TWICE:
                effect = f"choose {name} a second time, beside conf/config.yaml's"
            return UsageError(
                f"{file.at(line)}: {written!r} would {effect}",
                hint=f"- override /{name}: {written.partition(':')[2].strip()}",
            )
        if match.re is _NO_OVERRIDE:
            return UsageError(f"{file.at(line)}: there is no group {name!r} to override; {suggestion(name, groups)}")
    return None


def place_of_entry(text: str, culprit: str, group: str, option: str) -> str:
    """Return the place where a file chooses a missing option of ``group``, or ''."""
    chosen = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
    places = ((file, file.entry(group)) for file in files_named(text, culprit))
    return next((file.at(line) for file, line in places if line and chosen.search(file.lines[line - 1])), "")


def full_key(text: str) -> str:
    """Return the field that OmegaConf's error names; '' if it names none or is about a file."""
    match = None if _IN_FILE.search(text) else _FIELD.search(text)
    return match[1] if match else ""


def place_of_file(text: str, culprit: str) -> str:
    """Return the file that Hydra's error names, or ''."""
    file = next(files_named(text, culprit), None) if _IN_FILE.search(text) else None
    return "" if file is None else file.at(0)


def field_error(text: str, culprit: str) -> tuple[str, str, str] | None:
    """Return the place and full name of a field of a file, and the settings class that lacks the field.

    The settings class is '' if the field's value is wrong. None if the error isn't about a file.
    """
    match, file = _FIELD.search(text), next(files_named(text, culprit), None)
    if match is None or file is None or not _IN_FILE.search(text):
        return None
    unread = _NO_KEY.search(text)
    return file.at(file.line_of(match[1])), match[1], unread[1] if unread else ""


def value_reason(error: BaseException) -> str:
    """Return OmegaConf's line about a wrong value, without the lines that only name the place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return plain_reason(next((line for line in lines if not line.startswith(("In '", "full_key"))), lines[0]))


def plain_reason(line: str) -> str:
    """Return OmegaConf's line about a text in the place of a number in words that need no Python."""
    match = _NO_NUMBER.fullmatch(line)
    return line if match is None else f"{match[1]} is no {'whole ' if match[2] == 'Integer' else ''}number"
