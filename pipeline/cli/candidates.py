"""Tab completion: ``python -m pipeline.cli.candidates SHELL LINE`` prints the words that the last one can become.

A shell calls it at every Tab, so only what the current word needs is imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_type_hints

from pipeline.cli.invocation import typed_runs_dir
from pipeline.cli.verbs import VERBS
from pipeline.config.groups import groups, runs_dir
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT
from pipeline.core.specs import State

_OF_DOIT = ("help", "list", "tabcompletion")


def candidates(line: str, root: Path = ROOT) -> list[str]:
    """Return the words that the last one of ``line`` can become; none if it can be anything, such as a file.

    ``line`` is the command line from ``doit`` up to the cursor.
    """
    *before, current = [*line.split(), ""] if line[-1:].isspace() else line.split()
    verb = next((word for word in before[1:] if word in VERBS), None)
    if verb is None or before[1:2] == ["help"]:
        words: Iterable[str] = (*VERBS, *_OF_DOIT)
    elif "=" in current:
        words = _values(verb, before, current, root)
    else:
        keys = _option_values("run", "KEY", before, root) if "run" in VERBS[verb].options else ()
        words = (*_names(verb, current, root), *keys)
    return sorted({word for word in words if word.startswith(current)})


def _names(verb: str, current: str, root: Path) -> Iterator[str]:
    """Return names up to their ``=``; of fields only the section, until its point is typed."""
    if current.startswith("-"):
        yield from (option.typed(name) for name, option in VERBS[verb].options.items())
        return
    yield from (f"{name}=" for name in VERBS[verb].options)
    if not VERBS[verb].overrides:
        return
    section, point, _ = current.lstrip("+~").partition(".")
    if point:
        mark = current[: len(current) - len(current.lstrip("+~"))]
        yield from (f"{mark}{section}.{name}=" for name in _fields(section))
        return
    names = [group.name for group in groups(root)]
    yield from (f"{name}=" for name in (*names, "seed"))
    yield from (f"{name}." for name in (*names, "paths") if name != "experiment")


def _values(verb: str, before: Sequence[str], current: str, root: Path) -> Iterator[str]:
    """Return the name with each of its values; after a comma, with another one."""
    name, _, value = current.partition("=")
    typed = f"{name}={value[: value.rfind(',') + 1]}"
    options = VERBS[verb].options
    if name in options:
        yield from (f"{typed}{item}" for item in _option_values(name, options[name].value, before, root))
        return
    for group in groups(root):
        if group.name == name:
            yield from (f"{typed}{option}" for option in group.options)
    section, point, field = name.lstrip("+~").partition(".")
    if point and VERBS[verb].overrides and _fields(section).get(field) == "bool":
        yield from (f"{typed}true", f"{typed}false")


def _option_values(name: str, form: str, before: Sequence[str], root: Path) -> Iterator[str]:
    """Return the values of an option: ``1``, ``text|mermaid|dot``, a state, or existing runs and sweeps."""
    runs = runs_dir(root, before) or root / typed_runs_dir(before)
    if name == "run":
        yield from (path.parent.name for path in runs.glob("*/key.json"))
    elif name == "sweep":
        yield from (path.name for path in runs.glob("sweeps/*"))
    elif form == "STATE":
        yield from State
    elif form == "1" or "|" in form:
        yield from form.split("|")


def _fields(section: str) -> dict[str, str]:
    """Return the fields of a section with their types, for all options."""
    from pipeline.config import schema  # half a Tab's time: for names of fields alone

    classes = [get_type_hints(schema.RootConfig).get(section)]
    classes += schema.PROGRAMS.values() if section == "program" else ()
    if section in schema.OPTIONS:
        for name in schema.OPTIONS[section].names():
            with suppress(UsageError):
                classes.append(schema.OPTIONS[section].settings(name))
    return {
        item.name: getattr(item.type, "__name__", str(item.type))
        for settings in classes
        if isinstance(settings, type) and dataclasses.is_dataclass(settings)
        for item in dataclasses.fields(settings)
        if not (item.name == "name" and section in schema.OPTIONS)
    }


def _main(shell: str, line: str) -> None:
    words = candidates(line)
    typed = line.split()[-1] if line.split() and not line[-1].isspace() else ""
    if shell == "bash":  # it takes what stands behind the = for a word of its own
        words = [word[typed.rfind("=") + 1 :] for word in words]
    print("\n".join(words))


if __name__ == "__main__":
    _main(*sys.argv[1:])
