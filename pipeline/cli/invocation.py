"""Parse the typed command line: the verb, the Hydra overrides in their order, and the verb's own options.

doit would lose the order of ``key=value`` words and would take ``~key`` for a task, so this module reads sys.argv.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipeline.cli.verbs import VERBS
from pipeline.config.overrides.words import NAME_A_SCRIPT, quoted_run
from pipeline.core.errors import UsageError, nearest
from pipeline.core.printable import hydra_value

QUIET, USUAL, VERBOSE = range(3)

TYPED = "PACELINE_TYPED"
"""The variable in which `paceline` leaves its name."""
_OF_A_PROGRAM = re.compile(r"(?:trial +\d+ \| )?(?:[^\s|]+ |  )\| ")  # of a rank, a step or a log


def command() -> str:
    """Return the command that was typed before the verb: ``paceline``, or ``doit``, which does the same.

    Commands started by this one (Hydra's application, the training of `doit reproduce`) use the same name.
    """
    return os.environ.get(TYPED, "doit")


def as_typed(text: str) -> str:
    """Rename commands in Paceline's own text as the user types them: in subfolders a plain doit finds no project.

    Names of doit itself stay (``doit's own options``), and so do lines of ranks and steps.
    """
    if command() == "doit":
        return text
    verbs = "|".join([*VERBS, "VERB", "help", "list", "run", "tabcompletion", r"-\w"])
    ours = re.compile(rf"\bdoit (?=(?:{verbs})\b)")
    lines = text.split("\n")
    return "\n".join(line if _OF_A_PROGRAM.match(line) else ours.sub(f"{command()} ", line) for line in lines)


_VERBOSITY_WITH_LEVEL = re.compile(r"(?:-v|--verbosity=)([012])")
_WARNING_OR_ERROR = re.compile(r"\b(?:warning|error): ", re.IGNORECASE)


def verbosity() -> int:
    """Return the verbosity: 0 shows warnings, errors and the result, 1 (default) also progress, 2 also torchrun's."""
    level, _ = without_verbosity(sys.argv[1:])
    return USUAL if level is None else level


def is_wanted(text: str) -> bool:
    """Whether a line is shown with -v 0."""
    return _WARNING_OR_ERROR.search(text) is not None


def without_verbosity(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the last verbosity among the words (None without one), and the words without verbosity options.

    An option with an unknown level stays among the words; it is refused later.
    """
    level, rest, left = None, list[str](), [*words]
    while left:
        word = left.pop(0)
        if attached := _VERBOSITY_WITH_LEVEL.fullmatch(word):
            level = int(attached[1])
        elif word in ("-v", "--verbosity") and left and left[0] in ("0", "1", "2"):
            level = int(left.pop(0))
        else:
            rest.append(word)
    return level, rest


def is_on(options: Mapping[str, str], name: str) -> bool:
    """Whether an option is switched on (``name=1``); off by default. Raises UsageError: the value is no switch."""
    value = options.get(name, "0")
    if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise UsageError(f"{name}={value} must be 1 or 0")
    return value.lower() in ("1", "true", "yes")


_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def budget_s(options: Mapping[str, str]) -> float | None:
    """Return the seconds of ``--budget 1h30m``; None without --budget. Raises UsageError: the value is no duration."""
    typed = options.get("budget")
    if typed is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", typed)
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != typed or not seconds:
        raise UsageError(f"--budget {typed} is no duration", hint="--budget 90s, 30m, 1h30m or 2d")
    return seconds


def process_count() -> int:
    """Return how many steps may run concurrently: doit's own option -n, default 1."""
    match = re.search(r"(?:^|\0)(?:-n|--process)[\0=]?(\d+)(?:\0|$)", "\0".join(sys.argv[1:]))
    return max(1, int(match[1])) if match else 1


_ALWAYS_EXECUTE = re.compile(r"-[csk]*a[acsk]*|--always-execute")  # short options may be joined, as in -sa
HELP_WORDS = frozenset({"-h", "--help", "help", "info", "--version"})
"""The words that ask for help. ``pipeline.cli.help`` is imported only if the command line has one of them."""


class Invocation(NamedTuple):
    """A parsed command line. ``verb`` is None for doit's own commands and for a bare `doit`.

    ``again`` is doit's own option -a: repeat finished runs and steps. ``paths`` are the files and folders after a verb
    that takes some.
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
    """Return the folder of runs that the command line names, else ``runs``; the configuration is not yet composed."""
    named = [word.partition("=")[2].strip("'\"") for word in argv if word.startswith("paths.runs=")]
    return os.path.expanduser(named[-1]) if named else "runs"  # noqa: PTH111  (Path's raises where no such user is)


def parse(argv: Sequence[str]) -> Invocation:
    """Parse the words after ``doit``. Raises UsageError: an empty word, or an override that the verb doesn't take."""
    for position, word in enumerate(argv, start=1):
        if not word.strip():
            raise UsageError(
                f"argument {position} is empty ({word!r}); is a shell variable unset? "
                "overrides look like optimizer.lr=0.1"
            )
    _, words = without_verbosity(argv)
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
    if overrides and not VERBS[verb].overrides:
        name, _, value = overrides[0].partition("=")
        close = nearest(name, own)
        meant = f"did you mean {close}={value}? " if close else ""
        raise UsageError(f"doit {verb} takes no {name!r}; {meant}valid: {', '.join(own)}")
    paths = tuple(words[words.index(verb) + 1 :]) if VERBS[verb].bare else ()
    again = any(map(_ALWAYS_EXECUTE.fullmatch, argv))
    return Invocation(verb=verb, overrides=overrides, options=options, again=again, paths=paths)


def _option(word: str, verb: str) -> str:
    """Return the name that a word sets, without the verb as a prefix: ``deep`` for ``preflight.deep=1``."""
    return word.partition("=")[0].removeprefix(f"{verb}.")


# ------------------------------------------------------------------------- overrides about a script
_PATH_FIELDS = ("program.script", "program.data")
_TEXT_FIELDS = ("program.args", "program.env")
_BARE_TEXT = r"[^\s,\[\]{}'\"]*+"
_BEGINS = r"(?<![^\s,\[\]{}'\"])"  # else a long text without a placeholder is tried from each of its characters
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_RESUME = r"\{resume:[^\s,{}'\"]+\}"
_UNQUOTED_PLACEHOLDERS = re.compile(
    rf"{_QUOTED}|({_BEGINS}{_BARE_TEXT}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}|{_RESUME}){_BARE_TEXT})+)"
)
_SCRIPT_WORDS = tuple(f"{field}=" for field in NAME_A_SCRIPT)
_SETS_WORKDIR = ("program.workdir=", "experiment=")
_NEEDS_NO_QUOTES = re.compile(r"[\w./-]+")


def for_project(words: Sequence[str], folder: Path, root: Path) -> tuple[str, ...]:
    """Convert overrides typed in ``folder`` to what Hydra reads in the project ``root``.

    {run} is quoted, because Hydra would read it as a mapping. A path of a script or of data in ``folder`` becomes
    relative to ``root``; the script's working directory becomes ``folder``.

    Raises UsageError: a word about Hydra itself.
    """
    for word in words:
        if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):  # Paceline has a run's folder, log and process
            raise UsageError(
                f"{word} sets Hydra's own application, of which doit takes the configuration alone",
                hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
            )
    placed = [quoted_run(_with_quoted_placeholders(_with_project_path(word, folder, root))) for word in words]
    return (*placed, *_workdir(placed, folder, root))


def _workdir(words: Sequence[str], folder: Path, root: Path) -> list[str]:
    """Return ``program.workdir=FOLDER`` if the words name a script and ``folder`` lies below the project.

    A script that an experiment names keeps its working directory, so that every folder gives the same run.
    """
    named = [word.partition("=")[2].strip("'\"") for word in words if word.startswith(_SCRIPT_WORDS)]
    if not named or folder == root or not folder.is_relative_to(root):
        return []
    if named[0].startswith(("/", "~")) or any(word.lstrip("+~").startswith(_SETS_WORKDIR) for word in words):
        return []
    inside = folder.relative_to(root).as_posix()
    quoted = inside.replace("\\", "\\\\").replace("'", "\\'")
    return [f"program.workdir={inside}" if _NEEDS_NO_QUOTES.fullmatch(inside) else f"program.workdir='{quoted}'"]


def _with_project_path(word: str, folder: Path, root: Path) -> str:
    """Make the path of a script or of data relative to the project, if it exists in ``folder``."""
    field, _, typed = word.partition("=")
    value = typed.strip("'\"")
    if folder == root or field not in _PATH_FIELDS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={hydra_value(str(path.relative_to(root) if path.is_relative_to(root) else path))}"


def _with_quoted_placeholders(word: str) -> str:
    """Quote placeholders such as {run} in a script's arguments and variables: Hydra would read mappings."""
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXT_FIELDS) or (
        field.endswith("program.args") and value.startswith("{resume:")
    ):
        return word
    return f"{field}{equals}{_UNQUOTED_PLACEHOLDERS.sub(lambda match: repr(match[1]) if match[1] else match[0], value)}"
