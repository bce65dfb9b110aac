"""Translate a line of `torchrun` or `run` into the overrides of a script's run, and such overrides into a line.

torchrun --nproc-per-node 2 train.py --lr 0.1
cluster.nproc_per_node=2 program.script=train.py program.args.lr=0.1
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.script_data import is_written
from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_value
from trainers.script.settings import PLACEHOLDERS, escaped, is_resume, words

ARGUMENT = re.compile(r"program\.args\.([\w-]+)=(.*)")
"""An override that sets one argument of a script: its name and its value."""
_INPUTS = "program.inputs=["
_FLAG = re.compile(r"--(?P<long>[A-Za-z_][\w-]+)|-(?P<short>[A-Za-z])")
_LIKE_A_FLAG = re.compile(r"--?[A-Za-z_]")  # --z, --lr=0.1, -abc: a mapping can't express these
_PRINTED_ALIKE = re.compile(r"0|-?[1-9]\d{0,15}|-?(?:0|[1-9]\d{0,8})\.(?:0|\d{0,8}[1-9])")
"""Numbers that Python prints as they were typed. Others are passed on as texts."""
_NUMBER = re.compile(r"[-+]?(?:[\d_]*\.?[\d_]+|[\d_]+\.)(?:[eE][-+]?[\d_]+)?")
_EXPRESSION = re.compile(r"[(\[{'\"]")
_SMALL_BYTES = 1 << 20  # a file in an argument up to this size is copied with the code


@dataclass(frozen=True, kw_only=True)
class ScriptLine:
    """A parsed line of `torchrun` or `run`.

    - ``script``: a file, the dotted name of a ``module``, or a program that is ``no_python``; ``args`` stand behind it.
    - ``overrides``, ``cluster``, ``sweep``: Paceline's own words before the script; a ``sweep`` is NAME=VALUES.
    - ``nnodes``, ``nproc_per_node``, ``max_restarts``: torchrun's options, as typed.
    - ``with_torchrun``: false for `run`, which starts one process.
    - ``not_needed``: reason → torchrun's options that are ignored for it.
    """

    script: str
    args: Sequence[str]
    overrides: Sequence[str] = ()
    cluster: str | None = None
    sweep: Sequence[str] = ()
    nnodes: str | None = None
    nproc_per_node: str | None = None
    max_restarts: int | None = None
    module: bool = False
    no_python: bool = False
    with_torchrun: bool = True
    not_needed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def names_cluster(self) -> bool:
        return self.cluster is not None or any(word.startswith("cluster=") for word in self.overrides)


def overrides_of(line: ScriptLine, folder: Path, root: Path, *, splits: bool) -> Iterator[str]:
    """Yield overrides for the cluster, the program, its arguments and trials; then the typed overrides."""
    if line.cluster:
        yield f"cluster={line.cluster}"
    yield from _nodes(line)
    yield from _ranks(line)
    if line.max_restarts is not None:
        yield f"cluster.max_restarts={line.max_restarts}"
    if line.no_python:
        yield f"program.command=[{hydra_value(line.script)}]"
    else:
        script = line.script
        if not line.module and script.startswith("/") and Path(script).is_relative_to(root):
            script = os.path.relpath(script, folder)  # so that the project's script starts there
        yield f"program.{'module' if line.module else 'script'}={hydra_value(script)}"
    if not line.with_torchrun:
        yield "program.torchrun=false"
    arguments = [_argument(word, before, folder) for before, word in zip(["", *line.args], line.args, strict=False)]
    args, sweeps = [argument.word for argument in arguments], _sweeps(line)
    named = _named(args)
    yield from _listed(args, sweeps) if named is None else _by_name(named, sweeps, splits=splits)
    inputs = [Path(os.path.relpath(one.input, root)).as_posix() for one in arguments if one.input is not None]
    typed_inputs = [word for word in line.overrides if word.startswith(_INPUTS) and word.endswith("]")]
    patterns = [*map(hydra_value, inputs), *(word[len(_INPUTS) : -1] for word in typed_inputs)]
    if patterns:  # typed ones come on top of the arguments' files
        yield f"{_INPUTS}{','.join(filter(None, patterns))}]"
    yield from (word for word in line.overrides if word not in typed_inputs)


def _sweeps(line: ScriptLine) -> dict[str, str]:
    """Return the values of each swept argument by its name. Raises UsageError."""
    sweeps = dict[str, str]()
    for text in line.sweep:
        name, _, values = text.lstrip("-").partition("=")
        if not (name and values):
            raise UsageError(f"--sweep {text}: a name and its values are missing", hint="--sweep lr=0.1,0.01")
        sweeps[name] = values
    return sweeps


def _nodes(line: ScriptLine) -> Iterator[str]:
    least, _, most = (line.nnodes or "").partition(":")
    if most not in ("", least):
        raise UsageError(
            f"--nnodes={line.nnodes}: the number of nodes is part of a run's key, so it is fixed",
            hint=f"--nnodes={most}; cluster.spares=[HOST] replaces a lost one",
        )
    if least not in ("", "1") or (least and line.names_cluster):
        yield f"cluster.nnodes={least}"


def _ranks(line: ScriptLine) -> Iterator[str]:
    """Yield the number of ranks: as typed, else one (torchrun's default), else the named cluster's own."""
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


def _named(args: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments as a mapping for ``program.args``.

    None if a mapping would give other words: for positional arguments, ``--lr=0.1``, or a repeated name.
    """
    texts_by_name: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in args:
        match = _FLAG.fullmatch(word)
        if match is not None:
            name = match["long"] or match["short"]
            if name in texts_by_name:
                return None
            values = texts_by_name[name] = []
        elif values is None or _LIKE_A_FLAG.match(word):
            return None
        else:
            values.append(word)
    mapping = {
        name: True if not texts else texts[0] if len(texts) == 1 else texts for name, texts in texts_by_name.items()
    }
    return mapping if words(mapping) == [*args] else None


def _by_name(named: Mapping[str, Any], sweeps: Mapping[str, str], *, splits: bool) -> Iterator[str]:
    """Yield one override per argument. ``splits``: a value with commas is a sweep, as in `doit sweep`."""
    for name, value in named.items():
        if name in sweeps or (splits and isinstance(value, str) and "," in value):
            yield f"program.args.{name}={_as_typed(sweeps.get(name, value))}"
        elif isinstance(value, list):
            yield f"program.args.{name}=[{','.join(map(_value, value))}]"
        else:
            yield f"program.args.{name}={'true' if value is True else _value(value)}"
    yield from (f"program.args.{name}={_as_typed(values)}" for name, values in sweeps.items() if name not in named)


def _listed(args: Sequence[str], sweeps: Mapping[str, str]) -> Iterator[str]:
    """Yield the arguments as one list, and each swept value by its position in the list."""
    listed, trials = [*args], dict[int, str]()
    for name, values in sweeps.items():
        at = _position(name, args)
        if at is None:
            listed += [f"--{name}", values.partition(",")[0]]
            at = len(listed) - 1
        begin, equals, _ = listed[at].partition("=")
        each = (_value(f"{begin}={value}") for value in values.split(","))
        trials[at] = ",".join(each) if equals else _as_typed(values)
    yield f"program.args=[{','.join(map(_value, listed))}]"
    yield from (f"program.args.{at}={values}" for at, values in trials.items())


def _position(name: str, args: Sequence[str]) -> int | None:
    """Return the index of the word that holds the value of an option, or of a Hydra-style ``name=value``."""
    for at, word in enumerate(args):
        if word in (f"--{name}", f"-{name}") and at + 1 < len(args):
            return at + 1
        if word.startswith((f"--{name}=", f"{name}=")):
            return at
    return None


def _as_typed(values: str) -> str:
    """Quote the values of a sweep so that numbers are passed on as typed: 1e-3 and not 0.001."""
    if _EXPRESSION.search(values):  # range(3), or values in quotes
        return values
    return ",".join(_value(text) if _NUMBER.fullmatch(text) else text for text in values.split(","))


def _value(text: str) -> str:
    return text if _PRINTED_ALIKE.fullmatch(text) else hydra_value(text)


class _Argument(NamedTuple):
    """A word for ``program.args``, and the small file below the folder that it names, for ``program.inputs``."""

    word: str
    input: Path | None = None


def _argument(word: str, before: str, folder: Path) -> _Argument:
    """Return an argument of a script; ``before`` is the preceding word.

    The path of anything but a small file in the folder becomes absolute, which makes it tracked data.
    """
    option, equals, name = word.rpartition("=")
    flag = option if equals else before if before.startswith("-") else ""
    path = folder / name
    if not name or name.startswith(("/", "~", "-")) or not os.path.exists(path):  # noqa: PTH110  (no error for a long text)
        return _Argument(_literal(word))
    may_be_subcommand = not flag and "/" not in name and path.is_dir() and any(path.glob("*.py"))
    if may_be_subcommand or is_written(flag) or folder.resolve().is_relative_to(path.resolve()):
        return _Argument(_literal(word))
    is_small = path.is_file() and path.stat().st_size <= _SMALL_BYTES
    if is_small and path.resolve().is_relative_to(folder.resolve()):
        return _Argument(_literal(word), path)
    return _Argument(_literal(f"{option}{equals}{os.path.abspath(path)}"))  # noqa: PTH100  (a link stays one)


def _literal(word: str) -> str:
    """Double all braces except Paceline's placeholders, so that they reach the script as typed."""
    return escaped(
        word, lambda name: name in PLACEHOLDERS or is_resume(name) or re.fullmatch(r"data\d+", name) is not None
    )


def line_of(overrides: Sequence[str]) -> list[str] | None:
    """Return the line of `torchrun` or `run` for the overrides of a script's run: the inverse of ``overrides_of``.

    None for a run of another kind, and for arguments that aren't named one by one.
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
        args += [flag] if text == "true" else [flag, text]
        if "{{" in text or text in ("false", "null") or (text[:1] in ("[", "{") and text != value[1:-1]):
            return None
    if (
        script is None
        or "program.args" in value_by_name
        or not all("=" in word for word in overrides)
        or is_alone != (ranks == "1")
    ):
        return None
    if is_alone:
        return ["run", *others, script, *args]
    return ["torchrun", *([f"--nproc-per-node={ranks}"] if ranks else []), *others, script, *args]
