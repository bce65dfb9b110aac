"""The settings of a user's own script (``program=script``) and the functions on its arguments: placeholders such as
{data}, and groups of words. Standard library only, because both halves read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.core.errors import KEYED_UNLESS_DEFAULT, ConfigError, at_least, choice

PLACEHOLDERS = ("data", "run", "checkpoints", "resume", "seed")
"""Names of placeholders in args and env; filled on the host, so their values are no part of the key."""
_OF_TORCHRUN = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PACELINE)_.*"
)
_MARK = re.compile(r"\{\{(?P<literal>\w*)\}\}|\{(?P<name>resume:[^{}]+|[A-Za-z_]\w*)\}")


def regex_error(text: str) -> str:
    """Return why a text is no regular expression, where it fails, and how to fix it; '' if it is one."""
    try:
        re.compile(text)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1}"
        return (
            f"{text!r} is no regular expression: {error.msg}{where}; close what is open, and write a backslash before "
            "( [ * + ? . where the sign itself is meant"
        )
    return ""


@dataclass(kw_only=True)
class ProgramConfig:
    """What torchrun starts on every host: the classifier of this project, or a script of your own."""

    name: str = "classifier"


@dataclass(kw_only=True)
class ScriptConfig(ProgramConfig):
    """A training script, or any other program, that runs under torchrun as it is.

    Placeholders in args and env are filled on the host: {data}, {run} (a folder for what it writes), {checkpoints},
    {resume} (the newest complete checkpoint; without one, the argument is left out), {resume:GLOB}, {seed}. {{x}}
    stands for {x}.

    Attributes:
        script: the Python file, relative to the folder where the command is typed, or to the project.
        module: instead of script, a Python module that is run as python -m runs it.
        command: instead of script, a program that isn't Python, with the words that precede args.
        args: a mapping or a list. An entry of a mapping becomes --name value (a name of one letter: -n value; true:
            --name alone; a list: --name a b; false or null: nothing), and an entry _1, _2, … the value alone. A list
            is taken word for word, without its nulls.
        workdir: the folder in the snapshot in which it is started; empty: the snapshot's top.
        inputs: globs of the files that it reads, relative to the project or to the script's folder.
        outputs: globs of files that it must leave, relative to workdir or {run}.
        env: variables of its environment.
        metrics_pattern: a regular expression, searched for in each line of rank 0. Its named groups are metrics, except
            the group step, which counts steps.
        metrics: auto: if the script ended well and reported no metric in another way, those in its printed lines are
            recorded (docs/own-scripts.md); off: they are not.
        ignore_metrics: names (globs) of metrics that doit reproduce doesn't compare, besides times and rates.
        resume_pattern: a glob in {checkpoints} or the working directory, whose newest match {resume} stands for; null:
            the layouts of docs/own-scripts.md are recognised. If nothing matches (as for none), the script starts over.
        outputs_limit: how many GiB of other files in its working directory are kept from each host; null: none.
        seal: what becomes of a run that read a file which its key lacks: fail, warn (it never counts as finished), off.
        data: a file or folder that is sent to the hosts; {data} is its path there. A list: {data}, {data2}, …
        untracked: files and folders in arguments that lie on every host already: they don't count and aren't sent.
        torchrun: false: one process without torchrun, for a script that takes RANK for a sign of several GPUs.
    """

    name: str = "script"
    script: str | None = None
    module: str | None = field(default=None, metadata=KEYED_UNLESS_DEFAULT)
    command: list[str] = field(default_factory=list)
    args: Any = None
    workdir: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    metrics_pattern: str | None = None
    metrics: str = field(default="auto", metadata=KEYED_UNLESS_DEFAULT)
    ignore_metrics: list[str] = field(default_factory=list, metadata=KEYED_UNLESS_DEFAULT)
    resume_pattern: str | None = None
    outputs_limit: float | None = 1.0
    seal: str = "warn"
    data: Any = None
    untracked: list[str] = field(default_factory=list, metadata=KEYED_UNLESS_DEFAULT)
    torchrun: bool = field(default=True, metadata=KEYED_UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        choice("program.seal", self.seal, ("fail", "warn", "off"))
        choice("program.metrics", self.metrics, ("auto", "off"))
        if bool(self.script or self.module) == bool(self.command):
            python = "program.module" if self.module else "program.script"
            both = f"both {python} and program.command are set" if self.command else "nothing says what to run"
            raise ConfigError(f"{both}; take program.script=train.py, or program.command=[./train] for no Python")
        at_least("program.outputs_limit", self.outputs_limit or 0, 0)
        for name, value in self.env.items():
            _check_variable(name, value)
        _check_glob("program.resume_pattern", self.resume_pattern)
        for where, text in self.texts():
            for name in names(text):
                _check_glob(where, name.partition(":")[2] or None)  # of {resume:GLOB}
                data_number = _number_of_data(name)
                if name not in PLACEHOLDERS and data_number is None and not is_resume(name):
                    placeholders = ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS)
                    raise ConfigError(
                        f"{where}={text}: {{{name}}} is no placeholder; there are {placeholders}, and "
                        f"{{{{{name}}}}} is {{{name}}} as it stands"
                    )
                if data_number is not None and data_number >= len(data_paths(self.data)):
                    raise ConfigError(
                        f"{where}={text}: {{{name}}} is named and there is none; set program.data=<a file or folder>"
                    )
        for name in self.args if isinstance(self.args, Mapping) else ():
            if any(map(str.isspace, str(name))):
                raise ConfigError(f"program.args: {str(name)!r} is no name of an argument: it has a space in it")
        if self.metrics_pattern is not None:
            if why := regex_error(self.metrics_pattern):
                raise ConfigError(f"program.metrics_pattern: {why}")
            if not set(re.compile(self.metrics_pattern).groupindex) - {"step"}:
                raise ConfigError("program.metrics_pattern names no metric: write loss=(?P<loss>[-+.eE0-9]+)")

    @property
    def resumes(self) -> bool:
        """True if an argument names the checkpoint to continue from."""
        return bool(self.resume_names)

    @property
    def outputs_limit_bytes(self) -> int | None:
        return None if self.outputs_limit is None else int(self.outputs_limit * (1 << 30))

    @property
    def names_checkpoints(self) -> bool:
        """True if an argument names the folder of checkpoints; then the script saves nowhere else."""
        return any("checkpoints" in names(text) for _, text in self.texts())

    @property
    def resume_names(self) -> list[str]:
        """The names of the placeholders for a checkpoint: ``resume``, ``resume:GLOB``."""
        return list(dict.fromkeys(name for _, text in self.texts() for name in names(text) if is_resume(name)))

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield (name of the field, text) for each text that may have placeholders. Raises ConfigError."""
        yield from ((where, word) for where, group in _groups_by_field(self.args) for word in group)
        yield from ((f"program.env.{name}", value) for name, value in self.env.items())


def _check_variable(name: str, value: object) -> None:
    """Raise ConfigError for a variable that isn't text, that torchrun sets, or that would import unkeyed code."""
    if not isinstance(value, str):
        raise ConfigError(f"program.env.{name} must be one text, number or boolean; write a list in quotes")
    if name == "PYTHONPATH":
        raise ConfigError(
            "program.env.PYTHONPATH would bring in modules that the key doesn't hold; take cluster.env.PYTHONPATH, "
            "whose folders are followed, or put them into the script's folder"
        )
    if _OF_TORCHRUN.fullmatch(name):
        raise ConfigError(f"program.env.{name} is set by what starts the ranks; choose another name")


def data_paths(data: Any) -> list[str]:
    """Return ``program.data`` as a list of paths. Raises ConfigError: it is neither a path nor a list of them."""
    paths = data if isinstance(data, list | tuple) else [data] if data else []
    if not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(f"program.data={data!r} is no path and no list of paths")
    return [*paths]


def placeholder_of_data(number: int) -> str:
    """Return the placeholder of a path of ``program.data``, counted from 0: {data}, {data2}, {data3}, …"""
    return f"{{data{number + 1}}}" if number else "{data}"


def _number_of_data(name: str) -> int | None:
    """Return the index of the path of ``program.data`` that a placeholder names; None for other placeholders."""
    match = re.fullmatch(r"data([1-9]\d*)?", name)
    return None if match is None or match[1] == "1" else int(match[1] or 1) - 1


def _check_glob(where: str, pattern: str | None) -> None:
    """Raise ConfigError for a pattern that pathlib refuses, or that leads out of its folder."""
    parts = (pattern or "none").split("/")
    if pattern == "" or parts[0] == "" or ".." in parts or any("**" in part and part != "**" for part in parts):
        raise ConfigError(
            f"{where}: {pattern!r} is no pattern of names in a folder; write it relative, without .., and ** alone "
            "between slashes: **/last.pth.tar"
        )


def is_resume(name: str) -> bool:
    return name == "resume" or name.startswith("resume:")


def names(text: str) -> list[str]:
    return [match["name"] for match in _MARK.finditer(text) if match["name"]]


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with placeholders replaced by ``values``, and {{x}} by {x}. Raises KeyError: one has no value."""
    return _MARK.sub(lambda match: values[match["name"]] if match["name"] else f"{{{match['literal']}}}", text)


def escaped(text: str, kept: Callable[[str], bool]) -> str:
    """Return the text of which ``filled`` makes ``text``; ``kept`` placeholders stay, but not a shell's ``${seed}``."""

    def doubled(match: re.Match[str]) -> str:
        is_placeholder = match["name"] and kept(match["name"]) and text[match.start() - 1 : match.start()] != "$"
        return match[0] if is_placeholder else f"{{{match[0]}}}"

    return _MARK.sub(doubled, text)


def words(args: Any) -> list[str]:
    """Return ``program.args`` as words of a command line, with placeholders. Raises ConfigError."""
    return [word for group in groups(args) for word in group]


def groups(args: Any) -> list[list[str]]:
    """Return these words in groups, one for each argument: [--name, value]. Raises ConfigError."""
    return [group for _, group in _groups_by_field(args)]


def _groups_by_field(args: Any) -> list[tuple[str, list[str]]]:
    """Return (name of the field, such as ``program.args.lr``; its group of words). Raises ConfigError."""
    if args is None:
        return []
    if isinstance(args, list):
        fields = [(f"program.args[{at}]", value) for at, value in enumerate(args) if value is not None]
        return [(name, [_word(name, value)]) for name, value in fields]
    if not isinstance(args, Mapping):
        raise ConfigError(
            f"program.args={args!r} is neither a mapping nor a list; write program.args.lr=0.1, or "
            "program.args=[--lr,0.1]"
        )
    present = {str(name): value for name, value in args.items() if value is not None and value is not False}
    return [(f"program.args.{name}", _option(name, f"program.args.{name}", value)) for name, value in present.items()]


def is_bare(name: str) -> bool:
    """Return True for a name in ``program.args`` (``_1``) that stands for a value without an option in front of it."""
    return re.fullmatch(r"_\d+", name) is not None


def _option(name: str, field_: str, value: Any) -> list[str]:
    if is_bare(name):
        return [_word(field_, value)]
    flag = f"-{name}" if len(name) == 1 else f"--{name}"
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *(_word(field_, item) for item in value)]
    return [flag, _word(field_, value)]


def _word(field_: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{field_}={value!r} is no single value; an argument is a text or a number")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{field_} holds a NUL, which no argument can")
    return str(value)
