"""Write docs/configuration.md, every field with type, default and meaning: ``python -m tests.architecture.reference``.

The meaning of a field is in the docstring of its settings class, in the section ``Attributes:``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import yaml  # type: ignore[import-untyped]

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.config.conf_files import OptionGroup, groups
from pipeline.config.schema import OPTIONS, PROGRAMS, RootConfig
from pipeline.core.places import HOME

PAGE = HOME / "docs/configuration.md"

_HEAD = """# Configuration

All groups and fields that you can set on the command line. `doit config …` prints the values of one configuration and
the source of each, and `doit help train` lists the groups with their options.

The default of a field is that of its settings class. The table of options shows which fields an option's file in
`conf/` changes. [Your own defaults](team-defaults.md#your-own-defaults) take precedence over both, an experiment over
these, and the command line over all. `null` means "none" in YAML.

This page is generated from the settings classes: `python -m tests.architecture.reference`.
"""
_ENTRY = re.compile(r"^    (?P<name>\w+): (?P<meaning>.+(?:\n {8,}.+)*)", re.MULTILINE)
_PLACEHOLDERS = ("name", "launcher")  # fields that repeat the option's name


def page() -> str:
    """Return the page as Markdown."""
    by_name = {group.name: group for group in groups()}
    classes = get_type_hints(RootConfig)
    parts = [_HEAD, _section("Top level", {"seed": _field(RootConfig, "seed")})]
    for name, settings in classes.items():
        if isinstance(settings, type) and dataclasses.is_dataclass(settings):
            parts.append("\n".join(_group(name, settings, by_name.get(name))))
    parts.append("\n".join(_recipes(by_name["experiment"])))
    return "\n".join(parts)


def meanings(settings: type[Any]) -> dict[str, str]:
    """Return the meaning of each field, from the docstrings of a settings class and its bases."""
    texts: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        section = inspect.cleandoc(vars(kind).get("__doc__") or "").partition("\nAttributes:\n")[2]
        texts |= {item["name"]: " ".join(item["meaning"].split()) for item in _ENTRY.finditer(section)}
    return texts


def _group(name: str, base: type[Any], group: OptionGroup | None) -> Iterator[str]:
    yield _section(f"`{name}`", _fields(name, base, without=()), _summary(base))
    if group is None or name == "sweep":
        return
    rows = [
        (f"`{name}={option}`{' (default)' if option == group.default else ''}", about, _set_by(name, option))
        for option, about in group.options.items()
    ]
    yield _table(("option", "what it is", "sets"), rows)
    for option, settings in _settings(name).items():
        own = _fields(name, settings, without=[item.name for item in dataclasses.fields(base)])
        if own:
            yield f"Fields of `{name}={option}` alone:\n\n{_field_table(own)}"
    if name == "cluster":
        hosts = {f"cluster.hosts[].{key}": _field(HostConfig, key) for key in meanings(HostConfig)}
        yield f"An entry of `cluster.hosts`:\n\n{_field_table(hosts)}"


def _settings(group: str) -> dict[str, type[Any]]:
    """Return the settings classes of Paceline's own options in a group."""
    if group == "program":
        return dict(PROGRAMS)
    options = OPTIONS.get(group)
    return {name: options.settings(name) for name in options.names() if options.is_own(name)} if options else {}


def _recipes(group: OptionGroup) -> Iterator[str]:
    yield "## `experiment`\n\nA recipe: options and fields that go together. Words on the command line win.\n"
    yield _table(("option", "what it is"), [(f"`experiment={name}`", about) for name, about in group.options.items()])


def _fields(group: str, settings: type[Any], *, without: Any) -> dict[str, tuple[str, str, str]]:
    names = [item.name for item in dataclasses.fields(settings) if item.name not in (*without, *_PLACEHOLDERS)]
    if group == "sweep":
        names.insert(0, "name")
    return {f"{group}.{name}": _field(settings, name) for name in names}


def _field(settings: type[Any], name: str) -> tuple[str, str, str]:
    """Return type, default and meaning of a field."""
    item = next(item for item in dataclasses.fields(settings) if item.name == name)
    default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
    kind = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
    either = "int | auto" if default == "auto" else "any"
    shown = kind.replace("None", "null").replace("HostConfig", "host").replace("Any", either)
    return shown, "" if default == "???" else _shown(default), meanings(settings).get(name, "")


def _set_by(group: str, option: str) -> str:
    text = (HOME / "conf" / group / f"{option}.yaml").read_text(encoding="utf-8")
    values = {key: value for key, value in yaml.safe_load(text).items() if key not in (*_PLACEHOLDERS, "defaults")}
    return ", ".join(f"`{key}: {_shown(value)}`" for key, value in values.items())


def _shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump({"": value}, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.strip()[1:-1].partition(": ")[2]


def _summary(settings: type[Any]) -> str:
    return inspect.cleandoc(settings.__doc__ or "").partition("\n\n")[0].partition("\nAttributes:")[0]


def _section(title: str, fields: Mapping[str, tuple[str, str, str]], summary: str = "") -> str:
    return "\n".join(filter(None, (f"## {title}\n", f"{summary}\n" if summary else "", _field_table(fields))))


def _field_table(fields: Mapping[str, tuple[str, str, str]]) -> str:
    rows = [(f"`{name}`", kind, default and f"`{default}`", text) for name, (kind, default, text) in fields.items()]
    return _table(("field", "type", "default", "meaning"), rows) if rows else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
