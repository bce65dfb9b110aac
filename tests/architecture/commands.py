"""docs/cli.md: every command with its options and examples. ``python -m tests.architecture.commands`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.cli.verbs import VERBS, Verb

PAGE = Path(__file__).resolve().parents[2] / "docs/cli.md"

_HEAD = """# Commands

All commands of `doit`, with their options and examples; `paceline` in place of `doit` is the same. `doit help train`
prints one of them, with the groups and options that overrides choose from. `OPTION=VALUE` without dashes is understood
too. Options of doit itself (`-n 4`, `-v 2`) come before the command.

`--json` answers for [programs](json.md). What commands print where, and how they end: [exit codes](exit-codes.md).
"""


def page() -> str:
    """Return the text of the page."""
    rows = (f"| [`{name}`](#doit-{name}) | {_cell(verb.summary)} |" for name, verb in VERBS.items())
    index = "\n".join(["| command | what it does |", "| --- | --- |", *rows])
    return "\n".join([_HEAD, f"{index}\n", *(_section(name, verb) for name, verb in VERBS.items())])


def _section(name: str, verb: Verb) -> str:
    parts = [f"## doit {name}\n", f"`{verb.usage(name)}`\n"]
    if verb.details:
        parts.append(f"{_cell(verb.details)}\n")
    if options := list(_options(verb)):
        parts += ["| option | meaning |\n| --- | --- |", "\n".join(options) + "\n"]
    return "\n".join([*parts, "```bash", *(f"doit {example}" for example in verb.examples), "```\n"])


def _options(verb: Verb) -> Iterator[str]:
    for word, option in verb.options.items():
        if word != "json":
            yield f"| `{_cell(option.spelt(word))}` | {_cell(option.meaning)} |"


def _cell(text: str) -> str:
    """Return text of help as Markdown: no character of it means anything there, and pages that it names are links."""
    plain = text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    return re.sub(r"docs/([\w-]+\.md)", r"[\g<0>](\1)", plain)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
