"""The run that another one starts from, named by its words: ``init.run='experiment=digits seed=1'``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import compose
from pipeline.config.override_words import quoted_run
from pipeline.config.step_source import named_step
from pipeline.core.errors import UsageError

if TYPE_CHECKING:  # it imports this module
    from pipeline.config.build import RunConfig

_SHARED = re.compile(r"[+~]*(?P<group>cluster|paths|tracking)\b")


def parent(said: str, words: Sequence[str], *, root: Path, local_gpus: int, above: tuple[str, ...] = ()) -> RunConfig:
    """The configuration that ``init.run`` names: on the cluster of the run that says so, unless its words name another.

    Args:
        said: the words, as a shell would split them.
        words: those of the run that starts from it; what they say of cluster, paths and tracking holds for both.
        above: the words of the runs that start from that one, the last first named.

    Raises:
        UsageError: a word that can't work, or a run that would start from itself.
    """
    from pipeline.config.build import build

    if said in above:
        raise UsageError(f"init.run leads back to itself: {' → '.join((*above, said))}")
    try:
        own = [quoted_run(word) for word in shlex.split(said)]
        elsewhere = any(word.startswith("cluster=") for word in own)
        every = [
            *(
                word
                for word in words
                if (found := _SHARED.match(word)) and not (elsewhere and found["group"] == "cluster")
            ),
            *own,
        ]
        resolved = compose.resolve(compose.compose_config(every))
        if named_step(resolved) is not None:
            raise UsageError("its data comes from a step", hint=f"doit train {said}, then init.weights=<its key>")
        built = build(resolved, tuple(every), root=root, local_gpus=local_gpus, above=(*above, said))
    except ValueError as error:  # of shlex
        raise UsageError(f"init.run={said!r} can't be split into words: {error}") from error
    except UsageError as error:
        if above or error.what.startswith("init.run"):
            raise
        raise UsageError(f"init.run={said!r}: {error.what}", hint=error.hint) from error
    if built.script is not None:
        raise UsageError(f"init.run={said!r} is the run of a script, of whose weights nothing is known")
    return built
