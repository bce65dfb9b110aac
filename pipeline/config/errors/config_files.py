"""Explain Hydra's errors about a configuration file: name the file, the line, the key, and the correction."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]
from yaml.reader import ReaderError  # type: ignore[import-untyped]

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config import conf_files
from pipeline.config.errors.failure import FULL_KEY, IN_FILE, CompositionFailure, plain_reason
from pipeline.config.errors.unknown_key import group_names, unknown_key, within
from pipeline.config.schema import OPTIONS, PROGRAMS
from pipeline.core.errors import UsageError, first_line, suggestion
from pipeline.core.places import ROOT, conf_dirs, shown
from pipeline.core.program import SCRIPT, SECTION

PACKAGE = "# @package _global_"
_NO_KEY = re.compile(r"Key '[^']+' not in '([^']+)'")
_NO_OPTION = re.compile(r"Could not find '([^']+)/([^'/]+)'")
_NO_OVERRIDE = re.compile(r"Could not override '([^'@]+)")
_TWICE = re.compile(r"Multiple values for (\S+)\. ")
NO_HOSTS = re.compile(
    f"is not a subclass of {HostConfig.__name__}|is not a ListConfig|DictConfig with ListConfig|not Optional|not an int"
)
"""OmegaConf's errors about a value that is no list of hosts."""
HOSTS_ARE = (
    "write cluster.hosts=[node1,me@node2:2222], or with their fields [{name: node1, nproc_per_node: 4}, …]; a file "
    "takes the latter alone: hosts: [{name: node1}, {name: node2, user: me, port: 2222}]"
)


def is_of_hosts(field: str) -> bool:
    """Return True for a list of hosts, and for what lies in one."""
    return field.startswith(("cluster.hosts", "cluster.spares"))


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file of a conf/ folder, or the user's own defaults.

    ``group`` is the group of the option in this file, such as ``experiment``; '' if the file is no option.
    """

    path: Path
    group: str
    lines: Sequence[str]

    @classmethod
    def read(cls, path: Path, group: str) -> ConfigFile:
        return cls(path=path, group=group, lines=path.read_text(encoding="utf-8", errors="replace").splitlines())

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
        choice = re.compile(rf"\s*-\s*(override\s+)?/?{re.escape(group)}(@\S+)?\s*:")
        return next((number for number, line in enumerate(self.lines, start=1) if choice.match(line)), 0)

    def line_of(self, field: str) -> int:
        """Return the line of a field such as ``trainer.epochs``, or of the nearest section above it."""
        inside = field if self.is_global or not self.group else field.removeprefix(f"{self.group.replace('/', '.')}.")
        node, line = self.root, 0
        for part in inside.split("."):
            entries = node.value if isinstance(node, yaml.MappingNode) else []
            key, node = next((entry for entry in entries if str(entry[0].value) == part), (None, None))
            line = line if key is None else key.start_mark.line + 1
        return line


def explain_file(failure: CompositionFailure) -> UsageError | None:
    """Explain a file that can't be read, or a wrong entry or field of one; None if the error isn't about a file."""
    for cause in failure.causes:
        if isinstance(cause, MarkedYAMLError):
            return _not_yaml(cause)
        if isinstance(cause, ReaderError):
            return UsageError(f"{shown(Path(cause.name), ROOT)}: {first_line(cause)}")
        if isinstance(cause, UnicodeDecodeError):
            return _not_text(cause)
    return _wrong_entry(failure) or _wrong_field(failure)


def place_of_entry(failure: CompositionFailure, group: str, option: str) -> str:
    """Return the place where a file chooses a missing option of ``group``, or ''."""
    chosen = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
    places = ((file, file.entry(group)) for file in _files(failure))
    return next((file.at(line) for file, line in places if line and chosen.search(file.lines[line - 1])), "")


def place_of_file(failure: CompositionFailure) -> str:
    """Return the file that Hydra's error names, or ''."""
    file = next(_files(failure), None) if IN_FILE.search(failure.text) else None
    return "" if file is None else file.at(0)


def _files(failure: CompositionFailure) -> Iterator[ConfigFile]:
    """Yield the files that an error may be about: that which it names, that which the culprit chooses, own defaults.

    An error about an option doesn't say which file chooses it.
    """
    own = conf_files.own_files()
    choices = IN_FILE.findall(failure.text)[:1]
    group, equals, option = failure.culprit.text.lstrip("+").partition("=")
    choices += [f"{group.partition('@')[0]}/{option}"] if equals else []
    for choice in dict.fromkeys(choices):
        paths = (folder / f"{choice}.yaml" for folder in conf_dirs(ROOT))
        path = own.pop(choice, None) or next((path for path in paths if path.is_file()), None)
        if path is not None:
            yield ConfigFile.read(path, "" if choice.startswith(conf_files.OWN_GROUP) else choice.rpartition("/")[0])
    for path in reversed(own.values()):
        yield ConfigFile.read(path, "")


def _not_yaml(error: MarkedYAMLError) -> UsageError:
    mark = error.problem_mark or error.context_mark
    place = f"{shown(Path(mark.name), ROOT)}, line {mark.line + 1}" if mark else "a configuration file"
    problem = error.problem or error.context or "is no YAML"
    key = problem.removeprefix("found duplicate key ")
    if key != problem:
        return UsageError(f"{place}: the key {key!r} stands there twice", hint="keep one of the two lines")
    return UsageError(f"{place}: {problem}")


def _not_text(error: UnicodeDecodeError) -> UsageError:
    """Find the file that is no UTF-8 text: the error doesn't name it."""
    in_conf = (path for folder in conf_dirs(ROOT) for path in sorted(folder.rglob("*.yaml")) if path.is_file())
    for path in (*in_conf, *conf_files.own_files().values()):
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as reason:
            return UsageError(f"{shown(path, ROOT)} is not UTF-8 text (byte {reason.start})")
    return UsageError(f"a configuration file is not UTF-8 text: {error}")


def _wrong_entry(failure: CompositionFailure) -> UsageError | None:
    """Explain an error in a file's header or defaults list."""
    text, groups = failure.text, group_names()
    for file in _files(failure):
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


def _wrong_field(failure: CompositionFailure) -> UsageError | None:
    """Explain an unknown field of a file, or a wrong value of one; None if the error isn't about a file."""
    match, file = FULL_KEY.search(failure.text), next(_files(failure), None)
    if match is None or file is None or not IN_FILE.search(failure.text):
        return None
    field, place = match[1], file.at(file.line_of(match[1]))
    unknown = _NO_KEY.search(failure.text)
    if unknown is None:
        no_hosts = is_of_hosts(field) and NO_HOSTS.search(failure.text)
        reason = f"that is no list of hosts; {HOSTS_ARE}" if no_hosts else _value_reason(failure.error)
        return UsageError(f"{place}: {field}: {reason}")
    return _unknown_field(place, field, unknown[1], failure)


def _unknown_field(place: str, field: str, settings_name: str, failure: CompositionFailure) -> UsageError:
    """Explain a field of a file that the settings class of that name lacks."""
    group, _, name = field.rpartition(".")
    options = OPTIONS.get(group)
    classes = [*map(options.settings, options.names())] if options else []
    settings = next((one for one in classes if one.__name__ == settings_name), None)
    if group == SECTION:
        settings = PROGRAMS[SCRIPT.name]
    if settings is not None:
        names = [item.name for item in dataclasses.fields(settings)]
        if group == SECTION and name in names and settings_name != settings.__name__:
            return UsageError(
                f"{place}: {field} is a field of program=script, which nothing chooses",
                hint="- override /program: script, in the defaults list of the file",
            )
        return UsageError(f"{place}: unknown key {field!r}; {within(group, name, names)}")
    with conf_files.own_replaced({}):  # the file may be among them
        config = failure.try_compose([])
    valid = OmegaConf.to_container(config) if config is not None else {}
    return UsageError(f"{place}: {unknown_key(field, None, valid)}")


def _value_reason(error: BaseException) -> str:
    """Return OmegaConf's line about a wrong value, without the lines that only name the place."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return plain_reason(next((line for line in lines if not line.startswith(("In '", "full_key"))), lines[0]))
