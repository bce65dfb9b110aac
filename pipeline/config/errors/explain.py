"""Turn errors of Hydra and OmegaConf into one line: field, value, nearest match, valid options."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]
from yaml.reader import ReaderError  # type: ignore[import-untyped]

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config import own_defaults
from pipeline.config.errors import files
from pipeline.config.errors.unknown_key import field_names, group_names, not_of_a_host, unknown_key
from pipeline.config.schema import OPTIONS, PROGRAMS
from pipeline.core.errors import UsageError, first_line, nearest, suggestion
from pipeline.core.places import ROOT, shown
from pipeline.core.printable import printable, shell_line, shell_word
from pipeline.core.program import SCRIPT, SECTION
from trainers.script.settings import not_a_pattern

_ABSENT = object()
TryCompose = Callable[[Sequence[str]], DictConfig | None]
"""Composes overrides; None if they can't be composed."""

_UNKNOWN = (
    re.compile(r"Could not override '([^']+)'"),
    re.compile(r"Could not delete from config\. '([^']+)' does not exist"),
    re.compile(r"config group '([^']+)' does not exist"),
    re.compile(r"An item is already at '([^']+)'"),
)


_IN_A_HOST = re.compile(rf"Key '([^']+)' not in '{HostConfig.__name__}'\s+full_key: \1\s")
_NO_HOSTS = re.compile(
    f"is not a subclass of {HostConfig.__name__}|is not a ListConfig|DictConfig with ListConfig|not Optional|not an int"
)
_NO_TEXT = re.compile(r"Cannot convert '(list|dict)' to string")
_A_LIST = "Cannot merge DictConfig with ListConfig"
_NO_FIELD = re.compile(r"Interpolation key '([^']+)' not found")
_BLANK = re.compile(r"\s")
_OTHERS = {  # group → how to choose what has no option of its own
    "dataset": "dataset=folder dataset.source=FOLDER for images in one folder a class, dataset=torchvision "
    "dataset.class=NAME for one of torchvision's, dataset=own for a function of yours",
    "model": "model=torchvision model.arch=NAME for one of torchvision's, model=own model.target=MODULE:CLASS for one "
    "of yours",
}
_STEPS = re.compile(r"(\d+)(?:\.\.\.?|-|:)(\d+)")  # 0..3, a range in other languages
_BEGINS_AN_EXPRESSION = re.compile(r"[\[{]|\w+\(")  # a list, a mapping or a function, which quotes would make a text
_HOSTS_ARE = (
    "write cluster.hosts=[node1,me@node2:2222], or with their fields [{name: node1, nproc_per_node: 4}, …]; a file "
    "takes the latter alone: hosts: [{name: node1}, {name: node2, user: me, port: 2222}]"
)


class Word(NamedTuple):
    """An override: ``+``, ``++``, ``~`` or '' as its ``mark``, a name, and what stands behind the first ``=``."""

    text: str
    mark: str
    name: str
    value: str

    @classmethod
    def of(cls, text: str) -> Word:
        """Take a word apart; a word without ``=`` has no value."""
        unmarked = text.lstrip("+~")
        name, _, value = unmarked.partition("=")
        return cls(text=text, mark=text.removesuffix(unmarked), name=name, value=value)

    @property
    def key(self) -> str:
        """The name with its mark."""
        return self.mark + self.name


class _Failure:
    """An error of Hydra's or OmegaConf's, and the overrides that were to be composed."""

    def __init__(self, error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> None:
        self.error, self.overrides = error, [*overrides]
        self.causes = [*_chain(error)]
        self.text = " ".join(map(str, self.causes))
        self.try_compose = try_compose

    @functools.cached_property
    def culprit(self) -> Word:
        """The override at fault."""
        return Word.of(_word_of_field(self.text, self.overrides) or _culprit(self.overrides, self.try_compose))

    @property
    def others(self) -> list[str]:
        """The other overrides."""
        return [item for item in self.overrides if item != self.culprit.text]


def explain(error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> UsageError:
    """Return the error as one line. ``try_compose`` composes other overrides, to find the one at fault."""
    if isinstance(error, UsageError):  # from an option whose settings can't be read
        return error
    failure = _Failure(error, overrides, try_compose)
    return _about_a_file(failure) or _about_the_syntax(failure) or _about_the_value(failure)


def _about_a_file(failure: _Failure) -> UsageError | None:
    """Explain a file that can't be read, or a wrong entry or field of one."""
    for cause in failure.causes:
        if isinstance(cause, MarkedYAMLError):
            return _not_yaml(cause)
        if isinstance(cause, ReaderError):
            return UsageError(f"{shown(Path(cause.name), ROOT)}: {first_line(cause)}")
        if isinstance(cause, UnicodeDecodeError):
            return _not_text(cause)
    return files.entry_error(failure.text, failure.culprit.text, group_names()) or _wrong_field_of_file(failure)


def _about_the_syntax(failure: _Failure) -> UsageError | None:
    """Explain an override that can't be parsed."""
    word = failure.culprit
    if not word.name and "=" in word.text:
        return UsageError(f"{word.text}: the name of a field is missing before the =; write NAME{word.text}")
    unread = next((cause for cause in failure.causes if isinstance(cause, OverrideParseException)), None)
    return None if unread is None else _not_an_override(unread)


def _about_the_value(failure: _Failure) -> UsageError:
    """Explain an option, a key or a value that is not accepted."""
    word, text = failure.culprit, failure.text
    for cause in failure.causes:
        if isinstance(cause, MissingConfigException):
            return _missing_option(cause, word)
    if word.mark.startswith("~") and "does not support deletion" in text:
        return UsageError(
            f"{word.text}: {word.name} always has a value and can't be deleted; write {word.name}=VALUE instead"
        )
    if of_hosts := _no_hosts(failure):
        return of_hosts
    if match := _NO_TEXT.search(text):
        kind = "list" if match[1] == "list" else "mapping"
        quoted = _in_quotes(word._replace(mark=word.mark.removeprefix("++")))
        return UsageError(
            f"{word.text} must be one text, and this is a {kind}; if all of it is a text, it needs quotes: {quoted}"
        )
    if "Ambiguous value" in text or "requires --multirun" in text:
        return _several_values(failure)
    if "Multiple values for " in text and word.mark.startswith("+"):
        return UsageError(f"{word.text}: {word.name} is chosen already", hint=shell_word(word.text.lstrip("+")))
    for pattern in _UNKNOWN:
        if match := pattern.search(text):
            return _refused_key(match.group(1), failure)
    if place := files.place_of_file(text, word.text):
        reason = "a list stands where fields are wanted" if _A_LIST in text else _reason(failure.error)
        return UsageError(f"{place}: {reason}")
    return UsageError(f"{word.text}: {_other_form(word, text) or _reason(failure.error)}")


def _no_hosts(failure: _Failure) -> UsageError | None:
    """Explain a value of the wrong form for a list of hosts, or for one of them."""
    word, text = failure.culprit, failure.text
    if match := _IN_A_HOST.search(text):
        in_entry = f"{word.text}, in an entry of cluster.hosts or cluster.spares"
        return not_of_a_host(match[1], word.name if word.name.startswith("cluster.") else in_entry)
    if _NO_HOSTS.search(text) and (_is_of_hosts(word.name) or HostConfig.__name__ in text):
        return UsageError(f"{word.text}: that is no list of hosts; {_HOSTS_ARE}")
    return None


def _several_values(failure: _Failure) -> UsageError:
    """Explain several values for a command that takes one."""
    word = failure.culprit
    as_list = shell_word(f"{word.key}=[{word.value}]")
    return UsageError(
        f"{word.text}: several values are a sweep, and this command takes one; "
        f"write {as_list} for a list, {_in_quotes(word)} for a text with a comma, "
        f"or train them all: {shell_line(['doit', 'sweep', *failure.overrides])}"
    )


def _wrong_field_of_file(failure: _Failure) -> UsageError | None:
    """Explain an unknown field of a file, or a wrong value of one; None if the error isn't about a file."""
    field_of_file = files.field_error(failure.text, failure.culprit.text)
    if field_of_file is None:
        return None
    place, field, settings = field_of_file
    if not settings:
        no_hosts = _is_of_hosts(field) and _NO_HOSTS.search(failure.text)
        reason = f"that is no list of hosts; {_HOSTS_ARE}" if no_hosts else files.value_reason(failure.error)
        return UsageError(f"{place}: {field}: {reason}")
    group, _, name = field.rpartition(".")
    options = OPTIONS.get(group)
    of_option = [one for one in map(options.settings, options.names()) if one.__name__ == settings] if options else []
    if classes := [PROGRAMS[SCRIPT.name]] if group == SECTION else of_option:
        names = [item.name for item in dataclasses.fields(classes[0])]
        if group == SECTION and name in names and settings != classes[0].__name__:
            return UsageError(
                f"{place}: {field} is a field of program=script, which nothing chooses",
                hint="- override /program: script, in the defaults list of the file",
            )
        return UsageError(f"{place}: unknown key {field!r}; {_within(group, name, names)}")
    with own_defaults.replaced({}):  # the file may be among them
        config = failure.try_compose([])
    known = OmegaConf.to_container(config) if config is not None else {}
    return UsageError(f"{place}: {unknown_key(field, None, known)}")


def _other_form(word: Word, text: str) -> str:
    """Suggest another form of the value, or return ''."""
    key, value = word.key, word.value
    if word.name == "step":
        return (
            "step.NAME.FIELD=… sets a field of a step of yours; doit profile takes steps=N, "
            "doit why and doit logs take step=NAME"
        )
    if match := _STEPS.fullmatch(value):
        return f"the trials of a sweep are written {key}='range({match[1]},{int(match[2]) + 1})'"
    if value.startswith("[") and "of type 'list'" in text:
        return f"one value is wanted; the trials of a sweep are written {key}={value[1:-1].replace(' ', '')}"
    if _A_LIST in text or "to Dict[" in text:
        return f"it has fields of its own; write {key}.NAME=VALUE"
    if value and "is not a ListConfig, list or" in text:
        return f"a list is wanted there; write '{key}=[{value}]'"
    return ""


def _is_of_hosts(field: str) -> bool:
    return field.startswith(("cluster.hosts", "cluster.spares"))


def _not_an_override(error: OverrideParseException) -> UsageError:
    word = Word.of(str(error.override).removeprefix("++"))  # added by for_hydra
    shown, key, value = printable(word.text), word.key, word.value
    if _BLANK.search(key):
        return UsageError(f"{shown} can't be read: write key=value, and a key has no blanks")
    if not all(parts := key.split(".")):
        named = ".".join(part or "NAME" for part in parts)
        return UsageError(f"{shown} can't be read: a name is missing beside a dot; write {named}={printable(value)}")
    quoted = _in_quotes(word)
    if word.name == "program.metrics_pattern" and (why := not_a_pattern(value)):
        return UsageError(f"{key}: {why}")
    if not value:
        why = ": write key=value"
    elif value.startswith("="):
        once = printable(f"{key}={value.lstrip('=')}")
        why = f": = stands twice; write {once}, or for a text that begins with =: {quoted}"
    elif value.startswith("~"):  # Hydra's mark of a deletion
        why = f": a value that begins with ~ needs quotes: {quoted}"
    elif _BEGINS_AN_EXPRESSION.match(value):
        why = (
            " as a list [a,b], a mapping {a: 1} or a function range(1,3), whose texts with blanks or signs are in "
            f"quotes; if all of it is a text, it needs quotes: {quoted}"
        )
    else:
        why = f": a text with blanks or signs needs quotes of its own, inside the shell's quotes: {quoted}"
    return UsageError(f"{shown} can't be read{why}")


def _in_quotes(word: Word) -> str:
    """Return the override with its value quoted as one text, for a shell."""
    return shell_word(f"{word.key}={QuotedString(word.value, Quote.single).with_quotes()}")


def _not_yaml(error: MarkedYAMLError) -> UsageError:
    """Explain a configuration file that is no YAML, with the line at fault."""
    mark = error.problem_mark or error.context_mark
    where = f"{shown(Path(mark.name), ROOT)}, line {mark.line + 1}" if mark else "a configuration file"
    problem = error.problem or error.context or "is no YAML"
    key = problem.removeprefix("found duplicate key ")
    if key != problem:
        return UsageError(f"{where}: the key {key!r} stands there twice", hint="keep one of the two lines")
    return UsageError(f"{where}: {problem}")


def _not_text(error: UnicodeDecodeError) -> UsageError:
    """Find the file that is no UTF-8 text: the error doesn't name it."""
    for path in files.all_files():
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as reason:
            return UsageError(f"{shown(path, ROOT)} is not UTF-8 text (byte {reason.start})")
    return UsageError(f"a configuration file is not UTF-8 text: {error}")


def explain_interpolation(error: OmegaConfBaseException, config: DictConfig) -> UsageError:
    """Explain a value of ``config`` that refers to a missing field."""
    if match := _NO_FIELD.search(str(error)):
        container = OmegaConf.to_container(config)
        assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
        close = nearest(match[1], field_names(container))
        meant = f"did you mean ${{{close}}}?" if close else "doit config shows all fields"
        return UsageError(f"{error.full_key}: ${{{match[1]}}} names no field; {meant}")
    return UsageError(f"{error.full_key or 'configuration'}: {first_line(error)}")


def no_value(field: str) -> UsageError:
    """Return the error for a field without a value."""
    if _is_of_hosts(field):
        return UsageError(f"{field} is missing: every host has a name; {_HOSTS_ARE}")
    return UsageError(f"{field} is missing: it was deleted or set to ???; choose an option with {field}=…")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _reason(error: Exception) -> str:
    """Return the first line of the innermost cause: the outer ones only name the place."""
    return files.plain_reason(first_line(list(_chain(error))[-1]))


def _word_of_field(text: str, overrides: list[str]) -> str:
    """Return the only override of the field that an error names, or ''.

    It is the culprit even if another word gave the field its type: program.env.A=[1] program.script=a.py.
    """
    field = files.full_key(text)
    words = [word for word in map(Word.of, overrides) if word.name == field and "~" not in word.mark] if field else []
    return words[0].text if len(words) == 1 else ""


def _culprit(overrides: list[str], try_compose: TryCompose) -> str:
    """Return the first override with which composing fails. The last one needs no trial: all together do fail."""
    for index, item in enumerate(overrides[:-1]):
        if try_compose(overrides[: index + 1]) is None:
            return item
    return overrides[-1] if overrides else "conf/config.yaml"


def _missing_option(error: MissingConfigException, word: Word) -> UsageError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if (options := OPTIONS.get(group.removeprefix("schema/"))) and group.startswith("schema/"):
        try:
            options.settings(option)  # raises the reason
        except UsageError as reason:
            return reason
    name, value = word.name, word.value
    if error.options is None and value.startswith("["):
        several = value.removeprefix("[").rstrip("]").replace(" ", "")
        return UsageError(
            f"{word.text}: {name} takes one option; to train with each of them: doit sweep {name}={several}"
        )
    if name == "program" and value.endswith(".py"):
        return UsageError(f"{word.text}: a script is no option of program", hint=f"program.script={shell_word(value)}")
    if name == "dataset" and Path(value).exists():
        return UsageError(
            f"{word.text}: a folder or file is no option of dataset; "
            "one with a folder for each class is dataset=folder",
            hint=f"dataset=folder dataset.source={shell_word(value)}",
        )
    place, known = files.place_of_entry(str(error), word.text, group, option) or word.text, error.options or ()
    return UsageError(
        f"{place}: {group or 'config'} has no option {option!r}; {suggestion(option, known)}",
        hint=None if nearest(option, known) else _OTHERS.get(group),
    )


def _refused_key(key: str, failure: _Failure) -> UsageError:
    """Explain a key that is unknown, or is there and can't be changed, replaced or added to in this way."""
    word, config = failure.culprit, failure.try_compose(failure.others)
    if config is None:
        config = failure.try_compose([])
    if config is not None and OmegaConf.select(config, key.partition("@")[0], default=_ABSENT) is not _ABSENT:
        if "@" in key:
            meant = f"{key.partition('@')[0]}={word.value}"
            return UsageError(f"{word.text}: nothing was chosen for {key}, so nothing can be replaced; write {meant}")
        bare = word.text.lstrip("+")
        advice = f"to change it write {bare}" if bare != word.text else f"to add entries write ++{word.text}"
        return UsageError(f"{word.text}: {key} is there but can't be changed this way; {advice}")
    parts = re.split(r"[./]", key.partition("@")[0])
    for depth in range(len(parts) - 1, 1, -1):
        node = OmegaConf.select(config, ".".join(parts[:depth])) if config is not None else None
        if isinstance(node, DictConfig):
            return UsageError(
                f"unknown key {key!r}; {_within('.'.join(parts[:depth]), parts[depth], [*map(str, node)])}"
            )
    value = word.value if "=" in word.text else None
    return unknown_key(key.partition("@")[0], value, OmegaConf.to_container(config) if config is not None else {})


def _within(parent: str, word: str, names: list[str]) -> str:
    """Return ``suggestion`` with the parent's name before the match."""
    close = nearest(word, names)
    start = f"did you mean {parent}.{close}? " if close else ""
    return f"{start}valid in {parent}: {', '.join(sorted(names))}"
