"""What is known of a verb and of its own ``name=value`` words; all of them are in ``verbs``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Option(NamedTuple):
    """A word of a verb's own, ``name=value``: the form of its value, and what it does."""

    value: str
    meaning: str


RUN = Option("KEY", "the run, by its key or the first digits of it; default: the run of the overrides")
JSON = Option("1", "the same as JSON, for scripts")


class Verb(NamedTuple):
    """One command.

    Attributes:
        summary: one line, as lists of commands show it.
        examples: command lines without the leading `doit`.
        details: what else its help says.
        options: its own words.
        composes: whether it takes Hydra overrides.
        shows_groups: whether its help lists the groups that overrides choose from.
        shares_batch: whether the ranks must be able to share the global batch.
        chooses: whether its overrides choose among the runs that there are.
        sweeps: whether overrides may stand for several values.
        module: where the function of the verb's name is; it is imported when the verb runs.
        is_done: a function there that says whether there is nothing to do; '': there always is.
        after: verbs whose tasks come first, unless ``run=KEY`` names a run that exists already.
        answers: its output is all that is wanted, without a line of doit's.
        takes_paths: whether bare words behind it are files and folders, or what ``bare`` calls them.
        goes_on: whether it goes on when nobody reads its output any more (`| head`).
    """

    summary: str
    examples: tuple[str, ...]
    details: str = ""
    options: Mapping[str, Option] = MappingProxyType({})
    composes: bool = True
    shows_groups: bool = True
    shares_batch: bool = True
    chooses: bool = False
    sweeps: bool = False
    module: str = "pipeline.cli.commands"
    is_done: str = ""
    after: tuple[str, ...] = ()
    answers: bool = False
    takes_paths: bool = False
    bare: str = "PATH"
    goes_on: bool = False
