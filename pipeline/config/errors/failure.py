"""An error of Hydra's or OmegaConf's during a composition, and the override that caused it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from pipeline.core.errors import first_line
from pipeline.core.printable import shell_word

TryCompose = Callable[[Sequence[str]], DictConfig | None]
"""Composes overrides; None if they can't be composed."""
IN_FILE = re.compile(r"In '([^']+)': ")
"""How Hydra's errors name a configuration file."""
FULL_KEY = re.compile(r"full_key: (\S+)")
"""How OmegaConf's errors name a field."""
_NO_NUMBER = re.compile(r"Value ('.*') of type '\w+' could not be converted to (Integer|Float)")


class Word(NamedTuple):
    """An override: ``+``, ``++``, ``~`` or '' as its ``mark``, a name, and what stands behind the first ``=``."""

    text: str
    mark: str
    name: str
    value: str

    @classmethod
    def of(cls, text: str) -> Word:
        """Take a word apart; a word without ``=`` has no value."""
        unmarked = text.lstrip("+~")
        name, _, value = unmarked.partition("=")
        return cls(text=text, mark=text.removesuffix(unmarked), name=name, value=value)

    @property
    def key(self) -> str:
        """The name with its mark."""
        return self.mark + self.name

    @property
    def quoted(self) -> str:
        """The override with its value quoted as one text, for a shell."""
        return shell_word(f"{self.key}={QuotedString(self.value, Quote.single).with_quotes()}")


class CompositionFailure:
    """A failed composition. ``text`` is that of the error and of all its causes.

    ``try_compose`` composes other overrides, to find the one at fault and the valid names.
    """

    def __init__(self, error: Exception, overrides: Sequence[str], try_compose: TryCompose) -> None:
        self.error, self.overrides = error, [*overrides]
        self.causes = [*_chain(error)]
        self.text = " ".join(map(str, self.causes))
        self.try_compose = try_compose

    @functools.cached_property
    def culprit(self) -> Word:
        """The override at fault; ``conf/config.yaml`` if there is no override."""
        return Word.of(self._only_word_of_field() or self._first_that_fails())

    @property
    def others(self) -> list[str]:
        """The other overrides."""
        return [item for item in self.overrides if item != self.culprit.text]

    @property
    def reason(self) -> str:
        """The first line of the innermost cause: the outer ones only name the place."""
        return plain_reason(first_line(self.causes[-1]))

    def _only_word_of_field(self) -> str:
        """Return the only override of the field that the error names, or ''; an error about a file names no override.

        It is the culprit even if another word gave the field its type: program.env.A=[1] program.script=a.py.
        """
        match = None if IN_FILE.search(self.text) else FULL_KEY.search(self.text)
        words = [word for word in map(Word.of, self.overrides) if match and word.name == match[1]]
        words = [word for word in words if "~" not in word.mark]
        return words[0].text if len(words) == 1 else ""

    def _first_that_fails(self) -> str:
        """Return the first override with which composing fails. The last one needs no trial: all together do fail."""
        for index, item in enumerate(self.overrides[:-1]):
            if self.try_compose(self.overrides[: index + 1]) is None:
                return item
        return self.overrides[-1] if self.overrides else "conf/config.yaml"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def plain_reason(line: str) -> str:
    """Say in words that need no Python that a text stands in the place of a number; return other lines unchanged."""
    match = _NO_NUMBER.fullmatch(line)
    return line if match is None else f"{match[1]} is no {'whole ' if match[2] == 'Integer' else ''}number"
