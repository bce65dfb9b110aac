"""The content key of a run, a digest of all that decides its results, and the differences between two keys.

A key has five parts: the canonical configuration (without what can't change results), the code (a digest of each file's
syntax tree), the digest of the data, the environment (versions), and the topology (ranks, device, their variables)."""

from __future__ import annotations

import copy
import itertools
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.files import canonical_json, sha256_text
from pipeline.core.printable import printable
from pipeline.keys import rank_environment
from trainers.core.config import DatasetConfig, OptimizerConfig, TrainerConfig, later_fields
from trainers.script.settings import ScriptConfig, names

if TYPE_CHECKING:
    from pipeline.core.specs import Cluster

ORDER = "order"
"""The field of the canonical configuration with the order of names, where it can change a run: path → names."""

KEY_VERSION = 3  # of the rules by which keys are computed
KEY_LENGTH = 12  # hex digits


class ContentKey(NamedTuple):
    """``short`` names the run folder; ``parts`` is the content of key.json."""

    digest: str
    parts: Mapping[str, Any]

    @property
    def short(self) -> str:
        return self.digest[:KEY_LENGTH]


# section → fields with keyword arguments of a user's own class or function
_KEYWORD_ARGUMENTS = {
    "model": ("args",),
    "optimizer": ("args", "arguments"),
    "dataset": ("args", "augmentation_args"),
    "trainer": ("loss_args",),
}


def orders_below(value: Any, path: str) -> dict[str, list[str]]:
    """Return dotted path → names in order, for each mapping in ``value`` whose names aren't sorted."""
    orders: dict[str, list[str]] = {}
    if isinstance(value, Mapping):
        fields = [str(field) for field in value]
        if fields != sorted(fields):
            orders[path] = fields
        for field, inner in value.items():
            orders |= orders_below(inner, f"{path}.{field}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            orders |= orders_below(inner, f"{path}[{index}]")
    return orders


def orders_of_config(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return ``orders_below`` of a whole configuration.

    The order of a command's options (``program.args``) counts, and that inside values. The order of sections, of their
    fields and of a field's own names doesn't: they are passed by keyword."""
    orders: dict[str, list[str]] = {}
    for section, fields in config.items():
        for field, value in fields.items() if isinstance(fields, Mapping) else ():
            path = f"{section}.{field}"
            if path == "program.args" or not isinstance(value, Mapping):
                orders |= orders_below(value, path)
            else:
                for name, inner in value.items():
                    orders |= orders_below(inner, f"{path}.{name}")
    return orders


def with_sorted_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the arguments of a user's own classes and functions by name. Their order isn't in the key, and yet
    ``**kwargs`` has one, so a run must always pass them in the same order."""
    ordered = dict(config)
    for section, fields in _KEYWORD_ARGUMENTS.items():
        settings = ordered.get(section)
        if isinstance(settings, Mapping):
            args = {name: settings[name] for name in fields if isinstance(settings.get(name), Mapping)}
            by_name = {name: dict(sorted(value.items(), key=lambda item: str(item[0]))) for name, value in args.items()}
            ordered[section] = {**settings, **by_name}
    return ordered


_LATER_FIELDS = {
    "dataset": later_fields(DatasetConfig),
    "trainer": later_fields(TrainerConfig),
    "optimizer": later_fields(OptimizerConfig),
    "program": later_fields(ScriptConfig),
}
"""Section → {field: default} for the fields that came after the first release."""
# fields of program: what they name counts by content, or says what is kept, recorded or compared after the run
_UNKEYED_PROGRAM_FIELDS = (
    *("inputs", "data", "untracked", "outputs_limit"),
    *("ignore_metrics", "metrics_pattern", "metrics", "seal", "resume_pattern"),
)
_OTHER_SECTIONS = ("cluster", "tracking", "paths", "step")  # count by the topology, by the data's digest, or not at all


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that counts in the key: without hosts, tracking, folders, the data's address.
    Initial weights count by their digest, files that a script reads in other parts of the key."""
    kept = {name: copy.deepcopy(value) for name, value in config.items() if name not in _OTHER_SECTIONS}
    if isinstance(kept.get("dataset"), dict):
        kept["dataset"].pop("source", None)
    # at its default, a field added later means what older runs did without it: these keep their keys
    for group, later in _LATER_FIELDS.items():
        section = kept.get(group)
        if isinstance(section, dict):
            at_default = [name for name, default in later.items() if section.get(name, default) == default]
            kept[group] = {name: value for name, value in section.items() if name not in at_default}
    if isinstance(kept.get("model"), dict):
        kept["model"].pop("inputs", None)  # these files count by content
    trainer = kept.get("trainer")
    if isinstance(trainer, dict) and isinstance(trainer.get("freeze"), list):
        trainer["freeze"] = sorted(set(trainer["freeze"]))  # the order of the patterns doesn't affect the run
    if (init := _initial_weights(kept.pop("init", None))) is not None:
        kept["init"] = init
    if isinstance(kept.get("program"), dict):
        if not names_seed(kept["program"]):  # the script never receives the seed
            kept.pop("seed", None)
        kept["program"] = _script_fields(kept["program"])
    if order := orders_of_config(kept):
        kept[ORDER] = order
    return kept


def names_seed(script: Mapping[str, Any]) -> bool:
    """Return True if a script receives the seed: an argument or variable contains {seed}."""
    return "seed" in names(json.dumps([script.get("args"), script.get("env")]))


def _initial_weights(section: Any) -> dict[str, Any] | None:
    """Return the weights' digest if known, else the fields that name them; None for a fresh initialization."""
    fields = {name: value for name, value in (section or {}).items() if value is not None}
    if not fields.keys() & {"weights", "run"}:
        return None
    return {"sha256": fields["sha256"]} if "sha256" in fields else fields


def _script_fields(section: Mapping[str, Any]) -> dict[str, Any]:
    script = str(section.get("script") or "")
    kept = {name: value for name, value in section.items() if name not in _UNKEYED_PROGRAM_FIELDS}
    if "args" in kept:
        kept["args"] = _normalized_args(kept["args"]) or None  # [] and {} count as no arguments
    # of a script outside of the project only the file name counts, so that its folder may be moved
    return {**kept, "script": script.rpartition("/")[2] if script.startswith("/") else script}


def _normalized_args(args: Any) -> Any:
    """Normalize ``program.args``: all values that give the same command line get one form ('0.1' becomes 0.1)."""
    if isinstance(args, Mapping):  # options; the command line has none for false and null
        on_line = {name: value for name, value in args.items() if value is not None and value is not False}
        return {name: _normalized(value, is_option=True) for name, value in on_line.items()}
    return [_normalized(value) for value in args] if isinstance(args, list) else args


def _normalized(value: Any, *, is_option: bool = False) -> Any:
    """Normalize one argument. With ``is_option``, true means the bare option --name, so the text 'true' stays."""
    if isinstance(value, list):
        return [_normalized(item) for item in value]
    if not isinstance(value, str):
        return value
    if value in ("true", "false") and not is_option:
        return value == "true"
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(value)
            if str(number) == value and math.isfinite(number):  # not 1e-3 or 007, which the command line shows as typed
                return number
    return value


def content_key(
    *,
    canonical: Mapping[str, Any],
    code: Mapping[str, str],
    data_digest: str,
    environment: Mapping[str, str],
    topology: Mapping[str, Any],
) -> ContentKey:
    """Digest the five parts. Pure: equal inputs give equal keys, regardless of the order of fields."""
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
    """Return the part ``topology`` of a key: ranks, kind of device, and each node's variables that can change results.
    With ``shards`` (trainer.shards, the same weights on any number of ranks) nodes and ranks don't count."""
    device = "cuda" if cluster.device == "cuda" else "cpu"
    env = [
        {name: value for name, value in sorted(host.env.items()) if rank_environment.counts_in_key(name)}
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
    """Return the part ``environment`` of a key: versions of Python and of the imported distributions."""
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
    """One field that differs between two keys; the value is None for a key that lacks the field. ``part`` is config,
    code, data, environment, topology, or version (the keys were computed by different rules)."""

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
        if self.part == "config" and self.field.startswith(f"{ORDER}."):
            return f"order of {self.field.removeprefix(f'{ORDER}.')}: {', '.join(self.old)} → {', '.join(self.new)}"
        mark = "" if self.part == "environment" else ":"
        return f"{self.field}{mark} {_text(self.old)} → {_text(self.new)}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """List the fields that differ between two keys, given by their parts, in the order of the parts."""
    changed = []
    has_other_rules = old.get("version") != new.get("version")
    if has_other_rules:
        changed.append(Difference(part="version", field="version", old=old.get("version"), new=new.get("version")))
    for part in _PARTS:
        if part == "code" and has_other_rules:  # the digest of every file differs
            continue
        before, after = dict(flat(old.get(part))), dict(flat(new.get(part)))
        for field in sorted(before.keys() | after.keys()):
            old_value, new_value = before.get(field), after.get(field)
            if part == "config" and old_value != new_value and field.startswith(f"{ORDER}."):
                old_value, new_value = _orders_of_common_names(field, before, after)
            if old_value != new_value:
                changed.append(Difference(part=part, field=field, old=old_value, new=new_value))
    return changed


def is_reordered(field: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if two of the ``flat`` configurations have their common names below ``field`` in different orders."""
    distinct = {canonical_json(names_in_order(field, fields)): fields for fields in configs}.values()
    pairs = (_orders_of_common_names(field, *pair) for pair in itertools.combinations(distinct, 2))
    return any(first != second for first, second in pairs)


def names_in_order(field: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the mapping whose order ``field`` (``order.PATH``) records. A configuration whose names are
    sorted there lacks the field, so they are taken from ``fields`` and sorted."""
    return [*map(str, fields.get(field) or sorted(_names_below(field, fields)))]


def _names_below(field: str, fields: Mapping[str, Any]) -> set[str]:
    prefix = f"{field.removeprefix(f'{ORDER}.')}."
    return {name.removeprefix(prefix).partition(".")[0] for name in fields if name.startswith(prefix)}


def _orders_of_common_names(
    field: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    order, other = names_in_order(field, first), names_in_order(field, second)
    # ``flat`` doesn't show what is inside of a list: where only one order is recorded, the other one is the sorted one
    if not (_names_below(field, first) or _names_below(field, second)):
        order, other = order or sorted(other), other or sorted(order)
    return [name for name in order if name in other], [name for name in other if name in order]


def nearest(finished: Mapping[str, Mapping[str, Any]], new: Mapping[str, Any]) -> tuple[str, list[Difference]] | None:
    """Return the key that differs in the fewest fields from ``new``, and the differences; on a tie, the closest values.
    ``finished``: key → its parts. None if it is empty."""
    compared = [(key, differences(parts, new)) for key, parts in finished.items()]
    return min(compared, key=lambda pair: (len(pair[1]), sum(map(_distance, pair[1])), pair[0]), default=None)


def _distance(difference: Difference) -> float:
    """Return the relative distance of two numbers, from 0 to 1; 1 if one of the values is not a number."""
    old, new = difference.old, difference.new
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (old, new)):
        return 1.0
    return float(abs(old - new) / ((abs(old) + abs(new)) or 1))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted path. Lists stay whole; file names keep their dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _text(value: Any) -> str:
    return _ABSENT if value is None else printable(str(value))
