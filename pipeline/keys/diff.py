"""Why a run is not up to date: the fields in which its key differs from that of the nearest finished run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.printable import printable

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
    found = []
    others = old.get("version") != new.get("version")
    if others:
        found.append(Difference(part="version", field="version", old=old.get("version"), new=new.get("version")))
    for part in _SHOWN_PARTS:
        if part == "code" and others:
            continue
        before, after = dict(flat(old.get(part))), dict(flat(new.get(part)))
        for field in sorted(before.keys() | after.keys()):
            if before.get(field) != after.get(field):
                found.append(Difference(part=part, field=field, old=before.get(field), new=after.get(field)))
    return found


def nearest(finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]) -> tuple[str, list[Difference]] | None:
    """Of finished runs (key → parts) the one with the fewest differing fields; of two as near, the smaller key."""
    compared = [(key, differences(parts, new)) for key, parts in finished.items()]
    return min(compared, key=lambda pair: (len(pair[1]), pair[0]), default=None)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted path. Lists stay whole: their items mean little alone. File names keep their dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _text(value: Any) -> str:
    return _ABSENT if value is None else printable(str(value))
