"""Facts about a run (its name, its ranks, what it trains) from the contents of key.json, config.json and plan.json.
Damaged parts are left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pipeline.core import program as programs
from pipeline.core.printable import printable
from pipeline.keys.content_key import KEY_VERSION
from trainers.core.config import OWN

REPLACED = "replaced"
"""In the record ``unkeyed``: the key has the content of the file at the start of the run, which then changed."""

_NOT_OF_THE_RUN = ("cluster", "tracking", "paths", "sweep", "search", "hydra", "notify")
"""Sections of the configuration that say where a run takes place, what is swept or searched, or who is notified."""
_KEY_DIGITS = 4
_MAX_VALUE = 32  # characters of one value
_MAX_APART = 90  # of all together: MLflow's table shows no more
_LONG_NUMBER = re.compile(r"-?\d+\.\d{5,}(e-?\d+)?")


def makes_another_run(override: str) -> bool:
    """Whether an override, or the name before its ``=``, can make another run."""
    return re.split(r"[.=@/]", override.lstrip("+~"), maxsplit=1)[0] not in _NOT_OF_THE_RUN


def set_apart(words: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return short labels: ``optimizer.lr=0.1 model=resnet18 seed=2`` → ``lr=0.1``, ``resnet18``, ``seed=2``.

    Overrides about places are left out, and of two for one field the last counts. ``config`` tells groups from fields.
    """
    override_by_name = {word.partition("=")[0].lstrip("+"): word for word in words if makes_another_run(word)}
    last = Counter(name.rpartition(".")[2] for name in override_by_name)
    return tuple(
        _label(name, word, config, full=last[name.rpartition(".")[2]] > 1) for name, word in override_by_name.items()
    )


def _label(name: str, word: str, config: Mapping[str, Any], *, full: bool) -> str:
    value = short_value(word.partition("=")[2])
    if isinstance(config.get(name), Mapping) or name.startswith("~"):
        return value or name
    if name.endswith(".name") and isinstance(config.get(name.removesuffix(".name")), Mapping):
        return value  # of the option, which says as much
    return f"{'.'.join(name.split('.')[-2:]) if full else name.rpartition('.')[2]}={value}"


def short_field_names(fields: Sequence[str]) -> dict[str, str]:
    """Return field → its last word (``optimizer.lr`` → ``lr``), with the word before it where that isn't enough."""
    last = Counter(_last_words(name, 1) for name in fields)
    short = {name: _last_words(name, 1 if last[_last_words(name, 1)] == 1 else 2) for name in fields}
    same = Counter(short.values())
    return {name: word if same[word] == 1 else name for name, word in short.items()}


def _last_words(name: str, words: int) -> str:
    """Return the last words of a field; of ``model.name``, which chooses the option of a group, ``model``."""
    return ".".join(name.removesuffix(".name").split(".")[-words:])


def short_value(value: str) -> str:
    """Shorten a value for a name: numbers to four digits after the point."""
    plain = printable(value.strip("'\""))
    if _LONG_NUMBER.fullmatch(plain):
        return f"{float(plain):.4g}"
    return plain if len(plain) <= _MAX_VALUE else plain[: _MAX_VALUE - 1] + "…"


def overrides_in(provenance: Mapping[str, Any]) -> list[str]:
    """Return the overrides that made the run, from what provenance.json holds."""
    overrides = provenance.get("overrides")
    return [str(override) for override in overrides] if isinstance(overrides, list) else []


def chosen_in(sweeps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the overrides that the newest of a run's sweeps has chosen for it."""
    return [str(override) for override in sweeps[-1].get("overrides") or ()] if sweeps else []


def run_name(config: Mapping[str, Any], words: Sequence[str], key: str, *, swept: Sequence[str] = ()) -> str:
    """``lr=0.1 seed=2 · 9176``: the short name, and the first digits of the key, which tell equal names apart."""
    return f"{short_name(config, words, swept=swept)} · {key[:_KEY_DIGITS]}"


def short_name(config: Mapping[str, Any], words: Sequence[str], *, swept: Sequence[str] = ()) -> str:
    """Name a run by what sets it apart: a trial by what its sweep varied (``swept``), another run by model, data set
    and overrides, a script's by the script and its arguments. MLflow's column shows some twenty characters.
    """
    if apart := set_apart(swept, config):
        return _joined(apart)
    if programs.of(config).is_ours:
        head = f"{_option(config, 'model')} {_option(config, 'dataset')}"
        said: tuple[str, ...] = ("model", "dataset", "experiment")
    else:
        head = PurePosixPath(programs.script_of(config)).stem
        said = ("experiment", "program", "program.script", "program.torchrun")
    apart = set_apart((word for word in words if word.lstrip("+").partition("=")[0] not in said), config)
    return f"{head} {_joined(apart)}".rstrip()


def _option(config: Mapping[str, Any], group: str) -> str:
    section = config.get(group)
    return str(section.get("name", group)) if isinstance(section, Mapping) else group


def _joined(labels: Sequence[str]) -> str:
    text = " ".join(labels)
    return text if len(text) <= _MAX_APART else text[: _MAX_APART - 1] + "…"


def is_newer(key: Mapping[str, Any]) -> bool:
    """Whether a newer Paceline wrote key.json. A version that is no number means damage, and the file is rewritten."""
    version = key.get("version")
    return isinstance(version, int) and version > KEY_VERSION


def what_runs(config: Mapping[str, Any]) -> str:
    """Say in three words what a run trains: ``digits small_cnn sgd``, or ``my_package.nets:MyNet``."""
    if not config:
        return "(no config.json yet)"
    if not programs.of(config).is_ours:
        return f"script {programs.script_of(config)}"
    groups = (config.get(group) for group in ("dataset", "model", "optimizer"))
    return " ".join(_named(group) if isinstance(group, Mapping) else "?" for group in groups)


def _named(group: Mapping[str, Any]) -> str:
    name = str(group.get("name", "?"))
    return str(group.get("target") or name) if name == OWN else name


def ranks_of(key: Mapping[str, Any], plan: Mapping[str, Any]) -> list[int]:
    """Return the ranks of each node from key.json; with trainer.shards those of the last attempt, from plan.json."""
    topology = key.get("topology")
    counts = topology.get("nproc_per_node") if isinstance(topology, Mapping) else None
    if counts is None:
        counts = [node.get("nproc_per_node") for node in nodes_of(plan)]
    return [count for count in counts if isinstance(count, int)] if isinstance(counts, list) else []


def hosts_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the nodes in plan.json."""
    return tuple(str(node["host"]) for node in nodes_of(plan) if "host" in node)


def nodes_of(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes in plan.json without damaged entries."""
    nodes = plan.get("nodes")
    return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []


def unkeyed(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return what a run read although its key lacks it: path → ``read``, ``looked for``, or REPLACED."""
    records = [record for node in nodes if isinstance(record := node.get("unkeyed"), Mapping)]
    return {str(name): str(how) for record in records for name, how in record.items()}


def python_path(config: Mapping[str, Any]) -> str:
    """Return the PYTHONPATH of ``cluster.env``, which follows the run's code on the ranks' path."""
    cluster: Any = config.get("cluster")
    return str(((cluster or {}).get("env") or {}).get("PYTHONPATH") or "")
