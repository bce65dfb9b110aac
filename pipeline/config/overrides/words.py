"""The translation of overrides, as users type them, into Hydra's syntax; refuses what Hydra would silently misread.

``for_project`` comes first: it makes paths relative to the project. ``for_hydra`` is used wherever words are composed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.core.errors import UsageError
from pipeline.core.printable import hydra_value

_MAPPINGS = (  # fields that are mappings with free names: the user's own, or torch's
    "cluster.env", "cluster.environment", "cluster.node_selector", "cluster.labels",
    "model.args", "optimizer.args", "optimizer.arguments", "trainer.loss_args", "trainer.metrics",
    "dataset.args", "dataset.augmentation_args", "program.args", "program.env", "step",
)  # fmt: skip
_NEW_ENTRY = (*(f"{name}." for name in _MAPPINGS), *(f"{name}={{" for name in _MAPPINGS if name != "cluster.env"))
SCRIPT_FIELDS = ("program.script", "program.module", "program.command")
_NAMES_A_SCRIPT = tuple(f"{name}=" for name in SCRIPT_FIELDS)
_HOSTS = ("cluster.hosts", "cluster.spares")
_NAME = r"\s*([\w.-]+@)?[\w.-]+(:\d+)?\s*"
# not compiled here: most commands have no word that needs them
_NAMED = rf"(?P<field>\+{{0,2}}cluster\.(hosts|spares))=\[(?P<names>{_NAME}(,{_NAME})*)\]$"
_NOT_A_NAME = r"[{,]\s*name\s*:\s*(true|false)\s*[,}]"
_CLASS = r"^(\+{0,2})dataset\.class="  # Python's keyword: the field of the dataclass is called class_name
_NO_NAMES = ("null", "true", "false")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Translate overrides into Hydra's syntax.

    An entry of a mapping with free names gets ``++``, which Hydra demands before new names. Names of hosts become
    mappings. ``program=script`` is added if a script is named.

    Raises UsageError: a repeated key in a mapping, of which Hydra would drop the first; a host named null, true, false.
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
    if any(word.startswith(_NAMES_A_SCRIPT) for word in overrides):
        chooses_program = any(word.startswith("program=") for word in overrides)
        overrides = [*([] if chooses_program else ["program=script"]), *overrides]
    return [_translate_word(word) for word in overrides]


def _translate_word(word: str) -> str:
    """Return one word in Hydra's syntax."""
    if word.startswith(_NEW_ENTRY):
        return f"++{word}"
    bare = word.lstrip("+")
    if bare.startswith("dataset.class="):
        return re.sub(_CLASS, r"\1dataset.class_name=", word)
    return re.sub(_NAMED, _as_mappings, word, flags=re.ASCII) if bare.startswith(_HOSTS) else word


def quoted_run(word: str) -> str:
    """Quote the value of ``init.run``, which has = and blanks: the shell has removed the quotes that Hydra needs."""
    name, _, value = word.partition("=")
    if name.lstrip("+") != "init.run" or value[:1] in ("'", '"') or value in ("", "null"):
        return word
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def _repeated_keys(word: str) -> Iterator[str]:
    """Yield each key that repeats an earlier one of its mapping; Hydra's own lexer reads the override."""
    from hydra.grammar.gen.OverrideLexer import InputStream, OverrideLexer  # type: ignore[attr-defined]  # few words have braces

    lexer = OverrideLexer(InputStream(word))
    lexer.removeErrorListeners()  # errors are reported later, when Hydra reads the word
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
        fields = {"name": f"'{name}'", "user": user and f"'{user}'", "port": port}
        entries.append(", ".join(f"{field}: {value}" for field, value in fields.items() if value))
    return f"{word['field']}=[{', '.join(f'{{{entry}}}' for entry in entries)}]"


# ------------------------------------------------------------------------------- words about scripts
_PATH_FIELDS = ("program.script", "program.data")
_TEXT_FIELDS = ("program.args", "program.env")
_BARE_TEXT = r"[^\s,\[\]{}'\"]*+"
_BEGINS = r"(?<![^\s,\[\]{}'\"])"  # without it, the regex would try a long text from each of its characters
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_RESUME = r"\{resume:[^\s,{}'\"]+\}"
_UNQUOTED_PLACEHOLDERS = re.compile(
    rf"{_QUOTED}|({_BEGINS}{_BARE_TEXT}(?:(?:\{{\{{\w+\}}\}}|\{{\w+\}}|{_RESUME}){_BARE_TEXT})+)"
)
_SETS_WORKDIR = ("program.workdir=", "experiment=")
_NEEDS_NO_QUOTES = re.compile(r"[\w./-]+")


def for_project(words: Sequence[str], folder: Path, root: Path) -> tuple[str, ...]:
    """Convert overrides that were typed in ``folder`` to words with the same meaning in the project folder ``root``.

    Paths of scripts and data become relative to ``root``, and the script's working directory ``folder``. Placeholders
    such as {run} are quoted. Raises UsageError: a word about Hydra itself.
    """
    for word in words:
        # Hydra's own settings are about folders, logs and processes, which Paceline manages itself
        if word.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):
            raise UsageError(
                f"{word} sets Hydra's own application, of which doit takes the configuration alone",
                hint="paths.runs=FOLDER says where runs lie; doit sweep takes several values",
            )
    converted = [quoted_run(_with_quoted_placeholders(_with_project_path(word, folder, root))) for word in words]
    return (*converted, *_workdir(converted, folder, root))


def _workdir(words: Sequence[str], folder: Path, root: Path) -> list[str]:
    """Return ``program.workdir=FOLDER`` if the words name a script and ``folder`` is a folder of the project."""
    # a script that an experiment names keeps its working directory, so that it is the same run from every folder
    scripts = [word.partition("=")[2].strip("'\"") for word in words if word.startswith(_NAMES_A_SCRIPT)]
    if not scripts or folder == root or not folder.is_relative_to(root):
        return []
    if scripts[0].startswith(("/", "~")) or any(word.lstrip("+~").startswith(_SETS_WORKDIR) for word in words):
        return []
    inside = folder.relative_to(root).as_posix()
    quoted = inside.replace("\\", "\\\\").replace("'", "\\'")
    return [f"program.workdir={inside}" if _NEEDS_NO_QUOTES.fullmatch(inside) else f"program.workdir='{quoted}'"]


def _with_project_path(word: str, folder: Path, root: Path) -> str:
    """Return a word about a script or data in ``folder`` with its path relative to the project; others unchanged."""
    field, _, typed = word.partition("=")
    value = typed.strip("'\"")
    if folder == root or field not in _PATH_FIELDS or Path(value).is_absolute() or not (folder / value).exists():
        return word
    path = Path(os.path.abspath(folder / value))  # noqa: PTH100
    return f"{field}={hydra_value(str(path.relative_to(root) if path.is_relative_to(root) else path))}"


def _with_quoted_placeholders(word: str) -> str:
    """Quote placeholders such as {run} in a script's arguments and variables; Hydra would read them as mappings."""
    field, equals, value = word.partition("=")
    if not field.lstrip("+").startswith(_TEXT_FIELDS) or (
        field.endswith("program.args") and value.startswith("{resume:")
    ):
        return word
    return f"{field}{equals}{_UNQUOTED_PLACEHOLDERS.sub(lambda match: repr(match[1]) if match[1] else match[0], value)}"
