"""The typed command line: the verb, the Hydra overrides in their order, and the verb's own options.

doit keeps ``key=value`` words as unordered variables and takes a bare ``~key`` for a task, so the words are read from
the command line itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipeline.cli.verbs import VERBS
from pipeline.config.overrides.words import NAME_A_SCRIPT, quoted_run
from pipeline.core.errors import UsageError, nearest
from pipeline.core.printable import hydra_value

QUIET, USUAL, VERBOSE = range(3)

_ATTACHED = re.compile(r"(?:-v|--verbosity=)([012])")
_ALONE = ("-v", "--verbosity")
_TROUBLE = re.compile(r"\b(?:warning|error): ", re.IGNORECASE)


def verbosity() -> int:
    """Return the verbosity: 0 shows warnings, errors and the end, 1 (default) the usual, 2 also torchrun's output."""
    level, _ = taken_out(sys.argv[1:])
    return USUAL if level is None else level


def is_wanted(text: str) -> bool:
    """Whether a line is shown with -v 0."""
    return _TROUBLE.search(text) is not None


def taken_out(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the verbosity among the words (the last one counts; None: none), and the words without it.

    A level that doesn't exist stays, to be refused later.
    """
    level, rest, left = None, list[str](), [*words]
    while left:
        word = left.pop(0)
        attached = _ATTACHED.fullmatch(word)
        if attached:
            level = int(attached[1])
        elif word in _ALONE and left and left[0] in ("0", "1", "2"):
            level = int(left.pop(0))
        else:
            rest.append(word)
    return level, rest


def is_on(options: Mapping[str, str], name: str) -> bool:
    """Return a switch (``name=1``); off by default. Raises UsageError: neither yes nor no."""
    value = options.get(name, "0")
    if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise UsageError(f"{name}={value} must be 1 or 0")
    return value.lower() in ("1", "true", "yes")


_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")


def budget_s(options: Mapping[str, str]) -> float | None:
    """Return the seconds of ``--budget 1h30m``; None without it. Raises UsageError: no duration."""
    typed = options.get("budget")
    if typed is None:
        return None
    if not _TIME.fullmatch(typed) or not (seconds := sum(_parts_s(typed))):
        raise UsageError(f"--budget {typed} is no duration", hint="--budget 90s, 30m, 1h30m or 2d")
    return seconds


def _parts_s(typed: str) -> Iterator[float]:
    return (float(number) * _TIMES[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", typed))


def whole_number(options: Mapping[str, str], name: str) -> int | None:
    """Return an option that is a number from 1; None without it. Raises UsageError: no such number."""
    typed = options.get(name)
    if typed is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", typed):
        raise UsageError(f"--{name.replace('_', '-')} {typed} must be a whole number from 1")
    return int(typed)


def at_once() -> int:
    """Return how many steps may run side by side: doit's own option -n, default 1."""
    match = re.search(r"(?:^|\0)(?:-n|--process)[\0=]?(\d+)(?:\0|$)", "\0".join(sys.argv[1:]))
    return max(1, int(match[1])) if match else 1


_AGAIN = re.compile(r"-[csk]*a[acsk]*|--always-execute")  # short ones may stand together
HELP_WORDS = frozenset({"-h", "--help", "help", "info", "--version"})
"""A command line without any of these asks for no help (``pipeline.cli.help``, which only help imports)."""


class Invocation(NamedTuple):
    """A parsed command line. ``verb`` is None for doit's own commands and for a bare `doit`.

    ``again`` is doit's own option -a: repeat what is finished. ``paths`` are the bare words of a verb that takes files
    and folders.
    """

    verb: str | None
    overrides: tuple[str, ...] = ()
    options: Mapping[str, str] = MappingProxyType({})
    again: bool = False
    paths: tuple[str, ...] = ()


def is_override(word: str) -> bool:
    """Whether a word is ``key=value``, ``+key=value`` or ``~key``, which doit must not take for a task or an option."""
    return word.startswith("~") or ("=" in word and not word.startswith(("-", "/", "./", "../")))


def typed_runs_dir(argv: Sequence[str]) -> str:
    """Return the folder of runs, as far as it is known before the words are composed."""
    named = [word.partition("=")[2].strip("'\"") for word in argv if word.startswith("paths.runs=")]
    return os.path.expanduser(named[-1]) if named else "runs"  # noqa: PTH111  (Path's raises where no such user is)


def parse(argv: Sequence[str]) -> Invocation:
    """Sort the words after ``doit``.

    Raises:
        UsageError: an empty word (usually an unset shell variable), or an override that the verb doesn't take.
    """
    for position, word in enumerate(argv, start=1):
        if not word.strip():
            raise UsageError(
                f"argument {position} is empty ({word!r}); is a shell variable unset? "
                "overrides look like optimizer.lr=0.1"
            )
    _, words = taken_out(argv)
    words = [word for word in words if not is_override(word) and not word.startswith("-")]
    verb = next((word for word in words if word in VERBS), None)
    given = [word for word in argv if is_override(word)]
    if verb is None:
        return Invocation(verb=None, overrides=tuple(given))
    own = VERBS[verb].options
    options = {name: word.partition("=")[2] for word in given if (name := _option(word, verb)) in own}
    for name, value in options.items():
        if not value.isprintable():
            raise UsageError(f"{name}={value!r} holds what can't be printed; is a shell variable wrong?")
    overrides = tuple(word for word in given if _option(word, verb) not in own)
    if overrides and not VERBS[verb].composes:
        name, _, value = overrides[0].partition("=")
        close = nearest(name, own)
        meant = f"did you mean {close}={value}? " if close else ""
        raise UsageError(f"doit {verb} takes no {name!r}; {meant}valid: {', '.join(own)}")
    paths = tuple(words[words.index(verb) + 1 :]) if VERBS[verb].takes_paths else ()
    again = any(map(_AGAIN.fullmatch, argv))
    return Invocation(verb=verb, overrides=overrides, options=options, again=again, paths=paths)


def _option(word: str, verb: str) -> str:
    """Return the name that a word sets, without the verb's own in front: ``preflight.deep=1`` is ``deep=1``."""
    return word.partition("=")[0].removeprefix(f"{verb}.")


# ------------------------------------------------------------------------- overrides about a script
_PATHS = ("program.script", "program.data")
_TEXTS = ("program.args", "program.env")
_PART = r"[^\s,\[\]{}'\"]*"
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_RESUME = r"\{resume:[^\s,{}'\"]+\}"
_UNQUOTED = re.compile(rf"{_QUOTED}|({_PART}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}|{_RESUME}){_PART})+)")
_OF_A_SCRIPT = tuple(f"{field}=" for field in NAME_A_SCRIPT)
_NAMES_ANOTHER = ("program.workdir=", "experiment=")
_PLAIN = re.compile(r"[\w./-]+")


def for_project(words: Sequence[str], folder: Path, root: Path) -> tuple[str, ...]:
    """Convert overrides typed in ``folder`` to what Hydra reads in the project ``root``.

    {run} is quoted, because Hydra would read a mapping. A script or data beside the user gets its path from the
    project's folder, and a script that folder as its working directory.

    Raises UsageError: a word about Hydra itself.
    """
    for word in words:
        _refuse_hydra(word)
    placed = [quoted_run(_quoted(_placed(word, folder, root))) for word in words]
    return (*placed, *_workdir(placed, folder, root))


def _workdir(words: Sequence[str], folder: Path, root: Path) -> list[str]:
    """Return ``program.workdir`` for a script that is named from a folder below the project, whose files it opens.

    An experiment that names the script makes the same run from every folder.
    """
    named = [word.partition("=")[2].strip("'\"") for word in words if word.startswith(_OF_A_SCRIPT)]
    if not named or folder == root or not folder.is_relative_to(root):
        return []
    if named[0].startswith(("/", "~")) or any(word.lstrip("+~").startswith(_NAMES_ANOTHER) for word in words):
        return []
    inside = folder.relative_to(root).as_posix()
    quoted = inside.replace("\\", "\\\\").replace("'", "\\'")
    return [f"program.workdir={inside}" if _PLAIN.fullmatch(inside) else f"program.workdir='{quoted}'"]


def _refuse_hydra(word: str) -> None:
    """Refuse fields of Hydra's own section: a run's folder, log and process are Paceline's."""
    if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):
        raise UsageError(
            f"{word} sets Hydra's own application, of which doit takes the configuration alone",
            hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
        )


def _placed(word: str, folder: Path, root: Path) -> str:
    field, _, typed = word.partition("=")
    value = typed.strip("'\"")
    if folder == root or field not in _PATHS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={hydra_value(str(path.relative_to(root) if path.is_relative_to(root) else path))}"


def _quoted(word: str) -> str:
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXTS) or (field.endswith("program.args") and value.startswith("{resume:")):
        return word
    return f"{field}{equals}{_UNQUOTED.sub(lambda match: repr(match[1]) if match[1] else match[0], value)}"
