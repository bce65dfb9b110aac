"""The run that another one starts from, named by its words: ``init.run='experiment=digits seed=1'``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.config import compose
from pipeline.config.overrides.words import quoted_run
from pipeline.config.step_source import named_step
from pipeline.core.errors import UsageError

_SHARED = re.compile(r"[+~]*(?P<group>cluster|paths|tracking)\b")


@contextmanager
def parent_errors_explained(said: str, above: tuple[str, ...]) -> Iterator[None]:
    """What is wrong with the run that ``init.run`` names is said of that field; ``above`` as in ``compose_parent``.

    Raises:
        UsageError: whatever the block raises of it.
    """
    try:
        yield
    except ValueError as error:  # of shlex
        raise UsageError(f"init.run={said!r} can't be split into words: {error}") from error
    except UsageError as error:
        if above or error.what.startswith("init.run"):
            raise
        raise UsageError(f"init.run={said!r}: {error.what}", hint=error.hint) from error


def compose_parent(
    said: str, words: Sequence[str], *, above: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Resolve the configuration that ``init.run`` names, on the cluster of the run that says so, unless its words name
    another; with the words that it was composed of.

    Args:
        said: the words, as a shell would split them.
        words: those of the run that starts from it; what they say of cluster, paths and tracking holds for both.
        above: the words of the runs that start from that one, the last first named.

    Raises:
        UsageError: a word that can't work, or a run that would start from itself.
        ValueError: ``said`` can't be split.
    """
    if said in above:
        raise UsageError(f"init.run leads back to itself: {' → '.join((*above, said))}")
    own = [quoted_run(word) for word in shlex.split(said)]
    elsewhere = any(word.startswith("cluster=") for word in own)
    shared = [(word, match["group"]) for word in words if (match := _SHARED.match(word))]
    every = (*(word for word, group in shared if not (elsewhere and group == "cluster")), *own)
    resolved = compose.resolve(compose.compose_config(every))
    if named_step(resolved) is not None:
        raise UsageError("its data comes from a step", hint=f"doit train {said}, then init.weights=<its key>")
    return resolved, every
