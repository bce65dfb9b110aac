"""Resolved configurations that many tests ask for with the same words: Hydra takes a tenth of a second for one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

from pipeline.config.compose import compose_config, resolve


def composed(words: Sequence[str]) -> dict[str, Any]:
    """``resolve(compose_config(words))``, made once a test process: not for words that read the environment."""
    return copy.deepcopy(_composed(tuple(words)))


@cache
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    return resolve(compose_config(words))
