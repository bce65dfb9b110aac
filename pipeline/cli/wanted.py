"""The values that words ask a run for: what those that trained it were composed to, of these fields alone."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import UsageError
from pipeline.core.redact import placeholders
from pipeline.keys.diff import flat
from pipeline.runs.contents import ranks_of
from pipeline.runs.index import intact_parts
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder

PLACE = "paths.runs"
"""Whose folders are looked through; where it lies isn't asked of a run."""
_EXPERIMENT = "experiment="
_RANK = "nproc_per_node"
_RANKS = f"cluster.{_RANK}"


def wanted_values(words: Sequence[str], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Fields and the values that the words give them; of a group those that its option stands for. Nothing of
    ``experiments_of`` them.

    Raises:
        UsageError: a word of which a run tells nothing.
    """
    from pipeline.config.override_words import for_hydra

    wanted: dict[str, Any] = {}
    experiments = experiments_of(words)
    for word in for_hydra([word for word in words if word not in experiments]):
        name = word.lstrip("+~").partition("=")[0]
        of_group = "." not in name and isinstance(resolved.get(name), Mapping)
        for field in _set_by(name, words) if of_group else [name]:
            try:
                found = functools.reduce(operator.getitem, field.split("."), resolved)
            except (LookupError, TypeError) as error:
                raise UsageError(
                    f"{word.lstrip('+')}: a run doesn't tell its {field}; choose by what that sets, such as model=…"
                ) from error
            wanted |= flat(found, field)
    for name in placeholders(wanted):
        raise UsageError(f"{name} is secret, which no file of a run tells; leave it out")
    return {name: value for name, value in wanted.items() if name != PLACE}


def experiments_of(words: Sequence[str]) -> frozenset[str]:
    """The words ``experiment=NAME``: of all that a run tells, those that it was started with alone have them."""
    return frozenset(word for word in words if word.startswith(_EXPERIMENT))


def started_with(folder: RunFolder, experiments: frozenset[str]) -> bool:
    """Whether these are among the words that made the run."""
    told = (folder.read_json(run_folder.PROVENANCE) or {}).get("overrides") if experiments else None
    return experiments <= {str(word) for word in (told if isinstance(told, list) else ())}


def _set_by(group: str, words: Sequence[str]) -> Sequence[str]:
    """The fields that the option of a group stands for; all of its section where no option was chosen."""
    from pipeline.config.origins import stands_for  # imports Hydra

    return stands_for(group, words) or [group]


def config_of(folder: RunFolder, wanted: Mapping[str, Any], *, altered: bool = False) -> dict[str, Any]:
    """config.json, {} where there is none. Where a number of ranks is wanted, ``auto`` is the one that the run had.

    Of an ``altered`` run only what its key vouches for: config.json may have been edited.
    """
    if altered:
        return dict(intact_parts(folder).get("config", {}))
    config: dict[str, Any] = folder.read_json(run_folder.CONFIG) or {}
    cluster = config.get("cluster")
    if not isinstance(wanted.get(_RANKS), int) or not isinstance(cluster, Mapping) or cluster.get(_RANK) != "auto":
        return config
    counts = {*ranks_of(folder.read_json(run_folder.KEY) or {}, folder.read_json(run_folder.PLAN) or {})}
    return {**config, "cluster": {**cluster, _RANK: counts.pop()}} if len(counts) == 1 else config


def matches(config: Mapping[str, Any], wanted: Mapping[str, Any], *, in_part: bool = False) -> bool:
    """Whether a run's configuration has all wanted values; of one known ``in_part``, what it lacks may be meant."""
    known = dict(flat(config)) if wanted else {}
    return all(known[name] == value if name in known else in_part for name, value in wanted.items())
