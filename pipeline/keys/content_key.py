"""The content key: a run is decided by what it is made of.

Five parts: the configuration without what only says where; the node half's import closure with the digest of each
file's syntax tree; the digest of the data pack; the environment (Python and what the closure imports); the topology.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.printable import printable
from pipeline.keys import rank_environment

if TYPE_CHECKING:
    from pipeline.core.specs import Cluster


_SHOWN_PARTS = ("config", "code", "data", "environment", "topology")
_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field of the key; a value may be absent (None).

    ``part`` is config, code, data, environment or topology, or version: the keys were made by other rules.
    """

    part: str
    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.part == "version":
            return f"key version {self.old} → {self.new}: another Paceline's digests of code can't be compared"
        if self.part == "code":
            change = "added" if self.old is None else "removed" if self.new is None else "changed"
            return f"{self.field} {change}"
        if self.part == "data":
            return f"data: {str(self.old)[:12]} → {str(self.new)[:12]}"
        mark = "" if self.part == "environment" else ":"
        return f"{self.field}{mark} {_text(self.old)} → {_text(self.new)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Field by field between two keys' parts, in the order version, config, code, data, environment, topology."""
    changed = []
    others = old.get("version") != new.get("version")
    if others:
        changed.append(Difference(part="version", field="version", old=old.get("version"), new=new.get("version")))
    for part in _SHOWN_PARTS:
        if part == "code" and others:  # digests by other rules differ in every file, which says nothing
            continue
        before, after = dict(flat(old.get(part))), dict(flat(new.get(part)))
        for field in sorted(before.keys() | after.keys()):
            if before.get(field) != after.get(field):
                changed.append(Difference(part=part, field=field, old=before.get(field), new=after.get(field)))
    return changed


def nearest(finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]) -> tuple[str, list[Difference]] | None:
    """Of finished runs (key → parts) the one with the fewest differing fields; then the one whose numbers are closer,
    then the smaller key."""
    compared = [(key, differences(parts, new)) for key, parts in finished.items()]
    return min(compared, key=lambda pair: (len(pair[1]), sum(map(_distance, pair[1])), pair[0]), default=None)


def _distance(difference: Difference) -> float:
    """0 to 1; 1 for what is no number."""
    old, new = difference.old, difference.new
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (old, new)):
        return 1.0
    return float(abs(old - new) / ((abs(old) + abs(new)) or 1))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path. Lists stay whole: their items mean little alone. File names keep their dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _text(value: Any) -> str:
    return _ABSENT if value is None else printable(str(value))


KEY_VERSION = 3
KEY_LENGTH = 12


class ContentKey(NamedTuple):
    """``short`` names the run folder; ``parts`` is what key.json holds."""

    digest: str
    parts: Mapping[str, Any]

    @property
    def short(self) -> str:
        return self.digest[:KEY_LENGTH]


def content_key(
    *,
    canonical: Mapping[str, Any],
    code: Mapping[str, str],
    data_digest: str,
    environment: Mapping[str, str],
    topology: Mapping[str, Any],
) -> ContentKey:
    """Digest the five parts. Pure: equal inputs give equal keys, in whatever order their fields stand.

    Args:
        canonical: the configuration as ``pipeline.keys.canonical`` has it.
        topology: what ``topology`` makes of its cluster.
    """
    parts: dict[str, Any] = {
        "version": KEY_VERSION,
        "config": dict(canonical),
        "code": dict(sorted(code.items())),
        "data": data_digest,
        "environment": dict(sorted(environment.items())),
        "topology": dict(topology),
    }
    return ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)


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


def shards_of(config: Mapping[str, Any]) -> int:
    """trainer.shards; 0 of a script, which has none."""
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
