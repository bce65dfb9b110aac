"""What help says of the groups, as the settings classes do, which are more than tab completion needs."""

from __future__ import annotations

import re
import typing

from pipeline.config.groups import Group
from pipeline.config.schema import OPTIONS, RootConfig, installed_programs

_RECIPE = "A recipe: options and fields that go together. Words on the command line win."


def about(group: Group) -> str:
    """The first sentence of the docstring of the group's settings."""
    settings = typing.get_type_hints(RootConfig).get(group.name)
    text = " ".join((settings.__doc__ or "").split()) if settings is not None else _RECIPE
    return f"{re.split(r'[.;] ', text)[0].rstrip('.')}."


def installed(group: Group) -> dict[str, str]:
    """The options that other installed packages bring, and their modules."""
    modules = OPTIONS[group.name].installed() if group.name in OPTIONS else {}
    modules = installed_programs() if group.name == "program" else modules
    return {name: f"Of an installed package ({module})." for name, module in modules.items()}
