"""Turn errors of Hydra and OmegaConf into one line: field, value, nearest match, valid options."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from pipeline.config.program_section import refuse_unseen_seed
from pipeline.config.schema import OPTIONS, PROGRAMS
from pipeline.config.step_source import named_step
from pipeline.core.errors import UsageError, first_line, nearest, suggestion
from pipeline.core.places import ROOT, shown
from pipeline.core.printable import printable, shell_line, shell_word
from pipeline.core.program import SCRIPT, SECTION
from trainers.script.settings import not_a_pattern

_ABSENT = object()
Composer = Callable[[Sequence[str]], DictConfig | None]

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


def explain(error: Exception, overrides: list[str], composed: Composer) -> UsageError:
    """Return the error as one line. ``composed`` composes other overrides, to find the culprit: the one at fault."""
    if isinstance(error, UsageError):  # from an option whose settings can't be read
        return error
    composed = _once(composed)
    for cause in _chain(error):
        if isinstance(cause, MarkedYAMLError):
            return _not_yaml(cause)
        if isinstance(cause, ReaderError):
            return UsageError(f"{shown(Path(cause.name), ROOT)}: {first_line(cause)}")
        if isinstance(cause, UnicodeDecodeError):
            return _not_text(cause)
    text = " ".join(str(cause) for cause in _chain(error))
    culprit = _word_of_field(text, overrides) or _culprit(overrides, composed)
    if culprit.lstrip("+~").startswith("="):
        return UsageError(f"{culprit}: the name of a field is missing before the =; write NAME{culprit}")
    of_entry = files.entry_error(text, culprit, group_names())
    if of_file := of_entry or _wrong_field_of_file(text, culprit, error, composed):
        return of_file
    for cause in _chain(error):
        if isinstance(cause, OverrideParseException):
            return _not_an_override(cause)
        if isinstance(cause, MissingConfigException):
            return _missing_option(cause, culprit)
    if culprit.startswith("~") and any("does not support deletion" in str(cause) for cause in _chain(error)):
        key = culprit.lstrip("~").partition("=")[0]
        return UsageError(f"{culprit}: {key} always has a value and can't be deleted; write {key}=VALUE instead")
    if match := _IN_A_HOST.search(text):
        field = culprit.partition("=")[0].lstrip("+")
        in_entry = f"{culprit}, in an entry of cluster.hosts or cluster.spares"
        return not_of_a_host(match[1], field if field.startswith("cluster.") else in_entry)
    if _NO_HOSTS.search(text) and (_is_of_hosts(culprit) or HostConfig.__name__ in text):
        return UsageError(f"{culprit}: that is no list of hosts; {_HOSTS_ARE}")
    if match := _NO_TEXT.search(text):
        kind = "list" if match[1] == "list" else "mapping"
        quoted = _in_quotes(culprit.removeprefix("++"))
        return UsageError(
            f"{culprit} must be one text, and this is a {kind}; if all of it is a text, it needs quotes: {quoted}"
        )
    if "Ambiguous value" in text or "requires --multirun" in text:
        if unseen := _unseen_seed(culprit, [item for item in overrides if item != culprit], composed):
            return unseen
        as_list = shell_word("{}=[{}]".format(*culprit.partition("=")[::2]))
        return UsageError(
            f"{culprit}: several values are a sweep, and this command takes one; "
            f"write {as_list} for a list, {_in_quotes(culprit)} for a text with a comma, "
            f"or train them all: {shell_line(['doit', 'sweep', *overrides])}"
        )
    if "Multiple values for " in text and culprit.startswith("+"):
        return UsageError(f"{culprit}: {culprit[1:].partition('=')[0]} is chosen already", hint=shell_word(culprit[1:]))
    for pattern in _UNKNOWN:
        if match := pattern.search(text):
            return _unknown_key(match.group(1), culprit, [item for item in overrides if item != culprit], composed)
    if place := files.place_of_file(text, culprit):
        return UsageError(f"{place}: {'a list stands where fields are wanted' if _A_LIST in text else _reason(error)}")
    return UsageError(f"{culprit}: {_other_form(culprit, text) or _reason(error)}")


def _wrong_field_of_file(text: str, culprit: str, error: Exception, composed: Composer) -> UsageError | None:
    """Explain an unknown field of a file, or a wrong value of one; None if the error isn't about a file."""
    field_of_file = files.field_error(text, culprit)
    if field_of_file is None:
        return None
    place, field, settings = field_of_file
    if not settings:
        no_hosts = _is_of_hosts(field) and _NO_HOSTS.search(text)
        reason = f"that is no list of hosts; {_HOSTS_ARE}" if no_hosts else files.value_reason(error)
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
        config = composed([])
    known = OmegaConf.to_container(config) if config is not None else {}
    return UsageError(f"{place}: {unknown_key(field, None, known)}")


def _other_form(culprit: str, text: str) -> str:
    """Suggest another form of the value, or return ''."""
    key, _, value = culprit.partition("=")
    if key.lstrip("+") == "step":
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
    return (
        f"a list is wanted there; write '{key}=[{value}]'" if value and "is not a ListConfig, list or" in text else ""
    )


def _is_of_hosts(culprit: str) -> bool:
    return culprit.lstrip("+").startswith(("cluster.hosts", "cluster.spares"))


def _not_an_override(error: OverrideParseException) -> UsageError:
    typed = str(error.override).removeprefix("++")  # added by for_hydra
    shown = printable(typed)
    key, _, value = typed.partition("=")
    if _BLANK.search(key):
        return UsageError(f"{shown} can't be read: write key=value, and a key has no blanks")
    if not all(parts := key.split(".")):
        named = ".".join(part or "NAME" for part in parts)
        return UsageError(f"{shown} can't be read: a name is missing beside a dot; write {named}={printable(value)}")
    quoted = _in_quotes(typed)
    if key.lstrip("+") == "program.metrics_pattern" and (why := not_a_pattern(value)):
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


def _in_quotes(override: str) -> str:
    """Return the override with its value quoted as one text, for a shell."""
    key, _, value = override.partition("=")
    return shell_word(f"{key}={QuotedString(value, Quote.single).with_quotes()}")


def _unseen_seed(culprit: str, others: list[str], composed: Composer) -> UsageError | None:
    """Return the error that a sweep would give for several seeds of a script that sees no seed, or None."""
    config = composed(others) if culprit.startswith("seed=") else None
    if config is None or config.program.name != SCRIPT.name:
        return None
    try:
        resolved = _plain(config, resolve=True)
        if named_step(resolved) is None:
            refuse_unseen_seed([culprit], resolved)
    except OmegaConfBaseException:  # reported once the overrides can be composed
        return None
    except UsageError as error:
        return error
    return None


def _once(compose: Composer) -> Composer:
    """Cache compositions of equal overrides: each one takes 0.1 s."""
    cached = functools.cache(compose)
    return lambda overrides: cached(tuple(overrides))


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
    for path, _ in files.all_files():
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as reason:
            return UsageError(f"{shown(path, ROOT)} is not UTF-8 text (byte {reason.start})")
    return UsageError(f"a configuration file is not UTF-8 text: {error}")


def explain_interpolation(error: OmegaConfBaseException, config: DictConfig) -> UsageError:
    """Explain a value of ``config`` that refers to a missing field."""
    if match := _NO_FIELD.search(str(error)):
        field, written = str(error.full_key), f"${{{match[1]}}}"
        place = files.place_of_value(field, written)
        close = nearest(match[1], field_names(_plain(config)))
        meant = f"did you mean ${{{close}}}?" if close else "doit config shows all fields"
        return UsageError(f"{place and f'{place}: '}{field}: {written} names no field; {meant}")
    return UsageError(f"{error.full_key or 'configuration'}: {first_line(error)}")


def missing(field: str) -> UsageError:
    """Return the error for a field without a value."""
    if _is_of_hosts(field):
        return UsageError(f"{field} is missing: every host has a name; {_HOSTS_ARE}")
    return UsageError(f"{field} is missing: it was deleted or set to ???; choose an option with {field}=…")


def _plain(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(container, dict)  # the root of a Hydra configuration is a mapping
    return {str(name): value for name, value in container.items()}


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
    words = [word for word in overrides if field and word.lstrip("+").partition("=")[0] == field]
    return words[0] if len(words) == 1 else ""


def _culprit(overrides: list[str], composed: Composer) -> str:
    """Return the first override with which composing fails. The last one needs no trial: all together do fail."""
    for index, item in enumerate(overrides[:-1]):
        if composed(overrides[: index + 1]) is None:
            return item
    return overrides[-1] if overrides else "conf/config.yaml"


def _missing_option(error: MissingConfigException, culprit: str) -> UsageError:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if (options := OPTIONS.get(group.removeprefix("schema/"))) and group.startswith("schema/"):
        try:
            options.settings(option)  # raises the reason
        except UsageError as reason:
            return reason
    if error.options is None and "=[" in culprit:
        name = culprit.lstrip("+").partition("=")[0]
        several = culprit.partition("=[")[2].rstrip("]").replace(" ", "")
        return UsageError(
            f"{culprit}: {name} takes one option; to train with each of them: doit sweep {name}={several}"
        )
    name, _, value = culprit.lstrip("+").partition("=")
    if name == "program" and value.endswith(".py"):
        return UsageError(f"{culprit}: a script is no option of program", hint=f"program.script={shell_word(value)}")
    if name == "dataset" and Path(value).exists():
        return UsageError(
            f"{culprit}: a folder or file is no option of dataset; one with a folder for each class is dataset=folder",
            hint=f"dataset=folder dataset.source={shell_word(value)}",
        )
    place, known = files.place_of_entry(str(error), culprit, group, option) or culprit, error.options or ()
    return UsageError(
        f"{place}: {group or 'config'} has no option {option!r}; {suggestion(option, known)}",
        hint=None if nearest(option, known) else _OTHERS.get(group),
    )


def _unknown_key(key: str, culprit: str, others: list[str], composed: Composer) -> UsageError:
    config = composed(others)
    if config is None:
        config = composed([])
    if config is not None and OmegaConf.select(config, key.partition("@")[0], default=_ABSENT) is not _ABSENT:
        if "@" in key:
            meant = f"{key.partition('@')[0]}={culprit.partition('=')[2]}"
            return UsageError(f"{culprit}: nothing was chosen for {key}, so nothing can be replaced; write {meant}")
        bare = culprit.lstrip("+")
        advice = f"to change it write {bare}" if bare != culprit else f"to add entries write ++{culprit}"
        return UsageError(f"{culprit}: {key} is there but can't be changed this way; {advice}")
    parts = re.split(r"[./]", key.partition("@")[0])
    for depth in range(len(parts) - 1, 1, -1):
        node = OmegaConf.select(config, ".".join(parts[:depth])) if config is not None else None
        if isinstance(node, DictConfig):
            return UsageError(
                f"unknown key {key!r}; {_within('.'.join(parts[:depth]), parts[depth], [*map(str, node)])}"
            )
    value = culprit.partition("=")[2] if "=" in culprit else None
    return unknown_key(key.partition("@")[0], value, OmegaConf.to_container(config) if config is not None else {})


def _within(parent: str, word: str, names: list[str]) -> str:
    """Return ``suggestion`` with the parent's name before the match."""
    close = nearest(word, names)
    start = f"did you mean {parent}.{close}? " if close else ""
    return f"{start}valid in {parent}: {', '.join(sorted(names))}"
