"""The content key of a run, and the differences between two keys.

A key has five parts: the canonical configuration; the import closure of the node half, with a digest of each file's
syntax tree; the digest of the data pack; the environment (Python and the imported distributions); and the topology.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.printable import printable
from pipeline.keys import rank_environment

if TYPE_CHECKING:
    from pipeline.core.specs import Cluster

ORDER = "order"
"""Field of the configuration's part of a key that holds the order of names where it decides."""

KEY_VERSION = 3
KEY_LENGTH = 12  # hex digits


class ContentKey(NamedTuple):
    """``short`` names the run folder; ``parts`` is the content of key.json."""

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
    """Digest the five parts. Pure: equal inputs give equal keys, regardless of the order of fields.

    Args:
        canonical: the configuration as returned by ``canonical.canonical_config``.
        topology: as returned by ``topology``.
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
    """Describe the distribution of ranks, the kind of device, and each node's variables that can change arithmetic.

    With ``shards`` (trainer.shards) their number replaces the numbers of nodes and ranks. The environment, which is
    then equal on all nodes, is recorded once.
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
    """Return trainer.shards; 0 for a script, which has no trainer section."""
    trainer = config.get("trainer")
    return int(trainer.get("shards") or 0) if isinstance(trainer, Mapping) else 0


def environment(versions: Mapping[str, str]) -> dict[str, str]:
    """Combine Python's version with the versions of the imported distributions."""
    return {"python": platform.python_version(), **versions}


def recorded(document: Mapping[str, Any]) -> ContentKey | None:
    """Return the key stored in key.json, or None if its parts don't match the stored digest."""
    parts = {name: value for name, value in document.items() if name not in ("key", "digest")}
    try:
        key = ContentKey(digest=sha256_text(canonical_json(parts)), parts=parts)
    except ValueError:  # NaN
        return None
    return key if (document.get("key"), document.get("digest")) == (key.short, key.digest) else None


# ------------------------------------------------------------------------------- differences between two keys
_PARTS = ("config", "code", "data", "environment", "topology")
_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field that differs between two keys; a value that one key lacks is None.

    ``part`` is config, code, data, environment, topology, or version (the keys were computed by different rules).
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
        if self.part == "config" and self.field.startswith(f"{ORDER}."):  # sorted names are not recorded
            in_order = sorted(self.old or self.new)
            old, new = (", ".join(names or in_order) for names in (self.old, self.new))
            return f"order of {self.field.removeprefix(f'{ORDER}.')}: {old} → {new}"
        mark = "" if self.part == "environment" else ":"
        return f"{self.field}{mark} {_text(self.old)} → {_text(self.new)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """List the fields that differ between the parts of two keys: version, config, code, data, environment, topology."""
    changed = []
    has_other_rules = old.get("version") != new.get("version")
    if has_other_rules:
        changed.append(Difference(part="version", field="version", old=old.get("version"), new=new.get("version")))
    for part in _PARTS:
        if part == "code" and has_other_rules:  # the digest of every file differs
            continue
        before, after = dict(flat(old.get(part))), dict(flat(new.get(part)))
        for field in sorted(before.keys() | after.keys()):
            is_order = field.startswith(f"{ORDER}.") and not is_reordered(field, (before, after))
            if before.get(field) != after.get(field) and not is_order:
                changed.append(Difference(part=part, field=field, old=before.get(field), new=after.get(field)))
    return changed


def is_reordered(field: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if two of the ``flat`` configurations have the same names in another order.

    Where there are other names, these show up as differing fields themselves. ``field``: ``order.program.args``.
    """
    inside = f"{field.removeprefix(f'{ORDER}.')}."
    orders = {
        (
            canonical_json(fields.get(field)),
            canonical_json([name for name in sorted(fields) if name.startswith(inside)]),
        )
        for fields in configs
    }
    return len({names for _, names in orders}) < len(orders)


def nearest(finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]) -> tuple[str, list[Difference]] | None:
    """Return the finished run (key → parts) that differs in the fewest fields from ``new``, or None.

    On a tie the run with the closer numbers wins, then the smaller key.
    """
    compared = [(key, differences(parts, new)) for key, parts in finished.items()]
    return min(compared, key=lambda pair: (len(pair[1]), sum(map(_distance, pair[1])), pair[0]), default=None)


def _distance(difference: Difference) -> float:
    """Return the relative distance of two numbers, from 0 to 1; 1 if one of the values is not a number."""
    old, new = difference.old, difference.new
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (old, new)):
        return 1.0
    return float(abs(old - new) / ((abs(old) + abs(new)) or 1))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted path.

    Lists stay whole, because single items mean little. File names keep their dots.
    """
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _text(value: Any) -> str:
    return _ABSENT if value is None else printable(str(value))
