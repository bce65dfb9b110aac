"""Digests in JSON, against damage, not forgery. The last field of sealed JSON is the sha256 of all text before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def sealed_text(value: Mapping[str, Any], *, allow_nan: bool = False) -> str:
    """Write an object as indented JSON with its seal. Raises ValueError: NaN or an infinity, without ``allow_nan``."""
    body = json.dumps(value, allow_nan=allow_nan, indent=2).removesuffix("\n}")
    return f'{body},\n  "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def digest_of(fields: Mapping[str, Any]) -> str:
    """Return the value for an object's field ``digest``: the sha256 of the canonical JSON of all other fields."""
    others = {name: value for name, value in fields.items() if name != "digest"}
    canonical = json.dumps(others, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
