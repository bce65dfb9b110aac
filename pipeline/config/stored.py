"""The form in which a run keeps its configuration: without secrets, and without the settings of sweeps and notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.program_section import describes_script
from pipeline.core import program as programs
from pipeline.core.errors import UsageError
from pipeline.core.redact import HIDDEN, in_word, placeholders, without_secrets
from pipeline.keys.canonical import with_sorted_arguments

_NOT_OF_THE_TRAINER = ("cluster", "tracking", "paths", "sweep", "search", "step", "notify")


def stored_config(resolved: Mapping[str, Any], secrets: frozenset[str]) -> dict[str, Any]:
    """Return a resolved configuration without the settings of sweeps and without ``secrets``.

    Raises UsageError: a placeholder in place of a secret, or a secret in a field that the ranks read from config.json.
    """
    _refuse_placeholders(resolved)
    outside = ["sweep", "search", "notify"]
    outside += [] if describes_script(resolved) else [programs.SECTION]
    outside += [] if resolved.get("step") else ["step"]
    shown = without_secrets({name: value for name, value in resolved.items() if name not in outside}, secrets)
    _refuse_secrets_of_the_trainer(resolved, shown)
    return with_sorted_arguments(shown)


def stored_overrides(words: tuple[str, ...], resolved: Mapping[str, Any], secrets: frozenset[str]) -> tuple[str, ...]:
    """Return the overrides with placeholders for secrets and without those of ``notify``."""
    kept = [word for word in words if not word.lstrip("+~").startswith("notify")]
    return tuple(in_word(word, secrets, resolved["cluster"]["secrets"]) for word in kept)


def _refuse_placeholders(resolved: Mapping[str, Any]) -> None:
    """Refuse placeholders copied from a run's words or files: the secret would silently be three asterisks."""
    for name in placeholders(resolved):
        variable = name.rpartition(".")[2]
        reference = f"'${{oc.env:{variable if name.startswith('cluster.') else 'NAME'}}}'"
        word = f"env: {{{variable}: {reference}}} of the host" if ".hosts." in name else f"++{name}={reference}"
        raise UsageError(
            f"{name} holds {HIDDEN}, which stands for a secret that no file keeps; tell it anew",
            hint=f"{word}, with the value in that environment variable",
        )


def _refuse_secrets_of_the_trainer(resolved: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Refuse secrets in fields that the ranks read from config.json; their environment may hold them instead."""
    for group, section in resolved.items():
        if group in _NOT_OF_THE_TRAINER or group not in shown or not isinstance(section, Mapping):
            continue
        for name, value in section.items():
            if shown[group][name] != value and (group, name) != ("dataset", "source"):
                field = next(iter(placeholders({group: {name: shown[group][name]}})), f"{group}.{name}")
                reader = "script" if group == programs.SECTION else "trainer"
                raise UsageError(
                    f"{field} is secret by its name or form, and the ranks would read it from config.json, "
                    "where no secret may stand",
                    hint=f"++cluster.env.MY_TOKEN='${{oc.env:MY_TOKEN}}', which the {reader} finds in its environment",
                )
