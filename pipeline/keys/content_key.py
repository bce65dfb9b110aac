"""The content key: a run is decided by what it is made of.

Five parts: the configuration without what only says where; the node half's import closure with the digest of each
file's syntax tree; the digest of the data pack; the environment (Python and what the closure imports); the topology.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.files import canonical_json, sha256_text
from pipeline.keys import rank_environment
from trainers.core.config import DatasetConfig, OptimizerConfig, TrainerConfig, later_fields
from trainers.script.settings import ScriptConfig

if TYPE_CHECKING:
    from pipeline.core.cluster import Cluster

KEY_VERSION = 2
KEY_LENGTH = 12

_LATER = {
    "dataset": later_fields(DatasetConfig),
    "trainer": later_fields(TrainerConfig),
    "optimizer": later_fields(OptimizerConfig),
    "program": later_fields(ScriptConfig),
}
_NOT_OF_A_SCRIPT = ("inputs", "data", "seal")
_WHERE = ("cluster", "tracking", "paths")  # where it runs and who is told; the topology part holds the rest
_BEFORE = ("step",)  # what its data was made with, which counts by its digest


class ContentKey(NamedTuple):
    """``short`` names the run folder; ``parts`` is what key.json holds."""

    digest: str
    parts: Mapping[str, Any]

    @property
    def short(self) -> str:
        return self.digest[:KEY_LENGTH]


def content_key(
    *,
    config: Mapping[str, Any],
    code: Mapping[str, str],
    data_digest: str,
    environment: Mapping[str, str],
    cluster: Cluster,
) -> ContentKey:
    """Digest the five parts. Pure: equal inputs give equal keys, in whatever order their fields stand."""
    parts: dict[str, Any] = {
        "version": KEY_VERSION,
        "config": canonical_config(config),
        "code": dict(sorted(code.items())),
        "data": data_digest,
        "environment": dict(sorted(environment.items())),
        "topology": topology(cluster, _shards(config)),
    }
    return ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without hosts, ports, tracking, folders and the data's address (its digest counts instead).

    Without fields that came later where they have their defaults (``trainers.core.config.LATER``): a run without
    trainer.shards keeps the key that it had before there were any. Of the weights that a run starts from their digest
    counts, and not what names them. Of a script's section what it reads counts by
    content, in ``code`` and ``data``, and what becomes of its run not at all.
    """
    kept = {name: copy.deepcopy(value) for name, value in config.items() if name not in (*_WHERE, *_BEFORE)}
    if isinstance(kept.get("dataset"), dict):
        kept["dataset"].pop("source", None)
    for group, added in _LATER.items():
        section = kept.get(group)
        if isinstance(section, dict):
            at_default = [name for name, default in added.items() if section.get(name, default) == default]
            kept[group] = {name: value for name, value in section.items() if name not in at_default}
    trainer = kept.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("freeze"), list):
        trainer["freeze"] = sorted(set(trainer["freeze"]))  # which of them matches first is nothing to the run
    if (init := _of_initial_weights(kept.pop("init", None))) is not None:
        kept["init"] = init
    if isinstance(kept.get("program"), dict):
        kept["program"] = _of_script(kept["program"])
    return kept


def _of_initial_weights(section: Any) -> dict[str, Any] | None:
    """Their digest, what names them where that isn't known yet, None where they are fresh."""
    told = {name: value for name, value in (section or {}).items() if value is not None}
    if not told.keys() & {"weights", "run"}:
        return None
    return {"sha256": told["sha256"]} if "sha256" in told else told


def _of_script(section: Mapping[str, Any]) -> dict[str, Any]:
    """Of a script that lies elsewhere its name counts, and not its folder."""
    script = str(section.get("script") or "")
    told = {name: value for name, value in section.items() if name not in _NOT_OF_A_SCRIPT}
    if "args" in told:
        told["args"] = _same_words(told["args"]) or None  # none at all, however they were told
    return {**told, "script": script.rpartition("/")[2] if script.startswith("/") else script}


def _same_words(args: Any) -> Any:
    """``program.args`` in the one form that all values have which come to the same command line: 0.1 for '0.1', and
    without those that are left out of it (false, null)."""
    if isinstance(args, Mapping):
        told = {name: value for name, value in args.items() if value is not None and value is not False}
        return {name: _same_word(value, is_option=True) for name, value in told.items()}
    return [_same_word(value) for value in args] if isinstance(args, list) else args


def _same_word(value: Any, *, is_option: bool = False) -> Any:
    """``is_option``: true is --name there, and 'true' its value."""
    if isinstance(value, list):
        return [_same_word(item) for item in value]
    if not isinstance(value, str):
        return value
    if value in ("true", "false") and not is_option:
        return value == "true"
    for number in (int, float):
        with suppress(ValueError):
            if str(read := number(value)) == value and math.isfinite(read):
                return read
    return value


def topology(cluster: Cluster, shards: int = 0) -> dict[str, Any]:
    """How the ranks are spread, on which kind of device, and what of each node's environment can change arithmetic.

    With ``shards`` (trainer.shards) their number stands in place of the ranks', and the environment, which is equal on
    all nodes then, once.
    """
    device = "cuda" if cluster.device == "cuda" else "cpu"
    env = [
        {name: value for name, value in sorted(host.env.items()) if rank_environment.decides(name)}
        for host in cluster.hosts
    ]
    if shards:
        return {"shards": shards, "device": device, "env": env[0]}
    return {
        "nnodes": cluster.nnodes,
        "device": device,
        "nproc_per_node": [host.nproc_per_node for host in cluster.hosts],
        "env": env,
    }


def _shards(config: Mapping[str, Any]) -> int:
    trainer = config.get("trainer")
    return int(trainer.get("shards") or 0) if isinstance(trainer, Mapping) else 0


def environment(versions: Mapping[str, str]) -> dict[str, str]:
    """Python's version and those of the distributions that a closure imports."""
    return {"python": platform.python_version(), **versions}


def recorded(known: Mapping[str, Any]) -> ContentKey | None:
    """The key that key.json holds, or None where its parts don't give the digest that stands beside them."""
    parts = {name: value for name, value in known.items() if name not in ("key", "digest")}
    try:
        key = ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)
    except ValueError:  # NaN
        return None
    return key if (known.get("key"), known.get("digest")) == (key.short, key.digest) else None
