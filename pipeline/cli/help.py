"""The output of `doit --help`, `doit VERB --help`, `doit help VERB`, `doit info VERB` and `doit --version`."""

from __future__ import annotations

import platform
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from doit.cmd_base import DodoTaskLoader
from doit.plugin import PluginDict
from doit.version import VERSION

from pipeline.cli.doit_plugins import COMMANDS
from pipeline.cli.invocation import is_override
from pipeline.cli.output import width
from pipeline.cli.verbs import VERBS
from pipeline.config.conf_files import OptionGroup, groups
from pipeline.config.schema import OPTIONS, RootConfig, installed_programs
from pipeline.core.errors import UsageError, suggestion
from pipeline.core.places import HOME, IS_INSTALLED

_MAX_COLUMNS = 110
_MIN_MEANING = 34  # columns beside the names of a table
_HELP_FLAGS = ("-h", "--help")
_LINE_OPTIONS = {
    "-m": "SCRIPT.py is the name of a module, as for python -m",
    "--cluster NAME": "where it runs: a file of conf/cluster",
    "--sweep NAME=VALUES": "trials: --sweep lr=0.1,0.01 replaces the script's --lr by each value",
}
_ABOUT_EXPERIMENTS = "A recipe: options and fields that go together. Words on the command line win."
"""The line about the group ``experiment``, which has no settings class."""
_DOIT_RUN = "`doit run TASK`, with a task of dodo.py, is doit's own command:"


def requested(argv: Sequence[str]) -> str | None:
    """Return the help that the words after ``doit`` ask for, or None. Raises UsageError: about an unknown command."""
    words = [word for word in argv if not is_override(word) and not word.startswith("-")]
    if argv[:1] in (["--version"], ["-V"], ["version"]):
        return version()
    if words[:1] == ["help"] and words[1:] != ["task"]:  # `doit help task` is doit's own page on writing a dodo.py
        return _page(words[1:])
    if any(word in _HELP_FLAGS for word in argv):
        return _page([word for word in words if word in VERBS or word in COMMANDS])
    # `doit train help`; after a verb that takes names, as in `doit step help`, it may be the name of a step
    if words[1:] == ["help"] and words[0] in VERBS and not VERBS[words[0]].arguments:
        return verb_page(words[0])
    if words[:1] == ["info"] and words[1:2] and words[1] in VERBS:
        return verb_page(words[1])
    return None


def _page(words: Sequence[str]) -> str:
    if not words:
        return overview()
    name = words[0]
    if name in VERBS:
        return verb_page(name)
    if name == "run":
        return f"{_page_of(_run_page())}\n\n{_DOIT_RUN}\n{_page_of_doit(name)}"
    if name in COMMANDS:
        return _page_of_doit(name)
    raise UsageError(f"there is no command {name!r}; {suggestion(name, ['run', *VERBS])}")


def version() -> str:
    """Return the versions of Paceline, doit and Python."""
    if IS_INSTALLED:
        paceline = metadata.version("paceline")
    else:
        paceline = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    doit = ".".join(map(str, VERSION))
    return f"Paceline {paceline} (doit {doit}, Python {platform.python_version()}) in {HOME}"


def overview() -> str:
    """Return all commands, how words are combined, and where to read on."""
    lines = [
        "Paceline: reproducible multi-node PyTorch training.",
        "",
        "  doit VERB [KEY …] [OVERRIDE …] [--OPTION …]",
        "",
        *_table([*_verbs()]),
        "",
        "Overrides (Hydra's syntax): GROUP=OPTION or FIELD=VALUE, in any order.",
        "",
        *_examples(("train experiment=quickstart", "train cluster=two_node model=resnet50 optimizer.lr=0.1")),
        "",
        *_table(
            [
                ("help VERB", "its options and examples, and the groups with their options"),
                ("list", "only the verbs"),
                ("tabcompletion", "a script for Tab completion of the verbs in bash or zsh"),
                ("--version", "the versions of Paceline, doit and Python"),
            ]
        ),
        "",
        "doit's own options come before the verb; `doit help run` lists them.",
        "Exit codes: 0 done or up to date, 1 failed, 2 a defect, 3 wrong usage.",
    ]
    return _page_of(lines)


def _verbs() -> Iterator[tuple[str, str]]:
    for name, verb in VERBS.items():
        yield name, verb.summary
        if name == "torchrun":
            yield "run", "train with a script as one process: run train.py --lr 0.1"


def verb_page(name: str) -> str:
    """Return a verb's purpose, options, groups and examples."""
    verb = VERBS[name]
    options = [(option.spelt(word), option.meaning) for word, option in verb.options.items()]
    head = f"Options of doit {name} (OPTION=VALUE without dashes is understood too):"
    usage = verb.usage(name)
    if name == "torchrun":
        usage, options = f"doit torchrun {_LINE_USAGE}", _line_options()
        head = "Options besides torchrun's own, in front of the script:"
    lines = [
        f"usage: {usage}",
        "",
        f"{verb.summary[0].upper()}{verb.summary[1:]}. {verb.details}",
        "",
        *([head, *_table(options), ""] if options else []),
        *(_groups() if verb.takes_all_overrides else []),
        "Examples:",
        *_examples(verb.examples),
    ]
    if verb.overrides and not verb.takes_all_overrides:
        lines += ["", "paths.runs=FOLDER and tracking.uri=ADDRESS set where runs and records are stored."]
    return _page_of(lines)


_LINE_USAGE = "[OPTION …] [OVERRIDE …] SCRIPT.py [ARGUMENT …]"


def _run_page() -> list[str]:
    return [
        f"usage: doit run {_LINE_USAGE}",
        "",
        "Train with a script as one process, as python SCRIPT.py ARGUMENT … does; what is finished isn't repeated. "
        "What follows the script is the script's, which starts where this is typed, in a copy of the project. Several "
        "ranks: doit torchrun, which takes the same options.",
        "",
        "Options, in front of the script:",
        *_table(_line_options()),
        "",
        "Examples:",
        "  doit run train.py --lr 0.1",
        "  doit run --sweep lr=0.1,0.01 train.py --epochs 3",
        "  doit why run train.py --lr 0.1",
    ]


def _line_options() -> list[tuple[str, str]]:
    """Return the options of `run` and `torchrun`, whose lines become those of `train` or `sweep`."""
    options = {**VERBS["sweep"].options, **VERBS["train"].options}
    del options["preflight.deep"]
    return [*_LINE_OPTIONS.items(), *((option.spelt(name), option.meaning) for name, option in options.items())]


def _page_of(lines: Iterable[str]) -> str:
    """Wrap the sentences of a page at the terminal's width, and join its lines."""
    wrapped = list[str]()
    for line in lines:
        # indented lines are tables, which are wrapped already, and commands, which users copy
        stays = not line or line.startswith((" ", "usage: "))
        wrapped += [line] if stays else textwrap.wrap(line, _width())
    return "\n".join(wrapped)


def _groups() -> Iterator[str]:
    yield "Overrides: GROUP=OPTION, with these groups (* marks the default):"
    for group in groups():
        if set(group.options) == {group.default}:  # there is nothing to choose
            continue
        about = f"{group.name}=  {group_summary(group)}"
        yield from textwrap.wrap(about, _width(), initial_indent="  ", subsequent_indent=" " * 6)
        options = {**installed_options(group), **group.options}
        yield from _table([(f"{'*' if name == group.default else ' '} {name}", options[name]) for name in options])
    yield "and FIELD=VALUE, such as trainer.epochs=3 or seed=1."
    yield ""


def group_summary(group: OptionGroup) -> str:
    """Return the first sentence of the docstring of the group's settings class."""
    settings = typing.get_type_hints(RootConfig).get(group.name)
    text = " ".join((settings.__doc__ or "").split()) if settings is not None else _ABOUT_EXPERIMENTS
    return f"{re.split(r'[.;] ', text)[0].rstrip('.')}."


def installed_options(group: OptionGroup) -> dict[str, str]:
    """Return the options that other installed packages add to a group: name → line for the help."""
    modules = OPTIONS[group.name].installed() if group.name in OPTIONS else {}
    modules = installed_programs() if group.name == "program" else modules
    return {name: f"Of an installed package ({module})." for name, module in modules.items()}


def _examples(examples: Iterable[str]) -> list[str]:
    return [f"  doit {example}" for example in examples]


def _width() -> int:
    return min(_MAX_COLUMNS, width())


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return two columns; in a narrow terminal each meaning stands below its name."""
    longest = max(len(name) for name, _ in rows)
    is_narrow = _width() - longest < _MIN_MEANING
    lines: list[str] = []
    for name, meaning in rows:
        start = " " * 6 if is_narrow else f"  {name.ljust(longest)}  "
        lines += [f"  {name}"] if is_narrow else []
        lines += textwrap.wrap(meaning, _width(), initial_indent=start, subsequent_indent=" " * len(start)) or [start]
    return lines


def _page_of_doit(name: str) -> str:
    commands = PluginDict(COMMANDS)
    text: str = COMMANDS[name](task_loader=DodoTaskLoader(), cmds=commands, bin_name="doit").help()
    return text
