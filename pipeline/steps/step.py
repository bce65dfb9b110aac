"""The definition of a step: read from conf/step/NAME.yaml or dodo.py, with interpolations resolved, and checked.

A command may have placeholders: {out} for the folder of the outputs, {inputs} for all input files, {inputs[0]} for the
single file of the first entry of ``inputs``. {{name}} stands for the text {name}.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]  # OmegaConf raises its errors
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.schema import texts
from pipeline.core import redact
from pipeline.core.errors import UsageError, suggestion, text_of
from pipeline.core.files import refuse_odd_pattern
from pipeline.steps import REGISTERED
from trainers.core.config import ConfigError
from trainers.script.settings import words

Say = Callable[[str], None]

PREFIX = "step:"
"""Prefix of a step used as a source: ``step:clean`` or ``step:clean/images.npz``."""
FIELDS = ("command", "function", "args", "inputs", "outputs", "env")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SHELL_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*")
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)(?:\[(?P<index>\d+)\])?\}")


class StepError(UsageError):
    """A step is invalid."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step with every interpolation resolved. It has either a ``command`` or a ``function``."""

    name: str
    command: tuple[str, ...] | str = ()  # words, or a line for bash
    function: str = ""  # package.module:name
    args: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    env: Mapping[str, str]
    written: Mapping[str, Any]  # the fields before interpolation, with ``${optimizer.lr}``
    parameters: Mapping[str, Any]  # the values that they refer to: ``optimizer.lr`` → 0.1
    secrets: frozenset[str] = frozenset()  # texts that no file may contain

    @property
    def words(self) -> tuple[str, ...]:
        """The command with its arguments and unfilled placeholders; empty for a function or a bash line."""
        return (*self.command, *words(self.args)) if isinstance(self.command, tuple) and self.command else ()

    @property
    def upstream(self) -> tuple[str, ...]:
        """The steps whose outputs this step reads."""
        return tuple(dict.fromkeys(split_source(item)[0] for item in self.inputs if item.startswith(PREFIX)))


def split_source(source: str) -> tuple[str, str]:
    """Split ``step:clean/images.npz`` into the step's name and the path of the output ('': none). Raises StepError."""
    name, _, inside = source.removeprefix(PREFIX).partition("/")
    refuse_name(name)
    if inside:
        _refuse_leading_out(source, inside)
    return name, inside


def refuse_name(name: str, named_in: str | None = None) -> None:
    """Refuse a name that isn't a portable folder name. Raises StepError. ``named_in``: the file that has the name."""
    if not _NAME.fullmatch(name):
        message = f"{name!r} can't be the name of a step: letters, digits, - and _, at most 64, no dot or slash"
        raise StepError(f"{named_in}: {message}", hint="another name") if named_in else StepError(message)


def validate(name: str, fields: Mapping[str, Any], **more: Any) -> Step:
    """Validate the fields and build a Step. ``more`` are fields of Step that no file has. Raises StepError."""
    for field in fields:
        if field not in FIELDS:
            raise StepError(f"step {name}: {field!r} is no field of a step; {suggestion(str(field), FIELDS)}")
    filled = {field: value for field, value in fields.items() if value not in (None, "", [], {})}
    if ("command" in filled) == ("function" in filled):
        fault = "has both a command and a function" if "command" in filled else "has neither a command nor a function"
        raise StepError(f"step {name} {fault}", hint="command: [python, clean.py], or function: my_package.steps:clean")
    step = Step(
        name=name,
        command=_command(name, filled.get("command")),
        function=str(filled.get("function", "")),
        args=_mapping(name, "args", filled.get("args", {})),
        inputs=_texts(name, "inputs", filled.get("inputs", [])),
        outputs=_texts(name, "outputs", filled.get("outputs", [])),
        env={key: str(value) for key, value in _mapping(name, "env", filled.get("env", {})).items()},
        **more,
    )
    _check(step)
    return step


def _check(step: Step) -> None:
    if step.function and not _FUNCTION.fullmatch(step.function):
        raise StepError(
            f"step {step.name}: function: {step.function!r} is not package.module:name",
            hint="a function that stands by its name in a module: no lambda, no partial, none inside of another",
        )
    for item in step.inputs:
        if item.startswith(PREFIX):
            split_source(item)
        elif ".." in PurePosixPath(item).parts:
            message = f"step {step.name}: inputs: {item!r} leads out with .."
            raise StepError(message, hint="a path from the project's folder, or an absolute one")
        elif PurePosixPath(item).parts:  # otherwise it is ".", the project itself
            refuse_odd_pattern(item, f"step {step.name}: inputs: {item!r}")
    if not step.outputs:
        raise StepError(
            f"step {step.name} names no outputs, so nobody could tell whether it was made",
            hint="outputs: [images.npz], files that it writes into its folder {out}",
        )
    for item in step.outputs:
        _refuse_leading_out(f"step {step.name}: outputs: {item}", item)
        refuse_odd_pattern(item, f"step {step.name}: outputs: {item!r}")
    _check_words(step)


def _check_words(step: Step) -> None:
    """Refuse arguments and placeholders that the command can't have, and secrets in it. Raises StepError."""
    # bash gets the arguments as variables of its environment
    if isinstance(step.command, str):
        for name, value in step.args.items():
            if not _SHELL_VARIABLE.fullmatch(name) or not isinstance(value, str | int | float):
                raise StepError(
                    f"step {step.name}: args.{name}={value!r}: of a line for bash each argument is one text or number, "
                    "under a name in small letters, which is a variable there"
                )
            if name == "out":
                raise StepError(f"step {step.name}: args.out: $out is the folder for its outputs", hint="another name")
        if "${" in str(step.written.get("command", "")):
            raise StepError(
                f"step {step.name}: command holds ${{…}}, which would be pasted into a line for bash",
                hint='args: {lr: "${optimizer.lr}"}, and "$lr" in the command; or a list of words',
            )
    try:
        parts = step.words
    except ConfigError as error:
        raise StepError(f"step {step.name}: {str(error).replace('program.args', 'args')}") from error
    for word in parts:
        for match in _PLACEHOLDER.finditer(word):
            _check_placeholder(step, word, match)
    visible = (*parts, *map(str, step.args.values()), *([step.command] if isinstance(step.command, str) else []))
    for text in visible:
        if any(secret in text for secret in step.secrets):
            raise StepError(
                f"step {step.name} has a secret in its command or args, which a list of processes shows",
                hint="env: {API_TOKEN: '${oc.env:API_TOKEN}'}, which the step reads from its environment",
            )


def _check_placeholder(step: Step, word: str, match: re.Match[str]) -> None:
    name, index = match["name"], match["index"]
    if not name or (name == "out" and index is None):  # no name: a literal {{…}}
        return
    if name != "inputs":
        raise StepError(
            f"step {step.name}: {word}: {match[0]} is no placeholder; there are {{out}}, {{inputs}} and {{inputs[0]}}, "
            f"and {{{{{name}}}}} is {{{name}}} as it stands"
        )
    if index is None and word != "{inputs}":
        raise StepError(f"step {step.name}: {word}: {{inputs}} is a word of its own; {{inputs[0]}} is one file")
    if index is not None and int(index) >= len(step.inputs):
        raise StepError(f"step {step.name}: {word}: there are {len(step.inputs)} inputs, counted from 0")


def fill_placeholders(step: Step, out: str, inputs: Sequence[Sequence[str]]) -> list[str]:
    """Return the words with ``out`` and the files of each entry of ``step.inputs`` filled in. Raises StepError."""
    filled: list[str] = []
    for word in step.words:
        if word == "{inputs}":
            filled += [path for paths in inputs for path in paths]
        else:
            filled.append(_PLACEHOLDER.sub(lambda match: _value(step, match, out, inputs), word))
    return filled


def _value(step: Step, match: re.Match[str], out: str, inputs: Sequence[Sequence[str]]) -> str:
    if not match["name"]:
        return f"{{{match['literal']}}}"
    if match["name"] == "out":
        return out
    files = inputs[int(match["index"])]
    if len(files) != 1:
        what = f"{match[0]} stands for {len(files)} files"
        raise StepError(f"step {step.name}: {what}; {{inputs}} stands for all of them")
    return files[0]


def _command(name: str, value: Any) -> tuple[str, ...] | str:
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(word, str | int | float) for word in value):
        raise StepError(f"step {name}: command={value!r} is neither a list of words nor a line for bash")
    return tuple(str(word) for word in value)


def _texts(name: str, field: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item and item.isprintable() for item in items):
        raise StepError(f"step {name}: {field}={value!r} is no list of names; write {field}: [a.csv, b.csv]")
    return tuple(items)


def _mapping(name: str, field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise StepError(f"step {name}: {field}={value!r} is no mapping; write {field}: {{name: value}}")
    return {str(key): item for key, item in value.items()}


def _refuse_leading_out(shown: str, path: str) -> None:
    parts = PurePosixPath(path).parts
    if path.startswith(("/", "~")) or ".." in parts or not parts or not path.isprintable():
        raise StepError(f"{shown!r} leads out of the step's folder; write it relative, without ..")


FOLDER = "conf/step"
SECTION = "step"
"""Section of the configuration with overrides: step.clean.args.rate=0.3 replaces the value in conf/step/clean.yaml."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def names(root: Path) -> list[str]:
    """Return all steps, sorted, including those that can't be loaded. Raises StepError: a step is declared twice."""
    files = sorted(path.stem for path in (root / FOLDER).glob("*.yaml"))
    for name in files:
        if name in REGISTERED:
            raise StepError(f"step {name} is declared twice: in {FOLDER}/{name}.yaml and in dodo.py; keep one of them")
    return sorted([*files, *REGISTERED])


def load(name: str, composed: Mapping[str, Any], root: Path) -> Step:
    """Load one step and resolve its interpolations against the composed configuration. Raises StepError, UsageError."""
    overrides_by_step = composed.get(SECTION) or {}
    for overridden in overrides_by_step:
        _refuse_unknown(str(overridden), root)
    _refuse_unknown(name, root)
    refuse_name(name, named_in=_declared_in(name))
    written = _written(name, overrides_by_step.get(name) or {}, root)
    references = [ref for text in texts(written) for ref in _REFERENCE.findall(text)]
    whole = OmegaConf.create({**composed, SECTION: {name: written}})
    assert isinstance(whole, DictConfig)
    try:
        fields = OmegaConf.to_container(whole[SECTION][name], resolve=True, throw_on_missing=True)
        parameters = {ref: _plain(OmegaConf.select(whole, ref)) for ref in references}
    except OmegaConfBaseException as error:
        from pipeline.config.composition_errors import explain_interpolation  # late import: it needs Hydra

        raise StepError(f"step {name}: {explain_interpolation(error, whole).what}") from error
    assert isinstance(fields, dict)
    return validate(
        name,
        {str(field): value for field, value in fields.items()},
        written=written,
        parameters=parameters,
        secrets=_secrets(written, fields, composed),
    )


def _refuse_unknown(name: str, root: Path) -> None:
    known = names(root)
    if name not in known:
        refuse_name(name)
        raise StepError(f"there is no step {name!r}; {suggestion(name, known)} (it would be {FOLDER}/{name}.yaml)")


def _declared_in(name: str) -> str:
    return "dodo.py" if name in REGISTERED else f"{FOLDER}/{name}.yaml"


def _written(name: str, changes: Any, root: Path) -> dict[str, Any]:
    """Return the fields before interpolation, merged with the command line's overrides. Raises StepError."""
    try:
        file = root / FOLDER / f"{name}.yaml"
        declared = OmegaConf.create(dict(REGISTERED[name])) if name in REGISTERED else OmegaConf.load(file)
        written = OmegaConf.to_container(OmegaConf.merge(declared, OmegaConf.create(changes)), resolve=False)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise StepError(f"step {name}: {_declared_in(name)} can't be read: {text_of(error)}") from error
    if not isinstance(written, dict):
        hint = "command: [python, clean.py] and outputs: [a.npz]"
        raise StepError(f"step {name}: {_declared_in(name)} holds no fields", hint=hint)
    return {str(field): value for field, value in written.items()}


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _secrets(written: Mapping[str, Any], fields: Mapping[Any, Any], composed: Mapping[str, Any]) -> frozenset[str]:
    """Return the secrets of a step: texts that its key, folder and log may not contain."""
    of_variables = {name: os.environ[name] for name in redact.referenced_secrets(written) if os.environ.get(name)}
    env = fields.get("env")
    env_items = env.items() if isinstance(env, Mapping) else ()  # another type is refused later
    of_env = {str(name): str(value) for name, value in env_items if redact.is_secret_name(str(name))}
    pairs = [*of_variables.items(), *of_env.items()]
    values = {text for name, text in pairs if redact.needs_masking(name, text)}
    # logins in addresses and the like, which are secret whatever their names are
    by_form = {part for text in texts(fields) for part in redact.secrets_by_form(text)}
    return frozenset(values | by_form | redact.secret_values(composed))
