"""Secrets in words of a command line: as files and messages may hold them, and as a child process gets them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from pipeline.core.redact import ANYWHERE, HIDDEN, SIGNATURE, WEBHOOK, Secret, hide, in_forms, is_secret_name, tells

_OWN_REFERENCE = re.compile(r"(['\"]?)\$\{oc\.env:PACELINE_TOLD_\d+\}\1")
_REFERENCE = re.compile(r"(['\"]?)\$\{oc\.env:\w+\}\1")
_PAIR = re.compile(  # in Hydra's {…}
    r"([A-Za-z_][\w.-]*)(\s*:\s*)('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\$\{[^{}]*\}|[^,{}\[\]]+)"
)


def in_word(word: str, values: Collection[str] = (), names: Collection[str] = ()) -> str:
    """A word of a command line as files and messages may hold it. ``${oc.env:NAME}`` is no secret, and stays
    (unless ``by_environment`` made it: the variable is gone with its process).

    Args:
        values: secrets that are known of the configuration.
        names: what ``cluster.secrets`` names.
    """
    return hide(_OWN_REFERENCE.sub(HIDDEN, _told(word, names)[0]), values)


def in_field(field: str, value: str) -> str:
    """``field='value'`` as messages may hold it; a secret is left out whole, whatever else it holds."""
    whole = isinstance(value, Secret) or _told(f"{field}={value}", ())[1]
    return f"{field}={HIDDEN if whole else hide(repr(value))}"


def told_in(words: Iterable[str]) -> frozenset[str]:
    """The secrets that stand in words of a command line, and parts of them that a parser's complaint may quote."""
    listed = list(words)
    names = {name for word in listed for name in _names_told(word)}
    values = {value for word in listed for value in _told(word, names)[1]}
    parts = {part for value in values for part in re.split(r"[][,{}()\s=:'\"]", value) if len(part) >= ANYWHERE}
    return frozenset(values | parts).union(*map(in_forms, listed))


def told_anew(word: str, values: Mapping[str, str]) -> str:
    """A stored word with ``values`` (by name, as Hydra writes them) for the placeholders of these variables.

    ``cluster.env.API_TOKEN=***`` is told anew by API_TOKEN, ``cluster.env.PROXY=http://***@host`` by PROXY.
    """
    key, equals, value = word.partition("=")
    if not equals or HIDDEN not in value:
        return word
    if "{" not in value:
        return f"{key}={values.get(key.rpartition('.')[2], value)}"

    def anew(pair: re.Match[str]) -> str:
        return pair[1] + pair[2] + (values.get(pair[1], pair[3]) if HIDDEN in pair[3] else pair[3])

    return f"{key}={_PAIR.sub(anew, value)}"


def by_environment(words: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Words for the command line of a child, and what its environment has to hold: process lists show the former."""
    environment: dict[str, str] = {}

    def reference(value: str) -> str:
        name = f"PACELINE_TOLD_{len(environment)}"
        environment[name] = _unquoted(value)
        return f"'${{oc.env:{name}}}'"

    def moved(name: str, value: str) -> str:
        return value if in_word(f"{name}={value}") == f"{name}={value}" else reference(value)

    kept = []
    for word in words:
        key, equals, value = word.partition("=")
        if in_word(word) == word or not equals:
            kept.append(word)
        elif "{" in value:
            kept.append(f"{key}={_PAIR.sub(lambda at: at[1] + at[2] + moved(at[1], at[3].strip()), value)}")
        else:
            kept.append(f"{key}={reference(value)}")
    return kept, environment


def _names_told(word: str) -> list[str]:
    key, _, value = word.lstrip("+").partition("=")
    return re.findall(r"\w+", value) if key == "cluster.secrets" else []


def _told(word: str, names: Collection[str]) -> tuple[str, list[str]]:
    """The word with placeholders for what its names say is secret, and what that was."""
    key, equals, value = word.partition("=")
    if not equals:
        return word, []
    field = key.lstrip("+~").partition("@")[0]
    last = field.rpartition(".")[2]
    if field == "dataset.source":
        value = SIGNATURE.sub(r"\1", value)
    if _is_told(last, value, names) or (field == ".".join(WEBHOOK) and not _REFERENCE.fullmatch(value)):
        return f"{key}={HIDDEN}", [_unquoted(value)]
    found: list[str] = []

    def inner(pair: re.Match[str]) -> str:
        if not _is_told(pair[1], pair[3].strip(), names):
            return pair[0]
        found.append(_unquoted(pair[3].strip()))
        return f"{pair[1]}{pair[2]}{HIDDEN}"

    return f"{key}={_PAIR.sub(inner, value) if '{' in value else value}", found


def _is_told(name: str, value: str, names: Collection[str]) -> bool:
    if _REFERENCE.fullmatch(value):
        return False
    return name in names or (is_secret_name(name) and tells(_unquoted(value)))


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace(f"\\{value[0]}", value[0])
    return value
