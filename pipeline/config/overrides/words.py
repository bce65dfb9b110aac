"""Translate overrides as users write them into Hydra's syntax, and refuse those that Hydra would silently misread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.core.errors import UsageError

_MAPPINGS = (  # fields whose entries have free names: the user's own, or torch's
    "cluster.env", "cluster.environment", "cluster.node_selector", "cluster.labels",
    "model.args", "optimizer.args", "optimizer.arguments", "trainer.loss_args", "trainer.metrics",
    "dataset.args", "dataset.augmentation_args", "program.args", "program.env", "step",
)  # fmt: skip
_OPEN = (*(f"{name}." for name in _MAPPINGS), *(f"{name}={{" for name in _MAPPINGS if name != "cluster.env"))
NAME_A_SCRIPT = ("program.script", "program.module", "program.command")
_OF_A_SCRIPT = tuple(f"{name}=" for name in NAME_A_SCRIPT)
_HOSTS = ("cluster.hosts", "cluster.spares")
_NAME = r"\s*([\w.-]+@)?[\w.-]+(:\d+)?\s*"
# not compiled here: most commands have no word that needs them
_NAMED = rf"(?P<field>\+{{0,2}}cluster\.(hosts|spares))=\[(?P<names>{_NAME}(,{_NAME})*)\]$"
_NOT_A_NAME = r"[{,]\s*name\s*:\s*(true|false)\s*[,}]"
_CLASS = r"^(\+{0,2})dataset\.class="  # no field of a dataclass can have this name
_NO_NAMES = ("null", "true", "false")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Translate overrides into Hydra's syntax.

    An entry of a mapping with free names gets ``++``, as Hydra wants it before new names. Names of hosts become
    mappings. ``program=script`` is added where a script is named.

    Raises UsageError: a repeated key in a mapping, as Hydra would drop the first; a host named null, true or false.
    """
    for word in overrides:
        if "{" in word and (key := next(_repeated_keys(word), None)) is not None:
            advice = "keep one of the two"
            if word.lstrip("+").startswith(_HOSTS):
                advice = "each host has braces of its own, [{name: node0}, {name: node1}]"
                advice += ", or is a name alone, [node0,node1]"
            raise UsageError(f"{word}: {key} stands twice in one {{…}}; {advice}")
        if word.lstrip("+").startswith(_HOSTS) and (match := re.search(_NOT_A_NAME, word, re.IGNORECASE)):
            raise UsageError(f"{word}: {match[1]} is no name of a host; where one is called so, write '{match[1]}'")
    if any(word.startswith(_OF_A_SCRIPT) for word in overrides):
        overrides = [
            *([] if any(word.startswith("program=") for word in overrides) else ["program=script"]),
            *overrides,
        ]
    return [_translated(word) for word in overrides]


def _translated(word: str) -> str:
    if word.startswith(_OPEN):
        return f"++{word}"
    bare = word.lstrip("+")
    if bare.startswith("dataset.class="):
        return re.sub(_CLASS, r"\1dataset.class_name=", word)
    return re.sub(_NAMED, _as_mappings, word, flags=re.ASCII) if bare.startswith(_HOSTS) else word


def quoted_run(word: str) -> str:
    """Put the value of ``init.run`` into the quotes that Hydra needs around = and spaces, and that a shell removes."""
    name, _, value = word.partition("=")
    if name.lstrip("+") != "init.run" or value[:1] in ("'", '"') or value in ("", "null"):
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def _repeated_keys(word: str) -> Iterator[str]:
    """Yield each key that repeats an earlier one of its mapping, as Hydra's own lexer reads the override."""
    from hydra.grammar.gen.OverrideLexer import InputStream, OverrideLexer  # type: ignore[attr-defined]  # few words have braces

    lexer = OverrideLexer(InputStream(word))
    lexer.removeErrorListeners()  # Hydra reports what it can't read
    tokens = lexer.getAllTokens()
    mappings: list[set[str]] = []  # the keys of each open brace
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == OverrideLexer.BRACE_OPEN:
            mappings.append(set())
        elif token.type == OverrideLexer.BRACE_CLOSE and mappings:
            mappings.pop()
        elif mappings and following is not None and following.type == OverrideLexer.COLON:
            if token.text in mappings[-1]:
                yield token.text
            mappings[-1].add(token.text)


def _as_mappings(word: re.Match[str]) -> str:
    """Replace each name in ``cluster.hosts=[node1,me@node2:2222]`` by the mapping that it stands for."""
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
