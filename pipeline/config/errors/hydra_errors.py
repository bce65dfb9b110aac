"""Turn errors of Hydra and OmegaConf into one line: field, value, nearest match, valid options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config.errors import config_files
from pipeline.config.errors.failure import CompositionFailure, TryCompose, Word
from pipeline.config.errors.unknown_key import field_names, not_of_a_host, unknown_key, within
from pipeline.config.schema import OPTIONS
from pipeline.core.errors import UsageError, first_line, nearest, suggestion
from pipeline.core.printable import printable, shell_line, shell_word
from trainers.script.settings import not_a_pattern

_ABSENT = object()
_UNKNOWN = (
    re.compile(r"Could not override '([^']+)'"),
    re.compile(r"Could not delete from config\. '([^']+)' does not exist"),
    re.compile(r"config group '([^']+)' does not exist"),
    re.compile(r"An item is already at '([^']+)'"),
)
_IN_A_HOST = re.compile(rf"Key '([^']+)' not in '{HostConfig.__name__}'\s+full_key: \1\s")
_NO_TEXT = re.compile(r"Cannot convert '(list|dict)' to string")
_A_LIST = "Cannot merge DictConfig with ListConfig"
_NO_FIELD = re.compile(r"Interpolation key '([^']+)' not found")
_BLANK = re.compile(r"\s")
_WITHOUT_OPTION = {  # group → how to choose what has no option of its own
    "dataset": "dataset=folder dataset.source=FOLDER for images in one folder a class, dataset=torchvision "
    "dataset.class=NAME for one of torchvision's, dataset=own for a function of yours",
    "model": "model=torchvision model.arch=NAME for one of torchvision's, model=own model.target=MODULE:CLASS for one "
    "of yours",
}
_RANGE = re.compile(r"(\d+)(?:\.\.\.?|-|:)(\d+)")  # 0..3, as other languages write it
_BEGINS_AN_EXPRESSION = re.compile(r"[\[{]|\w+\(")  # a list, a mapping or a function, which quotes would make a text


def explain(error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> UsageError:
    """Return the error as one line. ``try_compose`` composes other overrides, to find the one at fault."""
    if isinstance(error, UsageError):  # from an option whose settings can't be read
        return error
    failure = CompositionFailure(error, overrides, try_compose)
    return config_files.explain_file(failure) or _explain_syntax(failure) or _explain_value(failure)


def explain_interpolation(error: OmegaConfBaseException, config: DictConfig) -> UsageError:
    """Explain a value of ``config`` that refers to a missing field."""
    if match := _NO_FIELD.search(str(error)):
        container = OmegaConf.to_container(config)
        assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
        close = nearest(match[1], field_names(container))
        hint = f"did you mean ${{{close}}}?" if close else "doit config shows all fields"
        return UsageError(f"{error.full_key}: ${{{match[1]}}} names no field; {hint}")
    return UsageError(f"{error.full_key or 'configuration'}: {first_line(error)}")


def no_value(field: str) -> UsageError:
    """Return the error for a field without a value."""
    if config_files.is_of_hosts(field):
        return UsageError(f"{field} is missing: every host has a name; {config_files.HOSTS_ARE}")
    return UsageError(f"{field} is missing: it was deleted or set to ???; choose an option with {field}=…")


# ------------------------------------------------------------------------------ an override that can't be parsed
def _explain_syntax(failure: CompositionFailure) -> UsageError | None:
    word = failure.culprit
    if not word.name and "=" in word.text:
        return UsageError(f"{word.text}: the name of a field is missing before the =; write NAME{word.text}")
    unparsed = next((cause for cause in failure.causes if isinstance(cause, OverrideParseException)), None)
    return None if unparsed is None else _not_an_override(Word.of(str(unparsed.override).removeprefix("++")))


def _not_an_override(word: Word) -> UsageError:
    """Explain a word without the ``++`` that ``for_hydra`` added."""
    text, key, value = printable(word.text), word.key, word.value
    if _BLANK.search(key):
        return UsageError(f"{text} can't be read: write key=value, and a key has no blanks")
    if not all(parts := key.split(".")):
        full_key = ".".join(part or "NAME" for part in parts)
        return UsageError(f"{text} can't be read: a name is missing beside a dot; write {full_key}={printable(value)}")
    if word.name == "program.metrics_pattern" and (fault := not_a_pattern(value)):
        return UsageError(f"{key}: {fault}")
    if not value:
        why = ": write key=value"
    elif value.startswith("="):
        once = printable(f"{key}={value.lstrip('=')}")
        why = f": = stands twice; write {once}, or for a text that begins with =: {word.quoted}"
    elif value.startswith("~"):  # Hydra's mark of a deletion
        why = f": a value that begins with ~ needs quotes: {word.quoted}"
    elif _BEGINS_AN_EXPRESSION.match(value):
        why = (
            " as a list [a,b], a mapping {a: 1} or a function range(1,3), whose texts with blanks or signs are in "
            f"quotes; if all of it is a text, it needs quotes: {word.quoted}"
        )
    else:
        why = f": a text with blanks or signs needs quotes of its own, inside the shell's quotes: {word.quoted}"
    return UsageError(f"{text} can't be read{why}")


# ------------------------------------------------------------------------------ an option, key or value
def _explain_value(failure: CompositionFailure) -> UsageError:
    """Explain an option, a key or a value that is not accepted."""
    word, text = failure.culprit, failure.text
    for cause in failure.causes:
        if isinstance(cause, MissingConfigException):
            return _missing_option(cause, failure)
    if word.mark.startswith("~") and "does not support deletion" in text:
        return UsageError(
            f"{word.text}: {word.name} always has a value and can't be deleted; write {word.name}=VALUE instead"
        )
    if of_hosts := _no_hosts(failure):
        return of_hosts
    if match := _NO_TEXT.search(text):
        kind = "list" if match[1] == "list" else "mapping"
        quoted = word._replace(mark=word.mark.removeprefix("++")).quoted
        return UsageError(
            f"{word.text} must be one text, and this is a {kind}; if all of it is a text, it needs quotes: {quoted}"
        )
    if "Ambiguous value" in text or "requires --multirun" in text:
        as_list = shell_word(f"{word.key}=[{word.value}]")
        return UsageError(
            f"{word.text}: several values are a sweep, and this command takes one; "
            f"write {as_list} for a list, {word.quoted} for a text with a comma, "
            f"or train them all: {shell_line(['doit', 'sweep', *failure.overrides])}"
        )
    if "Multiple values for " in text and word.mark.startswith("+"):
        return UsageError(f"{word.text}: {word.name} is chosen already", hint=shell_word(word.text.lstrip("+")))
    for pattern in _UNKNOWN:
        if match := pattern.search(text):
            return _refused_key(match[1], failure)
    if place := config_files.place_of_file(failure):
        reason = "a list stands where fields are wanted" if _A_LIST in text else failure.reason
        return UsageError(f"{place}: {reason}")
    return UsageError(f"{word.text}: {_right_form(word, text) or failure.reason}")


def _no_hosts(failure: CompositionFailure) -> UsageError | None:
    """Explain a value of the wrong form for a list of hosts, or for one of them."""
    word = failure.culprit
    if match := _IN_A_HOST.search(failure.text):
        in_entry = f"{word.text}, in an entry of cluster.hosts or cluster.spares"
        return not_of_a_host(match[1], word.name if word.name.startswith("cluster.") else in_entry)
    if config_files.NO_HOSTS.search(failure.text) and (
        config_files.is_of_hosts(word.name) or HostConfig.__name__ in failure.text
    ):
        return UsageError(f"{word.text}: that is no list of hosts; {config_files.HOSTS_ARE}")
    return None


def _right_form(word: Word, text: str) -> str:
    """Suggest another form of a refused value, or return ''. ``text``: of the error."""
    key, value = word.key, word.value
    if word.name == "step":
        return (
            "step.NAME.FIELD=… sets a field of a step of yours; doit profile takes steps=N, "
            "doit why and doit logs take step=NAME"
        )
    if match := _RANGE.fullmatch(value):
        return f"the trials of a sweep are written {key}='range({match[1]},{int(match[2]) + 1})'"
    if value.startswith("[") and "of type 'list'" in text:
        return f"one value is wanted; the trials of a sweep are written {key}={value[1:-1].replace(' ', '')}"
    if _A_LIST in text or "to Dict[" in text:
        return f"it has fields of its own; write {key}.NAME=VALUE"
    if value and "is not a ListConfig, list or" in text:
        return f"a list is wanted there; write '{key}=[{value}]'"
    return ""


def _missing_option(error: MissingConfigException, failure: CompositionFailure) -> UsageError:
    """Explain an option that its group lacks. ``error``: Hydra's, one of the causes."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
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
    place, valid = config_files.place_of_entry(failure, group, option) or word.text, error.options or ()
    return UsageError(
        f"{place}: {group or 'config'} has no option {option!r}; {suggestion(option, valid)}",
        hint=None if nearest(option, valid) else _WITHOUT_OPTION.get(group),
    )


def _refused_key(key: str, failure: CompositionFailure) -> UsageError:
    """Explain a key that is unknown, or exists and can't be changed, replaced or added to in this way."""
    word, config = failure.culprit, failure.try_compose(failure.others)
    config = failure.try_compose([]) if config is None else config
    bare_key, has_package, _ = key.partition("@")
    if config is not None and OmegaConf.select(config, bare_key, default=_ABSENT) is not _ABSENT:
        if has_package:
            return UsageError(
                f"{word.text}: nothing was chosen for {key}, so nothing can be replaced; write {bare_key}={word.value}"
            )
        bare_word = word.text.lstrip("+")
        advice = f"to change it write {bare_word}" if bare_word != word.text else f"to add entries write ++{word.text}"
        return UsageError(f"{word.text}: {key} is there but can't be changed this way; {advice}")
    parts = re.split(r"[./]", bare_key)
    for depth in range(len(parts) - 1, 1, -1):
        parent = ".".join(parts[:depth])
        node = OmegaConf.select(config, parent) if config is not None else None
        if isinstance(node, DictConfig):
            return UsageError(f"unknown key {key!r}; {within(parent, parts[depth], [*map(str, node)])}")
    value = word.value if "=" in word.text else None
    return unknown_key(bare_key, value, OmegaConf.to_container(config) if config is not None else {})
