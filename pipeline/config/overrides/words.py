"""Overrides as people write them, made into what Hydra takes; what it would silently misread is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.core.errors import UsageError

_MAPPINGS = (  # whose names are the user's own, or torch's
    "cluster.env", "cluster.environment", "cluster.node_selector", "cluster.labels",
    "model.args", "optimizer.args", "optimizer.arguments", "trainer.loss_args", "trainer.metrics",
    "dataset.args", "dataset.augmentation_args", "program.args", "program.env", "step",
)  # fmt: skip
_OPEN = (*(f"{name}." for name in _MAPPINGS), *(f"{name}={{" for name in _MAPPINGS if name != "cluster.env"))
NAME_A_SCRIPT = ("program.script", "program.module", "program.command")
_OF_A_SCRIPT = tuple(f"{name}=" for name in NAME_A_SCRIPT)
_HOSTS = ("cluster.hosts", "cluster.spares")
_NAME = r"\s*([\w.-]+@)?[\w.-]+(:\d+)?\s*"
# compiled by the words that have use for them: most calls have none
_NAMED = rf"(?P<field>\+{{0,2}}cluster\.(hosts|spares))=\[(?P<names>{_NAME}(,{_NAME})*)\]$"
_NOT_A_NAME = r"[{,]\s*name\s*:\s*(true|false)\s*[,}]"
_CLASS = r"^(\+{0,2})dataset\.class="  # no field of a dataclass can have this name
_NO_NAMES = ("null", "true", "false")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Hydra wants ``++`` before a new name; in a mapping of the user's own every name is new or known alike. It wants
    mappings for hosts, and people write their names. Whoever names a script needs no program=script.

    Raises:
        UsageError: a mapping that has a key twice, of which Hydra drops the first; a host that is null, true or false.
    """
    for word in overrides:
        if "{" in word and (key := _doubled(word)) is not None:
            raise UsageError(f"{word}: {key} stands twice in one {{…}}; {_mended(word)}")
        if word.lstrip("+").startswith(_HOSTS) and (match := re.search(_NOT_A_NAME, word, re.IGNORECASE)):
            raise UsageError(f"{word}: {match[1]} is no name of a host; where one is called so, write '{match[1]}'")
    if any(word.startswith(_OF_A_SCRIPT) for word in overrides):
        overrides = [
            *([] if any(word.startswith("program=") for word in overrides) else ["program=script"]),
            *overrides,
        ]
    return [_with_own_names(word) for word in overrides]


def _with_own_names(word: str) -> str:
    if word.startswith(_OPEN):
        return f"++{word}"
    bare = word.lstrip("+")
    if bare.startswith("dataset.class="):
        return re.sub(_CLASS, r"\1dataset.class_name=", word)
    return re.sub(_NAMED, _as_mappings, word, flags=re.ASCII) if bare.startswith(_HOSTS) else word


def quoted_run(word: str) -> str:
    """``init.run`` with its words in quotes, which a shell has taken away and Hydra needs: they hold = and spaces."""
    name, _, value = word.partition("=")
    if name.lstrip("+") != "init.run" or value[:1] in ("'", '"') or value in ("", "null"):
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def _mended(word: str) -> str:
    if word.lstrip("+").startswith(_HOSTS):
        return "each host has braces of its own, [{name: node0}, {name: node1}], or is a name alone, [node0,node1]"
    return "keep one of the two"


def _doubled(word: str) -> str | None:
    """The first key that stands twice in one mapping."""
    from pipeline.config.overrides.doubled import doubled  # not before: Hydra's lexer, for a word with braces alone

    return next(doubled(word), None)


def _as_mappings(word: re.Match[str]) -> str:
    """``cluster.hosts=[node1,me@node2:2222]`` with each as the mapping that it stands for."""
    entries = []
    for item in word["names"].split(","):
        user, _, place = item.strip().rpartition("@")
        name, _, port = place.partition(":")
        if item.strip().lower() in _NO_NAMES:
            raise UsageError(
                f"{word[0]}: {name} is no name of a host; where one is called so, write {{name: '{name}'}}"
            )
        known = {"name": f"'{name}'", "user": user and f"'{user}'", "port": port}
        entries.append(", ".join(f"{field}: {value}" for field, value in known.items() if value))
    return f"{word['field']}=[{', '.join(f'{{{entry}}}' for entry in entries)}]"
