"""What key.json, config.json and plan.json tell of a run, from their contents alone; what is damaged is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core import program as programs
from pipeline.keys.content_key import KEY_VERSION


def is_newer(key: Mapping[str, Any]) -> bool:
    """Whether key.json has a version that this code can't know. What is no number is no version: such a file is
    damaged, and written again."""
    version = key.get("version")
    return isinstance(version, int) and version > KEY_VERSION


def what(config: Mapping[str, Any]) -> str:
    """``digits small_cnn sgd``: a run in three words, once its configuration is written.

    What is of a person's own goes by its target (``my_package.nets:MyNet``).
    """
    if not config:
        return "(no config.json yet)"
    if not programs.of(config).is_ours:
        return f"script {programs.script_of(config)}"
    groups = (config.get(group) for group in ("dataset", "model", "optimizer"))
    return " ".join(_named(group) if isinstance(group, Mapping) else "?" for group in groups)


def _named(group: Mapping[str, Any]) -> str:
    from trainers.core.config import OWN  # not for a finished run, which only asks for the version

    name = str(group.get("name", "?"))
    return str(group.get("target") or name) if name == OWN else name


def ranks_of(key: Mapping[str, Any], plan: Mapping[str, Any]) -> list[int]:
    """Ranks of each node, from what key.json holds; with trainer.shards those of the last attempt, from plan.json."""
    topology = key.get("topology")
    found = topology.get("nproc_per_node") if isinstance(topology, Mapping) else None
    if found is None:
        found = [node.get("nproc_per_node") for node in nodes_of(plan)]
    return [count for count in found if isinstance(count, int)] if isinstance(found, list) else []


def hosts_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the nodes, from what plan.json holds."""
    return tuple(str(node["host"]) for node in nodes_of(plan) if "host" in node)


def nodes_of(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes that plan.json holds; what is damaged is left out."""
    nodes = plan.get("nodes")
    return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
