"""The fields of one step, validated. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pipeline.core.errors import UsageError, suggestion
from pipeline.core.files import refuse_odd_pattern
from trainers.core.config import ConfigError
from trainers.script.settings import words

Say = Callable[[str], None]

PREFIX = "step:"
"""Prefix of a step used as a source: ``step:clean`` or ``step:clean/images.npz``."""
FIELDS = ("command", "function", "args", "inputs", "outputs", "env")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_SHELL_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_MARK = re.compile(r"\{\{(?P<literal>\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)(?:\[(?P<at>\d+)\])?\}")


class StepError(UsageError):
    """A step is invalid."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The content of conf/step/NAME.yaml with every interpolation resolved.

    ``command`` is a list of words or a line for bash; ``function`` is ``package.module:name``. ``written`` are the
    fields before interpolation, ``parameters`` the values of their references (``optimizer.lr`` → 0.1). ``secrets`` are
    texts that no file may contain.
    """

    name: str
    command: tuple[str, ...] | str = ()
    function: str = ""
    args: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    env: Mapping[str, str]
    written: Mapping[str, Any]
    parameters: Mapping[str, Any]
    secrets: frozenset[str] = frozenset()

    @property
    def words(self) -> tuple[str, ...]:
        """The command with its arguments and unfilled placeholders; empty for a function or a bash line."""
        return (*self.command, *words(self.args)) if isinstance(self.command, tuple) and self.command else ()

    @property
    def upstream(self) -> tuple[str, ...]:
        """The steps whose outputs this step reads."""
        return tuple(dict.fromkeys(named(item)[0] for item in self.inputs if item.startswith(PREFIX)))


def named(source: str) -> tuple[str, str]:
    """Split ``step:clean/images.npz`` into (clean, images.npz). Raises StepError: an invalid step name."""
    name, _, inside = source.removeprefix(PREFIX).partition("/")
    refuse_name(name)
    if inside:
        _refuse_leading_out(source, inside)
    return name, inside


def refuse_name(name: str, named_in: str | None = None) -> None:
    """Refuse a name that isn't a portable folder name. Raises StepError. ``named_in``: the file that has the name."""
    if not _NAME.fullmatch(name):
        what = f"{name!r} can't be the name of a step: letters, digits, - and _, at most 64, no dot or slash"
        raise StepError(f"{named_in}: {what}", hint="another name") if named_in else StepError(what)


def checked(name: str, fields: Mapping[str, Any], **more: Any) -> Step:
    """Validate the fields and build a Step. ``more`` are fields of Step that no file has.

    Raises:
        StepError: an unknown field or an invalid value.
    """
    for field in fields:
        if field not in FIELDS:
            raise StepError(f"step {name}: {field!r} is no field of a step; {suggestion(str(field), FIELDS)}")
    given = {field: value for field, value in fields.items() if value not in (None, "", [], {})}
    if ("command" in given) == ("function" in given):
        what = "has both a command and a function" if "command" in given else "has neither a command nor a function"
        raise StepError(f"step {name} {what}", hint="command: [python, clean.py], or function: my_package.steps:clean")
    step = Step(
        name=name,
        command=_command(name, given.get("command")),
        function=_text(name, "function", given.get("function", "")),
        args=_mapping(name, "args", given.get("args", {})),
        inputs=_texts(name, "inputs", given.get("inputs", [])),
        outputs=_texts(name, "outputs", given.get("outputs", [])),
        env={key: str(value) for key, value in _mapping(name, "env", given.get("env", {})).items()},
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
            named(item)
        elif ".." in PurePosixPath(item).parts:
            what = f"step {step.name}: inputs: {item!r} leads out with .."
            raise StepError(what, hint="a path from the project's folder, or an absolute one")
        elif PurePosixPath(item).parts:  # else the project itself
            refuse_odd_pattern(item, f"step {step.name}: inputs: {item!r}")
    if not step.outputs:
        raise StepError(
            f"step {step.name} names no outputs, so nobody could tell whether it was made",
            hint="outputs: [images.npz], files that it writes into its folder {out}",
        )
    _check_outputs(step)
    for variable in step.env:
        if not _VARIABLE.fullmatch(variable):
            raise StepError(f"step {step.name}: env: {variable!r} can't be the name of a variable")
    _check_words(step)


def _check_outputs(step: Step) -> None:
    for item in step.outputs:
        _refuse_leading_out(f"step {step.name}: outputs: {item}", item)
        refuse_odd_pattern(item, f"step {step.name}: outputs: {item!r}")
    paths = [PurePosixPath(item) for item in step.outputs]
    for at, path in enumerate(paths):
        for other in paths[:at]:
            if path.is_relative_to(other) or other.is_relative_to(path):
                raise StepError(f"step {step.name}: outputs {other} and {path} overlap; name each file or folder once")


def _check_words(step: Step) -> None:
    """Refuse unknown placeholders, and secrets that a process list would show. Raises StepError."""
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
        for mark in _MARK.finditer(word):
            _check_mark(step, word, mark)
    texts = (*parts, *map(str, step.args.values()), *([step.command] if isinstance(step.command, str) else []))
    if any("\0" in text for text in (*texts, *step.env.values())):
        raise StepError(f"step {step.name}: its command, args or env hold a NUL, which no program can be told")
    for text in texts:
        if any(secret in text for secret in step.secrets):
            raise StepError(
                f"step {step.name} has a secret in its command or args, which a list of processes shows",
                hint="env: {API_TOKEN: '${oc.env:API_TOKEN}'}, which the step reads from its environment",
            )


def _check_mark(step: Step, word: str, mark: re.Match[str]) -> None:
    name, at = mark["name"], mark["at"]
    if not name or (name == "out" and at is None):
        return
    if name != "inputs":
        raise StepError(
            f"step {step.name}: {word}: {mark[0]} is no placeholder; there are {{out}}, {{inputs}} and {{inputs[0]}}, "
            f"and {{{{{name}}}}} is {{{name}}} as it stands"
        )
    if at is None and word != "{inputs}":
        raise StepError(f"step {step.name}: {word}: {{inputs}} is a word of its own; {{inputs[0]}} is one file")
    if at is not None and int(at) >= len(step.inputs):
        raise StepError(f"step {step.name}: {word}: there are {len(step.inputs)} inputs, counted from 0")


def filled(step: Step, out: str, inputs: Sequence[Sequence[str]]) -> list[str]:
    """Return the words with placeholders filled in.

    Args:
        out: the output folder.
        inputs: the files of each entry of ``step.inputs``.

    Raises:
        StepError: {inputs[N]} stands for several files.
    """
    complete: list[str] = []
    for word in step.words:
        if word == "{inputs}":
            complete += [path for group in inputs for path in group]
        else:
            complete.append(_MARK.sub(lambda mark: _value(step, mark, out, inputs), word))
    return complete


def _value(step: Step, mark: re.Match[str], out: str, inputs: Sequence[Sequence[str]]) -> str:
    if not mark["name"]:
        return f"{{{mark['literal']}}}"
    if mark["name"] == "out":
        return out
    group = inputs[int(mark["at"])]
    if len(group) != 1:
        raise StepError(f"step {step.name}: {mark[0]} stands for {len(group)} files; {{inputs}} stands for all of them")
    return group[0]


def _command(name: str, value: Any) -> tuple[str, ...] | str:
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(word, str | int | float) for word in value):
        raise StepError(f"step {name}: command={value!r} is neither a list of words nor a line for bash")
    return tuple(str(word) for word in value)


def _text(name: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise StepError(f"step {name}: {field}={value!r} is no text")
    return value


def _texts(name: str, field: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item and item.isprintable() for item in items):
        raise StepError(f"step {name}: {field}={value!r} is no list of names; write {field}: [a.csv, b.csv]")
    return tuple(items)


def _mapping(name: str, field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise StepError(f"step {name}: {field}={value!r} is no mapping; write {field}: {{name: value}}")
    return {str(key): item for key, item in value.items()}


def _refuse_leading_out(what: str, path: str) -> None:
    parts = PurePosixPath(path).parts
    if path.startswith(("/", "~")) or ".." in parts or not parts or not path.isprintable():
        raise StepError(f"{what!r} leads out of the step's folder; write it relative, without ..")
