"""Explanations of errors of Hydra and OmegaConf in one line: the word, or the file and line, that is wrong, and a fix.

``explain`` calls one function after the other until one recognises its kind of mistake, by the texts of the errors:
first those about files of conf/, then those about words of the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]
from yaml.reader import ReaderError  # type: ignore[import-untyped]

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config import conf_files
from pipeline.config.schema import OPTIONS, PROGRAMS, RootConfig
from pipeline.config.unknown_key import field_names, group_names, not_of_a_host, unknown_key, within
from pipeline.core.errors import UsageError, first_line, nearest, suggestion
from pipeline.core.places import ROOT, conf_dirs, shown
from pipeline.core.printable import hydra_value, printable, shell_line, shell_word
from pipeline.core.program import SCRIPT, SECTION
from trainers.script.settings import regex_error

TryCompose = Callable[[Sequence[str]], DictConfig | None]
"""A function that composes overrides; it returns None if they can't be composed."""
_ABSENT = object()
_PACKAGE = "# @package _global_"
# Beside each pattern is a message that it matches. Hydra's begin with the file, OmegaConf's end with the field:
_IN_FILE = re.compile(r"In '([^']+)': ")  # In 'experiment/x': Could not find …
_FULL_KEY = re.compile(r"full_key: (\S+)")  # full_key: trainer.epochs
# Value 'x' of type 'str' could not be converted to Integer
_NO_NUMBER = re.compile(r"Value ('.*') of type '\w+' could not be converted to (Integer|Float)")
_NO_KEY = re.compile(r"Key '[^']+' not in '([^']+)'")  # Key 'epohcs' not in 'TrainerConfig'
_NO_OPTION = re.compile(r"Could not find '([^']+)/([^'/]+)'")  # Could not find 'experiment/dataset/digits'
_NO_OVERRIDE = re.compile(r"Could not override '([^'@]+)")  # Could not override 'datset'. No match in the defaults list
_TWICE = re.compile(r"Multiple values for (\S+)\. ")  # Multiple values for dataset. To override a value use …
# of a word: trainer.epohcs=3; ~nothing; nogroup@x=y; +seed=4
_UNKNOWN = re.compile(
    r"Could not override '([^']+)'|Could not delete from config\. '([^']+)' does not exist"
    r"|config group '([^']+)' does not exist|An item is already at '([^']+)'"
)
_NO_HOSTS = re.compile(
    f"is not a subclass of {HostConfig.__name__}|is not a ListConfig|DictConfig with ListConfig|not Optional|not an int"
)  # OmegaConf's errors about a value that is no list of hosts
_HOSTS_ARE = (
    "write cluster.hosts=[node1,me@node2:2222], or with their fields [{name: node1, nproc_per_node: 4}, …]; a file "
    "takes the latter alone: hosts: [{name: node1}, {name: node2, user: me, port: 2222}]"
)
_IN_A_HOST = re.compile(rf"Key '([^']+)' not in '{HostConfig.__name__}'\s+full_key: \1\s")
_NO_TEXT = re.compile(r"Cannot convert '(list|dict)' to string")
_A_LIST = "Cannot merge DictConfig with ListConfig"
_NO_FIELD = re.compile(r"Interpolation key '([^']+)' not found")
_WITHOUT_OPTION = {  # group → how to use something that no option of the group stands for
    "dataset": "dataset=folder dataset.source=FOLDER for images in one folder a class, dataset=torchvision "
    "dataset.class=NAME for one of torchvision's, dataset=own for a function of yours",
    "model": "model=torchvision model.arch=NAME for one of torchvision's, model=own model.target=MODULE:CLASS for one "
    "of yours",
}
_RANGE = re.compile(r"(\d+)(?:\.\.\.?|-|:)(\d+)")  # 0..3, as other languages write it
_BEGINS_AN_EXPRESSION = re.compile(r"[\[{]|\w+\(")  # a list, a mapping or a function, which quotes would make a text


class Word(NamedTuple):
    """An override in its parts."""

    text: str
    mark: str  # +, ++, ~ or ''
    name: str
    value: str  # what follows the first =; '' without one

    @classmethod
    def of(cls, text: str) -> Word:
        unmarked = text.lstrip("+~")
        name, _, value = unmarked.partition("=")
        return cls(text=text, mark=text.removesuffix(unmarked), name=name, value=value)

    @property
    def key(self) -> str:
        return self.mark + self.name

    @property
    def as_list_of_texts(self) -> str:
        """The override with each element of its flat list as a text, quoted for a shell; '' if it is no such list."""
        flat = re.fullmatch(r"['\"]?\[([^\[\]{}()'\"]+)\]?['\"]?", self.value)
        texts = [hydra_value(text.strip()) for text in flat[1].split(",")] if flat else []
        return shell_word(f"{self.key}=[{','.join(texts)}]") if texts else ""

    @property
    def quoted(self) -> str:
        """The override with its value as one text, quoted for a shell."""
        return shell_word(f"{self.key}={QuotedString(self.value, Quote.single).with_quotes()}")

    @property
    def as_values(self) -> str:
        """The override with each of its values as a text, quoted for a shell."""
        return shell_word(f"{self.key}={','.join(map(hydra_value, self.value.split(',')))}")


class CompositionFailure:
    """A failed composition. ``try_compose`` composes other overrides, to find the one at fault and the valid names."""

    def __init__(self, error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> None:
        self.error, self.overrides, self.try_compose = error, [*overrides], try_compose
        self.causes: list[BaseException] = [error]  # the error, its cause, the cause of that, …
        while (cause := self.causes[-1].__cause__) is not None:
            self.causes.append(cause)
        self.text = " ".join(map(str, self.causes))

    @functools.cached_property
    def culprit(self) -> Word:
        """The override at fault; ``conf/config.yaml`` if there is no override."""
        # if only one sets the field in the error, it is this one, even if another word gave the field its type
        # (program.env.A=[1] program.script=a.py); otherwise it is the first with which composing fails
        field = None if _IN_FILE.search(self.text) else _FULL_KEY.search(self.text)
        setters = [
            word for word in map(Word.of, self.overrides) if field and word.name == field[1] and "~" not in word.mark
        ]
        if len(setters) == 1:
            return setters[0]
        for index, item in enumerate(self.overrides[:-1]):  # without the last: all together are known to fail
            if self.try_compose(self.overrides[: index + 1]) is None:
                return Word.of(item)
        return Word.of(self.overrides[-1] if self.overrides else "conf/config.yaml")

    def files(self) -> Iterator[ConfigFile]:
        """Yield the files that may be at fault: the one named in the error, the culprit's option, the own defaults."""
        # an error about an option doesn't say which of these files chooses it
        own_files = conf_files.own_files()
        names = _IN_FILE.findall(self.text)[:1]  # GROUP/OPTION
        group, equals, option = self.culprit.text.lstrip("+").partition("=")
        names += [f"{group.partition('@')[0]}/{option}"] if equals else []
        for name in dict.fromkeys(names):
            paths = (folder / f"{name}.yaml" for folder in conf_dirs(ROOT))
            path = own_files.pop(name, None) or next((path for path in paths if path.is_file()), None)
            if path is not None:
                is_own = name.startswith(conf_files.OWN_GROUP)
                yield ConfigFile.read(path, "" if is_own else name.rpartition("/")[0])
        yield from (ConfigFile.read(path, "") for path in reversed(own_files.values()))


class ConfigFile(NamedTuple):
    """A file of a conf/ folder, or the user's own defaults."""

    path: Path
    group: str  # of the option in this file, such as experiment; '' if the file is no option
    lines: Sequence[str]

    @classmethod
    def read(cls, path: Path, group: str) -> ConfigFile:
        return cls(path, group, path.read_text(encoding="utf-8", errors="replace").splitlines())

    def at(self, line: int) -> str:
        """Return a place such as ``conf/experiment/x.yaml, line 3``; ``line`` 0: only the file."""
        return f"{shown(self.path, ROOT)}{f', line {line}' if line else ''}"

    @property
    def is_global(self) -> bool:
        """Whether its fields belong to the whole configuration, and not to the section of its group."""
        return any(_PACKAGE.lstrip("# ") in line for line in self.lines if line.startswith("#"))

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
        # a file of a group doesn't repeat the group's name
        path = field if self.is_global or not self.group else field.removeprefix(f"{self.group.replace('/', '.')}.")
        node, line = self.root, 0
        for part in path.split("."):
            entries = node.value if isinstance(node, yaml.MappingNode) else []
            key, node = next((entry for entry in entries if str(entry[0].value) == part), (None, None))
            line = line if key is None else key.start_mark.line + 1
        return line


def explain(error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> UsageError:
    """Return the error as one line. ``try_compose`` composes other overrides, to find the one at fault."""
    if isinstance(error, UsageError):  # raised while Hydra read an option's settings (compose._LazyNode)
        return error
    failure = CompositionFailure(error, overrides, try_compose)
    explanations = (_unreadable_file, _wrong_entry, _wrong_field, _no_override, _refused_value)
    return next(filter(None, (explanation(failure) for explanation in explanations)), None) or _other(failure)


def explain_interpolation(error: OmegaConfBaseException, config: DictConfig) -> UsageError:
    """Explain a value of ``config`` that refers to a missing field."""
    if match := _NO_FIELD.search(str(error)):
        close = nearest(match[1], field_names(_plain(config)))
        hint = f"did you mean ${{{close}}}?" if close else "doit config shows all fields"
        return UsageError(f"{error.full_key}: ${{{match[1]}}} names no field; {hint}")
    if match := re.search(r"Environment variable '([^']+)' not found", str(error)):
        name = match[1]
        return UsageError(
            f"{error.full_key}: the environment variable {name} isn't set; ${{oc.env:{name},DEFAULT}} takes a default"
        )
    return UsageError(f"{error.full_key or 'configuration'}: {first_line(error)}")


def no_value(field: str) -> UsageError:
    """Return the error for a field without a value."""
    if _is_of_hosts(field):
        return UsageError(f"{field} is missing: every host has a name; {_HOSTS_ARE}")
    return UsageError(f"{field} is missing: it was deleted or set to ???; choose an option with {field}=…")


# ------------------------------------------------------------------------------ files
def _unreadable_file(failure: CompositionFailure) -> UsageError | None:
    """Explain a file that isn't YAML, or not in UTF-8."""
    for cause in failure.causes:
        if isinstance(cause, MarkedYAMLError):
            mark = cause.problem_mark or cause.context_mark
            place = f"{shown(Path(mark.name), ROOT)}, line {mark.line + 1}" if mark else "a configuration file"
            problem = cause.problem or cause.context or "is no YAML"
            if r"'\t'" in problem:
                return UsageError(f"{place}: a tab stands there, and YAML indents by blanks", hint="two blanks instead")
            key = problem.removeprefix("found duplicate key ")
            if key != problem:  # it began so
                return UsageError(f"{place}: the key {key!r} stands there twice", hint="keep one of the two lines")
            return UsageError(f"{place}: {problem}")
        if isinstance(cause, ReaderError):
            return UsageError(f"{shown(Path(cause.name), ROOT)}: {first_line(cause)}")
        if isinstance(cause, UnicodeDecodeError):  # this error has the content of the file, but not its name
            in_conf = (path for folder in conf_dirs(ROOT) for path in folder.rglob("*.yaml") if path.is_file())
            places = [shown(path, ROOT) for path in in_conf if path.read_bytes() == cause.object]
            return UsageError(f"{(places or ['a configuration file'])[0]} is not UTF-8 text (byte {cause.start})")
    return None


def _wrong_entry(failure: CompositionFailure) -> UsageError | None:
    """Explain a file of the wrong form: no fields at its top, no package line, or a wrong line in its defaults list."""
    text, groups = failure.text, group_names()
    for file in failure.files():
        group = file.group
        if (root := file.root) is not None and not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            place = file.at(root.start_mark.line + 1)
            return UsageError(f"{place}: {kind} stands there, and a file of conf/ has fields, as in seed: 3")
        if file.lines and file.lines[0].startswith("\ufeff"):
            return UsageError(f"{file.at(1)}: a byte-order mark hides it; save the file as UTF-8 without one")
        if (misplaced := _wrong_top_level(file)) is not None:
            return misplaced
        # these errors come if fields of the whole configuration are taken for fields of the file's group
        is_nested = f"Key '{group}' not in 'RootConfig'" in text or f"@{group}." in text or _NO_OVERRIDE.search(text)
        if group and not file.is_global and is_nested:
            return UsageError(
                f"{file.at(1)}: without {_PACKAGE!r} all that it sets would be fields of {group}, which has none",
                hint=f"{_PACKAGE} as the first line of the file",
            )
        match = _NO_OPTION.search(text) or _NO_OVERRIDE.search(text) or _TWICE.search(text)
        name = match[1].removeprefix(f"{group}/") if match else ""
        if match is None or not (line := file.entry(name)):
            continue
        # The group exists, and the entry lacks "override" or the slash before the group's name. In experiment/x.yaml:
        # - dataset: digits           Could not find 'experiment/dataset/digits'
        # - override dataset: digits  Could not override 'experiment/dataset@dataset'
        # - /dataset: digits          Multiple values for dataset
        written = file.lines[line - 1].strip()
        if name in groups and (name != match[1] or match.re is _TWICE):
            effect = f"look into conf/{group}/{name}, as a name without / is inside of the file's own group"
            if match.re is _TWICE:
                effect = f"choose {name} a second time, beside conf/config.yaml's"
            return UsageError(
                f"{file.at(line)}: {written!r} would {effect}",
                hint=f"- override /{name}: {written.partition(':')[2].strip()}",
            )
        # - override /datset: digits  Could not override 'datset'
        if match.re is _NO_OVERRIDE:
            return UsageError(f"{file.at(line)}: there is no group {name!r} to override; {suggestion(name, groups)}")
    return None


def _wrong_top_level(file: ConfigFile) -> UsageError | None:
    """Explain an entry at the top of a file that has a dot in its name, or a text in the place of fields.

    Such as ``trainer.epochs: 2``, and ``dataset: digits``, which belongs into the defaults list.
    """
    is_whole, sections = file.is_global or not file.group, typing.get_type_hints(RootConfig)
    for key, node in file.root.value if is_whole and isinstance(file.root, yaml.MappingNode) else ():
        name, place = str(key.value), file.at(key.start_mark.line + 1)
        section, dot, field = name.partition(".")
        if dot and section in sections:
            nested = f"{section}: and below it, indented, {field}:"
            return UsageError(f"{place}: {name!r} is one name with a dot", hint=nested)
        has_fields = name in group_names() or dataclasses.is_dataclass(sections.get(name))
        if not (has_fields and isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"):
            continue
        entry = f"- override /{name}: {node.value}" if file.group else f"- {name}: {node.value}"
        hint = f"{entry} in the defaults list chooses an option"
        if ":" in node.value:
            hint = "a blank behind each colon"
        elif "=" in node.value:
            hint = node.value.replace("=", ": ")
        return UsageError(f"{place}: {name} has fields, and {node.value!r} is none", hint=hint)
    return None


def _wrong_field(failure: CompositionFailure) -> UsageError | None:
    """Explain a field of a file that is unknown or has a value of the wrong type."""
    match, file = _FULL_KEY.search(failure.text), next(failure.files(), None)
    if match is None or file is None or not _IN_FILE.search(failure.text):
        return None
    field, place = match[1], file.at(file.line_of(match[1]))
    if (unknown := _NO_KEY.search(failure.text)) is not None:
        return _unknown_field(place, field, unknown[1])
    if _is_of_hosts(field) and _NO_HOSTS.search(failure.text):
        return UsageError(f"{place}: {field}: that is no list of hosts; {_HOSTS_ARE}")
    # of Hydra's message the line that says neither the file nor the field, which are named here anyway
    lines = [line.strip() for line in str(failure.error).splitlines() if line.strip()]
    reason = next((line for line in lines if not line.startswith(("In '", "full_key"))), lines[0])
    if "is not Optional" in reason and (field in group_names() or field in typing.get_type_hints(RootConfig)):
        return UsageError(f"{place}: {field}: has nothing below it", hint="indent its fields by two blanks")
    return UsageError(f"{place}: {field}: {_plain_reason(reason)}")


def _unknown_field(place: str, field: str, settings_name: str) -> UsageError:
    """Explain a field that the settings class of that name doesn't have."""
    group, _, name = field.rpartition(".")
    options = OPTIONS.get(group)
    classes = [*map(options.settings, options.names())] if options else []
    classes += typing.get_type_hints(RootConfig).values()
    settings: type[Any] = next((item for item in classes if item.__name__ == settings_name), RootConfig)
    settings = PROGRAMS[SCRIPT.name] if group == SECTION else settings
    names = [item.name for item in dataclasses.fields(settings)]
    if group == SECTION and name in names:
        return UsageError(
            f"{place}: {field} is a field of program=script, which nothing chooses",
            hint="- override /program: script, in the defaults list of the file",
        )
    valid = within(group, name, names) if group else suggestion(name, names)
    return UsageError(f"{place}: unknown key {field!r}; {valid}")


# ------------------------------------------------------------------------------ words
def _no_override(failure: CompositionFailure) -> UsageError | None:
    """Explain an override that can't be parsed, as the user typed it.

    ``for_hydra`` (overrides/words.py) adds ``++`` to some overrides, because Hydra demands it before a new name in a
    mapping, such as program.args.width=3.
    """
    unparsed = next((cause for cause in failure.causes if isinstance(cause, OverrideParseException)), None)
    if unparsed is None and failure.culprit.name:
        return None
    word = failure.culprit if unparsed is None else Word.of(str(unparsed.override).removeprefix("++"))
    text, key, value = printable(word.text), word.key, word.value
    if not re.fullmatch(r"[^\s.]+(\.[^\s.]+)*", word.name):
        return UsageError(f"{text} can't be read: write NAME=VALUE, where a name has no blanks, as in trainer.epochs=3")
    if word.name == "program.metrics_pattern" and (fault := regex_error(value)):
        return UsageError(f"{key}: {fault}")
    if not value:
        why = ": write key=value"
    elif value.startswith("~"):  # Hydra's mark of a deletion
        why = f": a value that begins with ~ needs quotes: {word.quoted}"
    elif _BEGINS_AN_EXPRESSION.match(value):
        as_list = f"as a list of texts it is {texts}; " if (texts := word.as_list_of_texts) else ""
        why = (
            " as a list [a,b], a mapping {a: 1} or a function range(1,3), whose texts with blanks or signs are in "
            f"quotes; {as_list}if all of it is a text, it needs quotes: {word.quoted}"
        )
    else:
        are_values = "," in value and "'" not in value and '"' not in value
        why = f": several values are written {word.as_values};" if are_values else ":"
        why += f" a text with blanks or signs needs quotes of its own, inside the shell's quotes: {word.quoted}"
    return UsageError(f"{text} can't be read{why}")


def _refused_value(failure: CompositionFailure) -> UsageError | None:
    """Explain an override that can be parsed, and that Hydra or OmegaConf refuses, by the text of the error."""
    word, text = failure.culprit, failure.text
    if missing := next((cause for cause in failure.causes if isinstance(cause, MissingConfigException)), None):
        return _missing_option(missing, failure)
    if word.mark.startswith("~") and "does not support deletion" in text:
        return UsageError(
            f"{word.text}: {word.name} always has a value and can't be deleted; write {word.name}=VALUE instead"
        )
    if match := _IN_A_HOST.search(text):
        in_entry = f"{word.text}, in an entry of cluster.hosts or cluster.spares"
        return not_of_a_host(match[1], word.name if word.name.startswith("cluster.") else in_entry)
    is_simple = re.fullmatch(r"[\w@.:-]+(,[\w@.:-]+)*", word.value) is not None
    if word.name.rpartition(".")[2] == "hosts" and "," in word.value and is_simple:
        return UsageError(f"{word.text}: hosts are a list, 'cluster.hosts=[{word.value}]'")
    if _NO_HOSTS.search(text) and (_is_of_hosts(word.name) or HostConfig.__name__ in text):
        example = f"write '{word.name}=[{word.value}]'; else " if is_simple else ""
        return UsageError(f"{word.text}: that is no list of hosts; {example}{_HOSTS_ARE}")
    # {a: 1} and [a,b] are mappings and lists to Hydra, even where a text was meant
    if match := _NO_TEXT.search(text):
        kind = "list" if match[1] == "list" else "mapping"
        quoted = word._replace(mark=word.mark.removeprefix("++")).quoted
        return UsageError(
            f"{word.text} must be one text, and this is a {kind}; if all of it is a text, it needs quotes: {quoted}"
        )
    if "Ambiguous value" in text or "requires --multirun" in text:
        return UsageError(
            f"{word.text}: several values are a sweep, {shell_line(['doit', 'sweep', *failure.overrides])}; for one "
            f"value write {shell_word(f'{word.key}=[{word.value}]')} for a list, {word.quoted} for a text with a comma"
        )
    unknown = _UNKNOWN.search(text)
    return _refused_key(next(filter(None, unknown.groups())), failure) if unknown else None


def _other(failure: CompositionFailure) -> UsageError:
    """Explain any other error: by the form in which the value would be right, else by OmegaConf's own reason."""
    word, text = failure.culprit, failure.text
    key, value = word.key, word.value
    reason = _plain_reason(first_line(failure.causes[-1]))
    if any(isinstance(cause, RecursionError) for cause in failure.causes):
        places = [file.at(0) for file in failure.files()] or [word.text]
        return UsageError(f"{places[0]}: its defaults list leads back to itself")
    if _IN_FILE.search(text) and (file := next(failure.files(), None)) is not None:
        return UsageError(f"{file.at(0)}: {'a list stands where fields are wanted' if _A_LIST in text else reason}")
    # values that are right in another form; else the reason that OmegaConf gives stays
    if match := _RANGE.fullmatch(value):
        reason = f"the trials of a sweep are written {key}='range({match[1]},{int(match[2]) + 1})'"
    elif value.startswith("[") and "of type 'list'" in text:
        reason = f"one value is wanted; the trials of a sweep are written {key}={value[1:-1].replace(' ', '')}"
    elif _A_LIST in text or "to Dict[" in text:
        reason = f"it has fields of its own; write {key}.NAME=VALUE"
    elif value and "is not a ListConfig, list or" in text:
        as_list = word.as_list_of_texts or f"'{key}=[{value}]'"
        reason = f"a list is wanted there; write {as_list}"
    return UsageError(f"{word.text}: {reason}")


def _missing_option(error: MissingConfigException, failure: CompositionFailure) -> UsageError:
    """Explain an option that a group doesn't have; name the file that chooses it, if it isn't a word."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    # conf/model/mine.yaml chooses schema/model/mine. Hydra misses this if the module mine is gone or has no settings
    if (options := OPTIONS.get(group.removeprefix("schema/"))) and group.startswith("schema/"):
        try:
            options.settings(option)  # raises the reason
        except UsageError as reason:
            return reason
    word = failure.culprit
    name, value = word.name, word.value
    if error.options is None and value.startswith("["):
        values = value.removeprefix("[").rstrip("]").replace(" ", "")
        return UsageError(
            f"{word.text}: {name} takes one option; to train with each of them: doit sweep {name}={values}"
        )
    if name == "program" and value.endswith(".py"):
        return UsageError(f"{word.text}: a script is no option of program", hint=f"program.script={shell_word(value)}")
    if name == "dataset" and Path(value).exists():
        return UsageError(
            f"{word.text}: a folder or file is no option of dataset; "
            "one with a folder for each class is dataset=folder",
            hint=f"dataset=folder dataset.source={shell_word(value)}",
        )
    other_endings = (folder / group / f"{option}.yml" for folder in conf_dirs(ROOT))
    if group and (file := next((path for path in other_endings if path.is_file()), None)) is not None:
        renamed = shell_line(["mv", shown(file, ROOT), shown(file.with_suffix(".yaml"), ROOT)])
        return UsageError(f"{word.text}: {shown(file, ROOT)} is there, and Hydra reads .yaml alone", hint=renamed)
    whole_name = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
    entries = ((file, file.entry(group)) for file in failure.files())
    places = (file.at(line) for file, line in entries if line and whole_name.search(file.lines[line - 1]))
    valid = error.options or ()
    return UsageError(
        f"{next(places, word.text)}: {group or 'config'} has no option {option!r}; {suggestion(option, valid)}",
        hint=None if nearest(option, valid) else _WITHOUT_OPTION.get(group),
    )


def _refused_key(key: str, failure: CompositionFailure) -> UsageError:
    """Explain a key that is unknown, or exists and can't be changed, replaced or added to in this way."""
    # the composition without the word shows which names there are
    word = failure.culprit
    config = failure.try_compose([item for item in failure.overrides if item != word.text])
    config = failure.try_compose([]) if config is None else config
    bare_key = key.partition("@")[0]
    if config is not None and OmegaConf.select(config, bare_key, default=_ABSENT) is not _ABSENT:
        bare_word = word.text.lstrip("+")
        advice = f"to change it write {bare_word}" if bare_word != word.text else f"to add entries write ++{word.text}"
        return UsageError(f"{word.text}: {key} is there but can't be changed this way; {advice}")
    # for a.b.c.d: the names in a.b.c, else in a.b; of shorter ones unknown_key knows more
    parts = re.split(r"[./]", bare_key)
    for depth in range(len(parts) - 1, 1, -1):
        parent = ".".join(parts[:depth])
        section = OmegaConf.select(config, parent) if config is not None else None
        if isinstance(section, DictConfig):
            return UsageError(f"unknown key {key!r}; {within(parent, parts[depth], [*map(str, section)])}")
    return unknown_key(bare_key, word.value if "=" in word.text else None, {} if config is None else _plain(config))


def _is_of_hosts(field: str) -> bool:
    return field.startswith(("cluster.hosts", "cluster.spares"))


def _plain(config: DictConfig) -> dict[Any, Any]:
    container = OmegaConf.to_container(config)
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    return container


def _plain_reason(line: str) -> str:
    """Reword OmegaConf's line about a text in the place of a number; return other lines unchanged."""
    match = _NO_NUMBER.fullmatch(line)
    return line if match is None else f"{match[1]} is no {'whole ' if match[2] == 'Integer' else ''}number"
