"""Variables of this shell that a run, a step or own data got and its code read, though no key holds them (``TZ``).

Their values are compared by digests. A secret has none: a short one could be found by trying (docs/secrets.md says that
no secret may affect a result). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.core.files import sha256_text
from pipeline.keys.rank_environment import NEEDED, matches
from trainers.core.dependencies import host

_OF_PROGRAMS = ("PATH", "SHELL", "*LIBRARY_PATH", "NIX_LD")  # where they lie differs from shell to shell


def digests(environ: Mapping[str, str], keyed: Iterable[str] = ()) -> dict[str, str | None]:
    """sha256 of each variable that a program gets from this environment and that isn't compared otherwise.

    Args:
        keyed: those that the configuration sets in their place: None, as their values are part of the key.
    """
    from pipeline.core.redact import in_forms, is_secret_name  # here: every finished run's command loads this module

    found = {
        name: sha256_text(value)
        for name, value in environ.items()
        if matches(name, NEEDED)
        and not matches(name, _OF_PROGRAMS)
        and not is_secret_name(name)
        and not any(in_forms(value))
    }
    return {**found, **dict.fromkeys(keyed)}


def changed(
    record: Mapping[str, Any], known: Mapping[str, str | None] | None, environ: Mapping[str, str]
) -> str | None:
    """The first variable that the program's own code read and that has another value now, in words.

    Args:
        record: what the program took in (``trainers.core.dependencies``).
        known: ``digests`` of the environment that it got; None: that isn't known, or was another computer's.
    """
    names = record.get("own_variables")
    if not names or known is None or record.get("host") != host():
        return None
    now = digests(environ)
    for name in names:
        if known.get(name, "") not in (None, now.get(name, "")):
            return f"the variable {name}, which it read and its key lacks, changed"
    return None
