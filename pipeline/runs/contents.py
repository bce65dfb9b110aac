"""Facts about a run (its name, its ranks, what it trains) from the contents of key.json, config.json and plan.json.

Callers have read these files and pass them as dictionaries: nothing here reads a file. Damaged parts are left out."""

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
"""A value of the record ``unkeyed`` (path → how a run read it): the file was replaced after the key was taken of it."""

_NOT_OF_THE_RUN = ("cluster", "tracking", "paths", "sweep", "search", "hydra", "notify")
"""Sections of the configuration that say where a run takes place, what is swept or searched, or who is notified."""
_KEY_DIGITS = 4
_MOST_OF_VALUE = 32  # characters of one value
_MOST_OF_LABELS = 90  # of all labels together: MLflow's table shows no more
_LONG_NUMBER = re.compile(r"-?\d+\.\d{5,}(e-?\d+)?")


def makes_another_run(override: str) -> bool:
    """Return True if an override, or the name before its ``=``, can make another run."""
    return re.split(r"[.=@/]", override.lstrip("+~"), maxsplit=1)[0] not in _NOT_OF_THE_RUN


def distinguishing_labels(words: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return short labels: ``optimizer.lr=0.1 model=resnet18 seed=2`` → ``lr=0.1``, ``resnet18``, ``seed=2``.

    Overrides that can't make another run are left out, and of two for one field the last counts. ``config``, the
    content of config.json, says which names are groups."""
    override_by_name = {word.partition("=")[0].lstrip("+"): word for word in words if makes_another_run(word)}
    uses = Counter(name.rpartition(".")[2] for name in override_by_name)  # of each last word of a field
    labels = []
    for name, word in override_by_name.items():
        ambiguous = uses[name.rpartition(".")[2]] > 1
        labels.append(_label(name, word, config, words=2 if ambiguous else 1))
    return tuple(labels)


def _label(name: str, override: str, config: Mapping[str, Any], *, words: int) -> str:
    """Return the label of one override; ``words``: how many of the last words of its field are shown."""
    value = short_value(override.partition("=")[2])
    if isinstance(config.get(name), Mapping) or name.startswith("~"):  # a group, or one that is removed
        return value or name
    if name.endswith(".name") and isinstance(config.get(name.removesuffix(".name")), Mapping):
        return value  # model.name=resnet18 is read like model=resnet18
    return f"{'.'.join(name.split('.')[-words:])}={value}"


def short_field_names(fields: Sequence[str]) -> dict[str, str]:
    """Return field → its last word (``optimizer.lr`` → ``lr``), with the word before it where that isn't enough."""
    uses = Counter(_last_words(name, 1) for name in fields)
    short = {name: _last_words(name, 1 if uses[_last_words(name, 1)] == 1 else 2) for name in fields}
    # fields that even two words don't tell apart keep their full names
    uses = Counter(short.values())
    return {name: word if uses[word] == 1 else name for name, word in short.items()}


def _last_words(name: str, words: int) -> str:
    """Return the last words of a field; ``model`` for ``model.name``, which chooses the option of a group."""
    return ".".join(name.removesuffix(".name").split(".")[-words:])


def short_value(value: str) -> str:
    """Shorten a value for a name: numbers to four digits after the point."""
    plain = printable(value.strip("'\""))
    if _LONG_NUMBER.fullmatch(plain):
        return f"{float(plain):.4g}"
    return plain if len(plain) <= _MOST_OF_VALUE else plain[: _MOST_OF_VALUE - 1] + "…"


def overrides_in(provenance: Mapping[str, Any]) -> list[str]:
    """Return the overrides that made the run, from the content of provenance.json."""
    overrides = provenance.get("overrides")
    return [str(override) for override in overrides] if isinstance(overrides, list) else []


def swept_overrides(sweeps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the overrides that the newest of a run's sweeps chose for it; ``sweeps`` is from sweeps.json."""
    return [str(override) for override in sweeps[-1].get("overrides") or ()] if sweeps else []


def run_name(config: Mapping[str, Any], words: Sequence[str], key: str, *, swept: Sequence[str] = ()) -> str:
    """Return ``lr=0.1 seed=2 · 9176``: the short name and the first digits of the key, which tell equal names apart."""
    return f"{short_name(config, words, swept=swept)} · {key[:_KEY_DIGITS]}"


def short_name(config: Mapping[str, Any], words: Sequence[str], *, swept: Sequence[str] = ()) -> str:
    """Return a name by which users tell runs apart; MLflow's column shows some twenty characters of it.

    A trial is named by the overrides that its sweep chose (``swept``), another run of the classifier by model, data set
    and overrides (``words``), a script's run by the script and its arguments."""
    if labels := distinguishing_labels(swept, config):
        return _joined(labels)
    # the head says already what these overrides choose
    if programs.of(config).is_ours:
        head = f"{_option(config, 'model')} {_option(config, 'dataset')}"
        in_head: tuple[str, ...] = ("model", "dataset", "experiment")
    else:
        head = PurePosixPath(programs.script_of(config)).stem
        in_head = ("experiment", "program", "program.script", "program.torchrun")
    further = (word for word in words if word.lstrip("+").partition("=")[0] not in in_head)
    return f"{head} {_joined(distinguishing_labels(further, config))}".rstrip()


def _option(config: Mapping[str, Any], group: str) -> str:
    section = config.get(group)
    return str(section.get("name", group)) if isinstance(section, Mapping) else group


def _joined(labels: Sequence[str]) -> str:
    text = " ".join(labels)
    return text if len(text) <= _MOST_OF_LABELS else text[: _MOST_OF_LABELS - 1] + "…"


def is_newer(key: Mapping[str, Any]) -> bool:
    """Return True if a newer Paceline wrote this content of key.json. A version that is no number means damage."""
    version = key.get("version")
    return isinstance(version, int) and version > KEY_VERSION


def what_runs(config: Mapping[str, Any]) -> str:
    """Return what a run trains, in a few words: ``digits small_cnn sgd``, or ``script train.py``."""
    if not config:
        return "(no config.json yet)"
    if not programs.of(config).is_ours:
        return f"script {programs.script_of(config)}"
    groups = (config.get(group) for group in ("dataset", "model", "optimizer"))
    return " ".join(_named(group) if isinstance(group, Mapping) else "?" for group in groups)


def _named(group: Mapping[str, Any]) -> str:
    """Return the chosen option of a group; for a class of the user's own, its path (``my_package.nets:MyNet``)."""
    name = str(group.get("name", "?"))
    return str(group.get("target") or name) if name == OWN else name


def ranks_of(key: Mapping[str, Any], plan: Mapping[str, Any]) -> list[int]:
    """Return the number of ranks on each node, from key.json. With trainer.shards any number of ranks gives the same
    weights, so the key has none: then from plan.json."""
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
    """Return what a run read although its key lacks it: path → ``read``, ``looked for``, or REPLACED. ``nodes``:
    summary or result of the first node, dependency records of the further ones."""
    records = [record for node in nodes if isinstance(record := node.get("unkeyed"), Mapping)]
    return {str(name): str(how) for record in records for name, how in record.items()}


def python_path(config: Mapping[str, Any]) -> str:
    """Return the PYTHONPATH of ``cluster.env``; ranks search it after the run's code."""
    cluster: Any = config.get("cluster")
    return str(((cluster or {}).get("env") or {}).get("PYTHONPATH") or "")
