"""A line that starts a script (``ScriptLine``) as overrides, and back.

``overrides_of`` makes overrides of what `torchrun_line.py` has parsed; ``line_of`` is the inverse, for messages and
records.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.program_section import is_written
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_value
from trainers.script.settings import PLACEHOLDERS, escaped, is_bare, is_resume

ARGUMENT = re.compile(r"program\.args\.([\w-]+)=(.*)")
"""An override that sets one argument of a script: its name and its value."""
_INPUTS = "program.inputs=["
_FLAG = re.compile(r"--(?P<long>[A-Za-z_][\w-]+)|-(?P<short>[A-Za-z])")
_RESUME = re.compile(r"\{resume(:[^{}]*)?\}")
_LIKE_HYDRA = re.compile(r"[\w.@/+~]+=")  # an override of a script that uses Hydra itself
_LIKE_A_FLAG = re.compile(r"--?[A-Za-z_]")  # also --z, --lr=0.1, -abc, which can't be names in program.args
_PRINTED_ALIKE = re.compile(r"0|-?[1-9]\d{0,15}|-?(?:0|[1-9]\d{0,8})\.(?:0|\d{0,8}[1-9])")
"""Numbers that Python prints as they were typed. Others, such as 1e-3, are passed on as texts."""
_NUMBER = re.compile(r"[-+]?(?:[\d_]*\.?[\d_]+|[\d_]+\.)(?:[eE][-+]?[\d_]+)?")
_NUMBER_OR_WORD = re.compile(rf"{_NUMBER.pattern}|(?i:true|false|null)")
SWEEP_FORM = "--sweep lr=0.1,0.01"
_ONE_LIST = re.compile(r"\[[^\[\]]*,[^\[\]]*\]|[^\s,(\[{'\"]+(?:\s+[^\s,(\[{'\"]+)+")
"""Values of a sweep that Hydra takes for one: ``[0.1,0.2]``, ``0.1 0.2``."""
_EXPRESSION = re.compile(r"[(\[{'\"]")
_SMALL_BYTES = 1 << 20  # a file in an argument up to this size is copied with the code


@dataclass(frozen=True, kw_only=True)
class ScriptLine:
    """A parsed line of `torchrun` or `run`."""

    script: str  # a file, the dotted name of a module, or a program that is no Python
    args: Sequence[str]  # the words behind the script
    overrides: Sequence[str] = ()  # these three are Paceline's own words before the script
    cluster: str | None = None
    sweep: Sequence[str] = ()  # each NAME=VALUES
    nnodes: str | None = None  # this and the next four are torchrun's options
    nproc_per_node: str | None = None
    max_restarts: int | None = None
    module: bool = False
    no_python: bool = False
    with_torchrun: bool = True  # False for `run`, which starts one process
    not_needed: Mapping[str, Sequence[str]] = field(default_factory=dict)  # reason → ignored options of torchrun

    @property
    def names_cluster(self) -> bool:
        return self.cluster is not None or any(word.startswith("cluster=") for word in self.overrides)


def overrides_of(line: ScriptLine, folder: Path, root: Path, *, splits: bool) -> Iterator[str]:
    """Yield overrides for the cluster, the program, its arguments and trials; then the typed overrides.

    ``splits``: the verb is sweep, so commas in an argument separate the values of trials.
    """
    if line.cluster:
        yield f"cluster={line.cluster}"
    yield from _node_overrides(line)
    yield from _rank_overrides(line)
    if line.max_restarts is not None:
        yield f"cluster.max_restarts={line.max_restarts}"
    if line.no_python:
        yield f"program.command=[{hydra_value(line.script)}]"
    else:
        script = line.script
        if not line.module and script.startswith("/") and Path(script).is_relative_to(root):
            script = os.path.relpath(script, folder)  # a relative path makes ``folder`` the working directory
        yield f"program.{'module' if line.module else 'script'}={hydra_value(script)}"
    if not line.with_torchrun:
        yield "program.torchrun=false"
    arguments = [_argument(word, before, folder) for before, word in zip(["", *line.args], line.args, strict=False)]
    by_name = _arguments_by_name([argument.word for argument in arguments])
    yield from _argument_overrides(by_name, _sweep_values(line), splits=splits)
    # small files among the arguments are copied with the code; typed program.inputs are added to them
    inputs = [Path(os.path.relpath(item.input, root)).as_posix() for item in arguments if item.input is not None]
    typed_inputs = [word for word in line.overrides if word.startswith(_INPUTS) and word.endswith("]")]
    patterns = [*map(hydra_value, inputs), *(word[len(_INPUTS) : -1] for word in typed_inputs)]
    if patterns:
        yield f"{_INPUTS}{','.join(filter(None, patterns))}]"
    yield from (word for word in line.overrides if word not in typed_inputs)


def replacement_notes(line: ScriptLine) -> Iterator[str]:
    """Yield a note for each argument of the script that the values of ``--sweep`` replace."""
    sweeps = _sweep_values(line)
    words_before, words_after = ["", *line.args], [*line.args[1:], "--end"]
    for before, word, following in zip(words_before, line.args, words_after, strict=False):
        option, equals, _ = word.partition("=")
        # the value of an option may look like an assignment: --tag a=b
        if equals and _LIKE_A_FLAG.match(before) and "=" not in before and not word.startswith("-"):
            continue
        name = option.lstrip("-")
        if name in sweeps and (equals or (_LIKE_A_FLAG.match(word) and not _LIKE_A_FLAG.match(following))):
            yield f"--sweep {name}={sweeps[name]} replaces {word if equals else f'{word} {following}'}"


def _sweep_values(line: ScriptLine) -> dict[str, str]:
    """Return name → values, as typed, of each ``--sweep NAME=VALUES``. Raises UsageError."""
    sweeps = dict[str, str]()
    for text in line.sweep:
        name, _, values = text.lstrip("-").partition("=")
        if not (name and values):
            raise UsageError(f"--sweep {text}: a name and its values are missing", hint=SWEEP_FORM)
        if len(line.sweep) == 1 and _ONE_LIST.fullmatch(values):
            several = re.sub(r"[\s,]+", ",", values.strip("[] "))
            raise UsageError(f"--sweep {text} is one value, so nothing varies", hint=f"--sweep {name}={several}")
        sweeps[name] = values
    return sweeps


def _node_overrides(line: ScriptLine) -> Iterator[str]:
    """Yield the number of nodes if it isn't the default. Raises UsageError: ``--nnodes=MIN:MAX``, which is elastic."""
    minimum, _, maximum = (line.nnodes or "").partition(":")
    if maximum not in ("", minimum):
        raise UsageError(
            f"--nnodes={line.nnodes}: the number of nodes is part of a run's key, so it is fixed",
            hint=f"--nnodes={maximum}; cluster.spares=[HOST] replaces a lost one",
        )
    if minimum not in ("", "1") or (minimum and line.names_cluster):
        yield f"cluster.nnodes={minimum}"


def _rank_overrides(line: ScriptLine) -> Iterator[str]:
    """Yield the number of ranks: as typed, else that of the named cluster, else one as torchrun's default."""
    count = line.nproc_per_node
    if count is None:
        yield from () if line.names_cluster else ("cluster.nproc_per_node=1",)
    elif count == "gpu":
        yield from ("cluster.nproc_per_node=auto", "cluster.device=cuda")
    elif count in ("cpu", "xpu"):
        raise UsageError(
            f"--nproc-per-node={count}: the number of ranks is part of a run's key, so it is typed",
            hint=f"--nproc-per-node={os.cpu_count()}",
        )
    elif count == "auto" or re.fullmatch(r"[1-9]\d*", count):
        yield f"cluster.nproc_per_node={count}"
    else:
        raise UsageError(f"--nproc-per-node={count} must be a whole number from 1, gpu or auto")


def _arguments_by_name(args: Sequence[str]) -> dict[str, Any]:
    """Return the arguments as a mapping for ``program.args``: option → its value, list of values or True (a flag).

    A bare word (a positional argument, ``--lr=0.1``, a repeated option) has its number as name: ``_1``. The mapping
    gives the script the same words in the same order.
    """
    mapping: dict[str, Any] = {}
    option, n_bare = "", 0  # the option that the next words may be values of; the number of bare words so far
    for word in args:
        match = _FLAG.fullmatch(word)
        name = (match["long"] or match["short"]) if match is not None else ""
        if name and name not in mapping and not is_bare(name):
            option, mapping[name] = name, []
        elif option and not _LIKE_A_FLAG.match(word) and not (mapping[option] and _RESUME.fullmatch(word)):
            mapping[option].append(word)
            if _RESUME.fullmatch(word):  # it must be the only value: option and value are left out without a checkpoint
                option = ""
        else:
            n_bare += 1
            option, mapping[f"_{n_bare}"] = "", word
    values = {name: value[0] if len(value) == 1 else value for name, value in mapping.items() if not is_bare(name)}
    return {name: True if value == [] else values.get(name, value) for name, value in mapping.items()}


def _argument_overrides(arguments: Mapping[str, Any], sweeps: Mapping[str, str], *, splits: bool) -> Iterator[str]:
    """Yield ``program.args.NAME=VALUE`` for each argument, with the values of a sweep, if any, in place of its own."""
    remaining, previous_word = dict(sweeps), ""
    for name, value in arguments.items():
        flag, previous_word = previous_word, value if is_bare(name) else ""
        is_value = is_bare(name) and flag.startswith("-")  # the value of a bare option, such as --z
        values = remaining.pop(flag.lstrip("-") if is_value else name, None)
        if values is not None and isinstance(value, list):
            raise UsageError(
                f"--sweep {name}={values}: of {shlex.join(value)} behind --{name} not all may be its values",
                hint=f"leave --{name} out, or put the script's other arguments in front of the options",
            )
        option = value.partition("=")[0] if is_bare(name) else ""
        if option != value and (swept := option.lstrip("-")) in remaining:  # --lr=0.1, or Hydra's lr=0.1
            yield f"program.args.{name}={_prefix_values(option, remaining.pop(swept))}"
        elif values is not None or (splits and isinstance(value, str) and "," in value and not is_bare(name)):
            yield f"program.args.{name}={_quote_values(values or value, as_texts=is_bare(name))}"
        elif isinstance(value, list):
            yield f"program.args.{name}=[{','.join(map(_quote_value, value))}]"
        else:
            yield f"program.args.{name}={'true' if value is True else _quote_value(value)}"
    # sweeps of options that are not on the line
    n_bare = sum(map(is_bare, arguments))
    for name, values in remaining.items():
        if "." not in name:
            yield f"program.args.{name}={_quote_values(values)}"
            continue
        # a dotted name is no key of program.args; the form of the other words shows which one the script takes
        words = [str(value) for bare, value in arguments.items() if is_bare(bare)]
        has_options = len(words) < len(arguments) or any(word.startswith("--") for word in words)
        if any(_LIKE_HYDRA.match(word) for word in words) == has_options:
            raise UsageError(
                f"--sweep {name}={values}: whether the script takes {name}=VALUE or --{name} VALUE can't be seen",
                hint=f"type it once behind the script as the script takes it: {name}=… or --{name} …",
            )
        if has_options:
            n_bare += 1
            yield f"program.args._{n_bare}='--{name}'"
        n_bare += 1
        argument = _quote_values(values, as_texts=True) if has_options else _prefix_values(name, values)
        yield f"program.args._{n_bare}={argument}"


def _prefix_values(option: str, values: str) -> str:
    """Return ``lr=0.1,lr=0.01`` for the option ``lr`` and the values ``0.1,0.01``."""
    if _EXPRESSION.search(values):
        raise UsageError(f"--sweep {option}={values}: of this option the values are written one by one: {option}=0,1,2")
    return ",".join(_quote_value(f"{option}={value}") for value in values.split(","))


def _quote_values(values: str, *, as_texts: bool = False) -> str:
    """Quote the values of a sweep so that the script gets numbers as they were typed: 1e-3 and not 0.001.

    ``as_texts``: also quote true, false and null, which otherwise say whether a flag is passed.
    """
    if _EXPRESSION.search(values):  # range(3), or values in quotes
        return values
    is_text = _NUMBER_OR_WORD if as_texts else _NUMBER
    return ",".join(_quote_value(text) if is_text.fullmatch(text) else text for text in values.split(","))


def _quote_value(text: str) -> str:
    return text if _PRINTED_ALIKE.fullmatch(text) else hydra_value(text)


class _Argument(NamedTuple):
    word: str  # as it is passed to the script
    input: Path | None = None  # a small file that is copied with the code


def _argument(word: str, before: str, folder: Path) -> _Argument:
    """Return an argument of a script; ``before`` is the preceding word.

    An existing path becomes absolute, which makes it data of the run; a small file in the folder becomes an input.
    """
    option, equals, name = word.rpartition("=")
    flag = option if equals else before if before.startswith("-") else ""
    path = folder / name
    if not name or name.startswith(("/", "~", "-")) or not os.path.exists(path):  # noqa: PTH110  (no error for a long text)
        return _Argument(_escape_braces(word))
    # `train.py resnet`, and a folder of code that is called resnet; an output, or a folder with the project, is no data
    may_be_subcommand = not flag and "/" not in name and path.is_dir() and any(path.glob("*.py"))
    if may_be_subcommand or is_written(flag) or folder.resolve().is_relative_to(path.resolve()):
        return _Argument(_escape_braces(word))
    is_small = path.is_file() and path.stat().st_size <= _SMALL_BYTES
    if is_small and path.resolve().is_relative_to(folder.resolve()):
        return _Argument(_escape_braces(word), path)
    return _Argument(_escape_braces(f"{option}{equals}{os.path.abspath(path)}"))  # noqa: PTH100  (symbolic links stay)


def _escape_braces(word: str) -> str:
    """Double all braces except Paceline's placeholders, so that they reach the script as typed."""
    return escaped(
        word, lambda name: name in PLACEHOLDERS or is_resume(name) or re.fullmatch(r"data\d+", name) is not None
    )


def line_of(overrides: Sequence[str]) -> list[str] | None:
    """Return the line of `torchrun` or `run` for the overrides of a script's run: the inverse of ``overrides_of``.

    Returns None if the overrides shall be shown as they are: there is no script; the arguments are a list, or hold an
    expression of Hydra; only one of the two settings that `run` makes is there (one rank, no torchrun).
    """
    value_by_name = dict(word.partition("=")[::2] for word in overrides)
    script = value_by_name.pop("program.script", None)
    args, others = list[str](), list[str]()
    ranks = value_by_name.pop("cluster.nproc_per_node", None)
    is_alone = value_by_name.pop("program.torchrun", "true") == "false"
    for name, value in value_by_name.items():
        argument = ARGUMENT.fullmatch(f"{name}={value}")
        if argument is None:
            others.append(f"{name}={value}")
            continue
        text = value[1:-1].replace("\\'", "'") if value[:1] == value[-1:] == "'" and len(value) > 1 else value
        flag = f"-{argument[1]}" if len(argument[1]) == 1 else f"--{argument[1]}"
        if is_bare(argument[1]):
            args.append(text)
        else:
            args += [flag] if value == "true" else [flag, text]
        # braces that were doubled, an option that is left out, a list or mapping
        if "{{" in text or text in ("false", "null") or (text[:1] in ("[", "{") and text != value[1:-1]):
            return None
    if (
        script is None
        or "program.args" in value_by_name
        or not all("=" in word for word in overrides)
        # `run` sets both one rank and no torchrun. With only one of the two, the overrides are shown. One rank under
        # torchrun could be shown as `torchrun train.py`, but `doit train` with the overrides starts the same run.
        or is_alone != (ranks == "1")
        # `torchrun train.py` sets one rank, and the overrides as many as this computer has
        or (ranks is None and "cluster" not in value_by_name)
    ):
        return None
    if is_alone:
        return ["run", *others, script, *args]
    return ["torchrun", *([f"--nproc-per-node={ranks}"] if ranks else []), *others, script, *args]
