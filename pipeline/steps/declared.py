"""Load the declared steps: conf/step/NAME.yaml or ``declare`` in dodo.py, resolved against a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # OmegaConf raises its errors
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.values import texts
from pipeline.core import redact
from pipeline.core.errors import suggestion, text_of
from pipeline.steps import REGISTERED
from pipeline.steps.step import Step, StepError, checked, refuse_name

FOLDER = "conf/step"
SECTION = "step"
"""Configuration section with overrides: ``step.clean.args.rate=0.3`` replaces the value in conf/step/clean.yaml."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def names(root: Path) -> list[str]:
    """Return all steps, sorted, including those that can't be loaded. Raises StepError: a step is declared twice."""
    files = sorted(path.stem for path in (root / FOLDER).glob("*.yaml"))
    for name in files:
        if name in REGISTERED:
            raise StepError(f"step {name} is declared twice: in {FOLDER}/{name}.yaml and in dodo.py; keep one of them")
    known = sorted([*files, *REGISTERED])
    lower: dict[str, str] = {}
    for name in known:
        if (other := lower.setdefault(name.lower(), name)) != name:
            raise StepError(f"steps {other} and {name} would share a folder where large and small letters are one")
    return known


def load(name: str, composed: Mapping[str, Any], root: Path) -> Step:
    """Load one step and resolve its interpolations against the composed configuration.

    Raises:
        StepError: no such step, an unreadable file, or an invalid field or value.
        UsageError: an interpolation can't be resolved.
    """
    own = composed.get(SECTION) or {}
    for key in own:
        _refuse_unknown(str(key), root)
    _refuse_unknown(name, root)
    refuse_name(name, named_in=_place(name))
    written = _written(name, own.get(name) or {}, root)
    references = [ref for text in texts(written) for ref in _REFERENCE.findall(text)]
    whole = OmegaConf.create({**composed, SECTION: {name: written}})
    assert isinstance(whole, DictConfig)
    try:
        fields = OmegaConf.to_container(whole[SECTION][name], resolve=True, throw_on_missing=True)
        parameters = {ref: _plain(OmegaConf.select(whole, ref)) for ref in references}
    except OmegaConfBaseException as error:
        from pipeline.config.composition_errors import explain_interpolation  # late import: it needs Hydra

        raise StepError(f"step {name}: {explain_interpolation(error, whole).what}") from error
    assert isinstance(fields, dict)
    return checked(
        name,
        {str(field): value for field, value in fields.items()},
        written=written,
        parameters=parameters,
        secrets=_secrets(written, fields, composed),
    )


def _refuse_unknown(name: str, root: Path) -> None:
    known = names(root)
    if name not in known:
        refuse_name(name)
        where = f"it would be {FOLDER}/{name}.yaml"
        raise StepError(f"there is no step {name!r}; {suggestion(name, known)} ({where})")


def _place(name: str) -> str:
    """Return the file that declares a step, for messages."""
    return "dodo.py" if name in REGISTERED else f"{FOLDER}/{name}.yaml"


def _written(name: str, changes: Any, root: Path) -> dict[str, Any]:
    """Return the fields before interpolation, merged with the command line's overrides. Raises StepError."""
    try:
        file = root / FOLDER / f"{name}.yaml"
        read = OmegaConf.create(dict(REGISTERED[name])) if name in REGISTERED else OmegaConf.load(file)
        fields = OmegaConf.to_container(read, resolve=False)
        merged = OmegaConf.merge(OmegaConf.create(fields), OmegaConf.create(changes))
        written = OmegaConf.to_container(merged, resolve=False)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise StepError(f"step {name}: {_place(name)} can't be read: {text_of(error)}") from error
    if not isinstance(written, dict):
        raise StepError(
            f"step {name}: {_place(name)} holds no fields", hint="command: [python, clean.py] and outputs: [a.npz]"
        )
    return {str(field): value for field, value in written.items()}


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _secrets(written: Mapping[str, Any], fields: Mapping[Any, Any], composed: Mapping[str, Any]) -> frozenset[str]:
    """Return texts that neither key, folder nor log may contain.

    They come from secret names in ``env``, references to secret variables, values with a secret form, and the
    configuration's own secrets.
    """
    of_variables = {name: os.environ[name] for name in redact.referenced(written) if os.environ.get(name)}
    env = fields.get("env")
    named = env.items() if isinstance(env, Mapping) else ()  # another type is refused later
    of_env = {str(name): str(value) for name, value in named if redact.is_secret_name(str(name))}
    pairs = [*of_variables.items(), *of_env.items()]
    values = {text for name, text in pairs if redact.needs_masking(name, text)}
    forms = {part for text in texts(fields) for part in redact.in_forms(text)}
    return frozenset(values | forms | redact.secret_values(composed))
