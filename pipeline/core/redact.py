"""Find secrets in texts, command lines and configurations, and replace them with the placeholder ``***``.

A secret is recognized by its name (``API_TOKEN``), by its form (``https://me:pw@host``), or because ``cluster.secrets``
lists it. It reaches the ranks' environment and is stored nowhere else. docs/secrets.md lists the rules for users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
_LEAST = 4  # characters: shorter values are not masked, because they occur in too many lines
ANYWHERE = 8  # characters from which a value is masked inside words too
_TOKEN_LENGTH = 16  # a login of this length without a password is a token
_SHORTEST_FORM = 14  # characters of the shortest text without :// that one of FORMS matches
_SWITCHES = ("", "true", "false", "yes", "no", "on", "off", "none", "null", "auto")  # AUTH=none is a setting

_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|TOKEN(?![A-Z])"
    r"|(?:API|ACCESS|PRIVATE|ACCOUNT|SIGNING|ENCRYPTION)_?KEYS?(?![A-Z])"
    r"|(?<![A-Z])(?:AUTH|AUTHORIZATION|BEARER|COOKIE|JWT|PASS)(?![A-Z])|_PWD(?![A-Z])"
)
_PASSWORD = re.compile(r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|_PWD(?![A-Z])")
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|SOCK)$")  # the value is a path to a secret, which may be shown
# tokens of a vocabulary (transformers' special tokens, `--image_token '<image>'`)
_VOCABULARY = re.compile(
    r"(?:^|_)(?:BOS|EOS|EOT|EOD|UNK|SEP|PAD|CLS|MASK|START|STOP|END|SPECIAL|IMAGE|VIDEO|AUDIO|TRIGGER|PLACEHOLDER)_TOKEN$"
)
_OPTION = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)=")
_REFERENCED = re.compile(r"\$\{oc\.env:(\w+)")

Rule = tuple[str, str]
"""A regular expression and its replacement. Plain data, because the agents on the hosts receive the rules too."""

_LOGIN = r"(://)([^\s/?#'\"]+)(@)"  # greedy: a password may hold an unescaped @
_QUERY = (  # the query of a signed URL grants access
    r"([?&](?i:[\w.-]*(?:token|password|passwd|secret|signature|credential|api[_-]?key)|sig|auth)=)([^&\s'\"#]+)"
)
_PEM = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^'\"]*?(?:-----END [A-Z ]*PRIVATE KEY-----|(?=['\"])|\Z)"
_TOKENS = (
    r"(?<![A-Za-z0-9])(?:"
    r"A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{35}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}|xox[abeprs]-[\w-]{10,}|sk-[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]+)"
)
_HEADER = r"(?i:(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+))[\w.~+/=-]+"
FORMS: tuple[Rule, ...] = (
    (_LOGIN, rf"\1{HIDDEN}\3"),
    (_QUERY, rf"\1{HIDDEN}"),
    (_PEM, HIDDEN),
    (_TOKENS, HIDDEN),
    (_HEADER, rf"\1{HIDDEN}"),
)
"""Rules for secrets recognizable by form: logins in addresses, signed queries, private keys, tokens."""

SIGNATURE = re.compile(r"(://[^\s?#'\"]*)\?[^\s'\"]*")  # an address with its query


class Secret(str):
    """A configuration text that is secret whatever its field is called, as it contains ``${oc.env:API_TOKEN}``."""

    parts: frozenset[str] = frozenset()  # the values of such variables in it


# ---------------------------------------------------------------------------------------- names and texts
@cache
def is_secret_name(name: str) -> bool:
    """Return True if this name marks a secret: ``API_TOKEN``, ``dbPassword``, not ``MAX_TOKENS`` or ``EOS_TOKEN``."""
    words = _words(name)
    return _NAME.search(words) is not None and not (_PLACE.search(words) or _VOCABULARY.search(words))


@cache
def _words(name: str) -> str:
    """Return ``dbPassword`` and ``db-password`` as ``DB_PASSWORD``."""
    return re.sub(r"[^A-Z0-9]+", "_", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).upper())


def needs_masking(name: str, value: str) -> bool:
    """Return True if the value of a secret name must be masked; False if it is obviously a setting.

    Settings are switches (``AUTH=none``) and numbers below eight digits (``N_TOKEN=32768``); below four digits if the
    name means a password.
    """
    fewest_digits = _LEAST if _PASSWORD.search(_words(name)) else ANYWHERE
    return value.lower() not in _SWITCHES and not (value.isdecimal() and len(value) < fewest_digits)


def rules(values: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Return the rules that mask ``values``, followed by FORMS."""
    spelled = {text for value in values for text in _spellings(value) if len(text) >= _LEAST and text != HIDDEN}
    # the longest first: of two secrets of which one begins with the other, nothing of the longer one must remain
    longest_first = sorted(spelled, key=lambda text: (-len(text), text))
    pattern = "|".join(_bounded(text) for text in longest_first)
    return ((pattern, HIDDEN), *FORMS) if pattern else FORMS


def hide(text: str, values: Collection[str] = ()) -> str:
    """Mask ``values`` and secrets recognizable by form."""
    if _is_plain(text) and not values:
        return text
    for pattern, shown in _compiled(frozenset(values)):
        text = pattern.sub(shown, text)
    return text


def secrets_of_environment(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the secrets in a process environment, which libraries may quote in messages."""
    named = {value for name, value in environment.items() if is_secret_name(name)}
    return frozenset(value for value in named if len(value) >= ANYWHERE)


def secrets_by_form(value: str) -> Iterator[str]:
    """Yield the parts that are secret by their form, such as ``me:pw`` and ``pw`` of ``https://me:pw@host``."""
    if _is_plain(value):
        return
    for match in re.finditer(_LOGIN, value):
        user, colon, password = match[2].partition(":")
        if colon or len(user) >= _TOKEN_LENGTH:  # a user name alone is no secret
            yield from (part for part in (match[2], password, unquote(password)) if part)
    yield from (match[2] for match in re.finditer(_QUERY, value))
    yield from (match[0] for pattern in (_PEM, _TOKENS) for match in re.finditer(pattern, value))


def _is_plain(text: str) -> bool:
    """Return True if the text is too short to match FORMS: a fast path for most fields of a configuration."""
    return len(text) < _SHORTEST_FORM and "://" not in text


@cache
def _compiled(values: frozenset[str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), shown) for pattern, shown in rules(values)]


def _spellings(value: str) -> set[str]:
    """Return the value and its lines, plain and as written in JSON, repr (str and bytes), URLs and Hydra quotes."""
    plain = {value, *(line.strip() for line in value.splitlines())}
    written = {json.dumps(text)[1:-1] for text in plain} | {repr(text)[1:-1] for text in plain}
    encoded = {text.encode(errors="surrogateescape") for text in plain}
    return (
        plain
        | written
        | {repr(text)[2:-1] for text in encoded}
        | {quote(text, safe="") for text in encoded}
        | {text.replace("'", r"\'") for text in plain}
    )


def _bounded(text: str) -> str:
    """Return a pattern for the text; a short text is matched only as a whole word."""
    return re.escape(text) if len(text) >= ANYWHERE else rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"


# ------------------------------------------------------------------------------- words of a command line
_OWN_REFERENCE = re.compile(r"(['\"]?)\$\{oc\.env:PACELINE_TOLD_\d+\}\1")  # written by move_to_environment
_REFERENCE = re.compile(r"(['\"]?)\$\{oc\.env:\w+\}\1")
_PAIR = re.compile(  # in Hydra's {…}
    r"([A-Za-z_][\w.-]*)(\s*:\s*)('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\$\{[^{}]*\}|[^,{}\[\]]+)"
)


def mask_word(word: str, values: Collection[str] = (), names: Collection[str] = ()) -> str:
    """Mask the secrets of a command-line argument: ``values``, and values of ``names`` (those in ``cluster.secrets``).

    ``${oc.env:NAME}`` is no secret and stays. Only a reference written by ``move_to_environment`` is masked, because
    its variable exists in one process alone.
    """
    return hide(_OWN_REFERENCE.sub(HIDDEN, _masked(word, names)[0]), values)


def mask_field(field: str, value: str) -> str:
    """Return ``field='value'`` for messages; a field with a secret is masked as a whole."""
    is_secret = isinstance(value, Secret) or _masked(f"{field}={value}", ())[1]
    return f"{field}={HIDDEN if is_secret else hide(repr(value))}"


def secrets_in(words: Iterable[str]) -> frozenset[str]:
    """Return the secrets in command-line arguments, and parts of them that a parser's error message may quote."""
    arguments = list(words)
    names = {name for word in arguments for name in _secret_names(word)}
    values = {value for word in arguments for value in _masked(word, names)[1]}
    parts = {part for value in values for part in re.split(r"[][,{}()\s=:'\"]", value) if len(part) >= ANYWHERE}
    return frozenset(values | parts).union(*map(secrets_by_form, arguments))


def restore_secrets(word: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders in a stored override with ``values``: variable name → value in Hydra's syntax.

    ``cluster.env.API_TOKEN=***`` takes the value of API_TOKEN, ``cluster.env.PROXY=http://***@host`` that of PROXY.
    """
    key, equals, value = word.partition("=")
    if not equals or HIDDEN not in value:
        return word
    if "{" not in value:
        return f"{key}={values.get(key.rpartition('.')[2], value)}"

    def with_value(pair: re.Match[str]) -> str:
        return pair[1] + pair[2] + (values.get(pair[1], pair[3]) if HIDDEN in pair[3] else pair[3])

    return f"{key}={_PAIR.sub(with_value, value)}"


def move_to_environment(words: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Replace secrets in arguments by references to variables, because process lists show arguments.

    Returns the arguments for a child's command line, and the variables that its environment needs (name → secret).
    """
    environment: dict[str, str] = {}

    def reference(value: str) -> str:
        name = f"PACELINE_TOLD_{len(environment)}"
        environment[name] = _unquoted(value)
        return f"'${{oc.env:{name}}}'"

    def replaced(name: str, value: str) -> str:
        return value if mask_word(f"{name}={value}") == f"{name}={value}" else reference(value)

    arguments = []
    for word in words:
        key, equals, value = word.partition("=")
        if mask_word(word) == word or not equals:
            arguments.append(word)
        elif "{" in value:  # a dictionary in Hydra's syntax: only its secret values
            pairs = _PAIR.sub(lambda pair: pair[1] + pair[2] + replaced(pair[1], pair[3].strip()), value)
            arguments.append(f"{key}={pairs}")
        else:
            arguments.append(f"{key}={reference(value)}")
    return arguments, environment


def _secret_names(word: str) -> list[str]:
    """Return the names of variables in an override of ``cluster.secrets``."""
    key, _, value = word.lstrip("+").partition("=")
    return re.findall(r"\w+", value) if key == "cluster.secrets" else []


def _masked(word: str, names: Collection[str]) -> tuple[str, list[str]]:
    """Mask values with secret names in an override; also return these values."""
    key, equals, value = word.partition("=")
    if not equals:
        return word, []
    field = key.lstrip("+~").partition("@")[0]  # without the signs of Hydra's grammar
    last = field.rpartition(".")[2]
    if field == "dataset.source":  # any query of its address may be a signature
        value = SIGNATURE.sub(r"\1", value)
    if _is_secret(last, value, names):
        return f"{key}={HIDDEN}", [_unquoted(value)]
    values: list[str] = []

    def inner(pair: re.Match[str]) -> str:
        if not _is_secret(pair[1], pair[3].strip(), names):
            return pair[0]
        values.append(_unquoted(pair[3].strip()))
        return f"{pair[1]}{pair[2]}{HIDDEN}"

    return f"{key}={_PAIR.sub(inner, value) if '{' in value else value}", values


def _is_secret(name: str, value: str, names: Collection[str]) -> bool:
    if _REFERENCE.fullmatch(value):
        return False
    return name in names or (is_secret_name(name) and needs_masking(name, _unquoted(value)))


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace(f"\\{value[0]}", value[0])
    return value


# -------------------------------------------------------------------------------------------- configuration
def referenced_secrets(raw: Any) -> set[str]:
    """Return the variables with secret names that an unresolved configuration reads from the environment."""
    texts = (value for _, value in _leaves(raw, ()) if isinstance(value, str))
    return {name for text in texts for name in _REFERENCED.findall(text) if is_secret_name(name)}


def mark_secrets(resolved: Any, values: Collection[str]) -> Any:
    """Wrap each text of the configuration that contains one of ``values`` in Secret."""
    if isinstance(resolved, Mapping):
        return {name: mark_secrets(inner, values) for name, inner in resolved.items()}
    if isinstance(resolved, list):
        return [mark_secrets(inner, values) for inner in resolved]
    if not isinstance(resolved, str):
        return resolved
    parts = {value for value in values if value == resolved or (len(value) >= ANYWHERE and value in resolved)}
    if not parts:
        return resolved
    secret = Secret(resolved)
    secret.parts = frozenset(parts)
    return secret


def secret_values(config: Mapping[str, Any]) -> frozenset[str]:
    """Return all secret texts of a resolved configuration: by name, ``cluster.secrets``, form and reference."""
    names = _listed_names(config)
    values: set[str] = set()
    for path, value in _leaves(config, ()):
        text = _as_text(value)
        if text is None or text == HIDDEN:
            continue
        if _is_secret_field(path, text, names):
            values.update(_parts(text))
        values.update(secrets_by_form(text))
    return frozenset(values)


def without_secrets(config: Mapping[str, Any], values: frozenset[str] | None = None) -> dict[str, Any]:
    """Mask the secrets (``values``, if computed) of a resolved configuration; drop the query of the data's address."""
    values = secret_values(config) if values is None else values
    shown: dict[str, Any] = _shown(config, (), _listed_names(config), values)
    dataset = shown.get("dataset")
    if isinstance(dataset, dict) and isinstance(dataset.get("source"), str):
        dataset["source"] = SIGNATURE.sub(r"\1", dataset["source"])
    return shown


def placeholders(config: Mapping[str, Any]) -> list[str]:
    """Return the fields that hold a placeholder instead of a value: ``cluster.env.API_TOKEN``."""
    return [".".join(path) for path, value in _leaves(config, ()) if isinstance(value, str) and HIDDEN in value]


def _listed_names(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of variables in ``cluster.secrets``."""
    cluster = config.get("cluster")
    return frozenset(cluster.get("secrets") or ()) if isinstance(cluster, Mapping) else frozenset()


def _is_secret_field(path: Sequence[str], value: str, names: Collection[str]) -> bool:
    """Return True if the whole value of the field is secret, not only a part. ``path``: its name in each section."""
    if isinstance(value, Secret) or (path and path[-1] in names):
        return True
    return any(is_secret_name(name) and needs_masking(name, value) for name in path)


def _as_text(value: Any) -> str | None:
    """Return a text or whole number as text, because a password may have only digits; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def _shown(value: Any, path: tuple[str, ...], names: Collection[str], values: frozenset[str]) -> Any:
    """Return ``value``, which stands at ``path`` of a configuration, with its secrets masked."""
    if isinstance(value, Mapping):
        return {name: _shown(inner, (*path, str(name)), names, values) for name, inner in value.items()}
    if isinstance(value, list):
        items = list[Any]()
        for prefix, item_path, item in _in_list(value, path):
            item_shown = _shown(item, item_path, names, values)
            items.append(f"{prefix}{item_shown}" if prefix else item_shown)
        return items
    text = _as_text(value)
    if text is not None and _is_secret_field(path, text, names):
        return HIDDEN
    if not isinstance(value, str) or len(value) < ANYWHERE:
        return value
    # other fields may contain a secret; a short one could be there by chance
    return hide(value, [text for text in values if len(text) >= ANYWHERE])


def split_secrets(
    env: Mapping[str, str], values: Collection[str], names: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Split a host's environment into ``Host.env`` (all variables, secrets masked) and ``Host.secrets``."""
    shown = {name: _shown(value, (name,), names, frozenset(values)) for name, value in env.items()}
    return shown, {name: value for name, value in env.items() if shown[name] != value}


def texts_to_mask(shown: Mapping[str, str], secrets: Mapping[str, str]) -> frozenset[str]:
    """Return the texts that must be masked in the ranks' output, for the two results of ``split_secrets``."""
    whole = {part for name, value in secrets.items() if shown.get(name) == HIDDEN for part in _parts(value)}
    return frozenset(whole.union(*(secrets_by_form(value) for value in secrets.values())))


def _parts(value: str) -> frozenset[str]:
    return frozenset({str(value)}) | (value.parts if isinstance(value, Secret) else frozenset())


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value of a nested configuration that is no mapping or list, as (path, value)."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, list):
        for _, item_path, item in _in_list(value, path):
            yield from _leaves(item, item_path)
    else:
        yield path, value


def _in_list(items: Sequence[Any], path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield each item of a list as (prefix, path, value). The list may be a command line.

    ``--token=VALUE`` is split into the prefix ``--token=`` and the value. The path of an option's value ends with the
    option's name, also if the value follows ``--token`` as a separate item.
    """
    name = ""  # of the option that the previous item was; "" if it was none
    for item in items:
        if not isinstance(item, str):
            yield "", (*path, name) if name else path, item
            name = ""
        elif option := _OPTION.match(item):
            yield option[0], (*path, option[1]), item[option.end() :]
            name = ""
        elif item.startswith("-"):
            yield "", path, item
            name = item.lstrip("-")
        else:
            yield "", (*path, name) if name else path, item
            name = ""
