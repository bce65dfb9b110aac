"""A run named by its key: its own words and configuration, read from its folder.

A run folder may come from anybody. It decides what a run is, but not how anything is reached or started. So launcher,
interpreter, ssh configuration, tracking server and notices come from conf/ and the typed words; from the folder come
only names: options of conf/ groups, and labels of hosts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import earlier, launchers, starts
from pipeline.config import compose
from pipeline.config.cluster import build_cluster
from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.files import expanded
from pipeline.core.redact import hide
from pipeline.runs import index
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.cli.invocation import Invocation
    from pipeline.core.specs import Cluster
    from pipeline.runs.folder import RunFolder

_WHERE = ("paths.", "tracking", "cluster")
"""Words that say where, and don't change what a run is."""
_NOT_OF_THE_RUN = ("paths", "tracking", "cluster", "notify")
"""Sections that decide where something goes, or what is started besides the run."""
_CHOICE = re.compile(r"\+?(cluster|experiment|tracking)=[\w-]+(/[\w-]+)*")
_REACHES = ("launcher", "python", "ssh_config", "workdir", "mpirun", "context", "namespace", "kind")
"""Fields of the cluster that decide which hosts are reached, and how: never taken from a run folder."""
_OF_RANKS = (
    *("nnodes", "nproc_per_node", "env", "secrets", "environment", "device"),
    *("lease_s", "collective_timeout_s", "stall_s"),
)
_OF_HOST = ("name", "user", "port", "nproc_per_node", "env")
"""Fields of the cluster, and of each of its hosts, that do come from the run folder."""


def configuration(
    invocation: Invocation, resolved: Mapping[str, Any], root: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the configuration and the words of the run that ``run=KEY`` names.

    Only the place of the runs, and if typed that of data and records, comes from ``resolved``.

    Raises UsageError: no such run, it has no configuration, another word would change it, or conf/ and the words don't
    reach its hosts; AlteredError: its key.json or config.json was altered.
    """
    for word in invocation.overrides:
        if not word.lstrip("+").startswith(_WHERE):
            raise UsageError(
                f"doit {invocation.verb} KEY takes no {word!r}: the run has its own configuration",
                hint=f"doit {invocation.verb} with all words of the run and this one, in place of run=",
            )
    folder = index.find(root / expanded(resolved["paths"]["runs"], "paths.runs"), invocation.options["run"])
    try:
        own = documents.read(folder.path / run_folder.CONFIG)
    except (documents.DamagedError, OSError) as error:
        raise UsageError(
            f"{folder.path / run_folder.CONFIG} can't be read, so only its words tell of run {folder.key}: {error}",
            hint=_with_words(invocation.verb),
        ) from error
    folder.refuse_altered_config()
    if invocation.verb == "attach":
        now = _composed(folder, invocation)
        own = {name: value for name, value in own.items() if name not in _NOT_OF_THE_RUN}
        merged = {**resolved, "tracking": now["tracking"], **own, "cluster": _cluster_to_follow(folder, now["cluster"])}
    else:  # nothing is reached or started
        merged = {**resolved, **own, "paths": resolved["paths"], "tracking": resolved["tracking"]}
    data = _section(folder, "paths").get("data")
    names_data = any(word.lstrip("+").startswith("paths.data") for word in invocation.overrides)
    if not names_data and isinstance(data, str) and (root / data).is_dir():
        merged["paths"] = {**resolved["paths"], "data": data}
    return merged, tuple(folder.overrides())


def cluster(folder: RunFolder, invocation: Invocation, root: Path, local_gpus: int) -> Cluster:
    """Return the hosts that the run was last started on, reached by conf/ and the typed words.

    Raises UsageError: the run was never started, or the way to its hosts is unknown.
    """
    path = folder.path / run_folder.CONFIG
    if not path.exists():
        raise UsageError(f"run {folder.key} was never started: there is no {path}")
    raw = _composed(folder, invocation)["cluster"]
    plan, launcher = earlier.newest_plan(folder.path), raw["launcher"]
    nodes = plan.nodes if plan is not None and plan.launcher == launcher else ()
    if not raw["hosts"] and raw["hostfile"] is None and _takes_host_names(launcher):
        raw = {**raw, "hosts": [_host_entry(node.host) for node in nodes]}
    cluster_config = build_cluster(raw, root=root, local_gpus=local_gpus)
    if plan is None or not nodes or not _takes_host_names(cluster_config.launcher):
        return cluster_config
    hosts = starts.cluster_with(cluster_config, plan, [node.host for node in nodes]).hosts
    return replace(cluster_config, hosts=hosts, spares=())


def _composed(folder: RunFolder, invocation: Invocation) -> dict[str, Any]:
    """Compose conf/ with the typed words, and with the run's options for groups without a word.

    Raises UsageError: the run was started with other words about reaching hosts.
    """
    words = [word for word in folder.overrides() if word.lstrip("+~").startswith("cluster")]
    chosen = {word.lstrip("+").partition("=")[0]: word for word in folder.overrides() if _CHOICE.fullmatch(word)}
    typed = {word.lstrip("+~").partition("=")[0] for word in invocation.overrides}
    settled = {*typed, "experiment"} if "cluster" in typed else typed  # an experiment may choose a cluster too
    choices = [word for name, word in chosen.items() if name not in settled]
    now = compose.resolve(compose.compose_config((*choices, *invocation.overrides)))
    same_words = " ".join(shlex.quote(hide(word)) for word in words if word.isprintable())
    hint = f"doit {invocation.verb} {folder.key} {same_words or 'cluster=<that of its training>'}"
    launcher, known = now["cluster"]["launcher"], _launchers(folder)
    if known and launcher not in known:
        raise UsageError(
            f"run {folder.key} was started by cluster.launcher={', '.join(known)}, and these words reach hosts by "
            f"{launcher}; a run folder doesn't say how",
            hint=hint,
        )
    is_here = launchers.LAUNCHERS.settings(launcher).capabilities.is_this_computer
    fields = [word.lstrip("+~").partition("=")[0] for word in words]
    lacking = [name for name in fields if name in {f"cluster.{field}" for field in _REACHES} - typed and not is_here]
    if lacking and "cluster" not in typed:
        raise UsageError(
            f"run {folder.key} was started with {', '.join(dict.fromkeys(lacking))}, which is never taken from a run "
            "folder",
            hint=hint,
        )
    return now


def _launchers(folder: RunFolder) -> list[str]:
    """Return the launchers by which something of the run may be under way."""
    newest = earlier.newest_plan(folder.path)
    plans = [start.plan for start in starts.open_starts(folder.path)] + ([newest] if newest is not None else [])
    named: list[Any] = [plan.launcher for plan in plans] or [_section(folder, "cluster").get("launcher")]
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and name.isidentifier()))


def _cluster_to_follow(folder: RunFolder, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``cluster`` for following a run: its ranks and host labels, reached by conf/ and the words."""
    own = _section(folder, "cluster")
    raw = {**now, **{name: own[name] for name in _OF_RANKS if name in own}, "max_restarts": 0, "min_nodes": 0}
    if not _takes_host_names(now["launcher"]):
        return raw
    try:
        known = {starts.host_of(str(entry["name"])).label: entry for entry in (*now["hosts"], *now["spares"])}
        plan = earlier.newest_plan(folder.path)
        nodes = plan.nodes if plan is not None else ()
        hosts = own.get("hosts") or [
            {**_host_entry(node.host), "nproc_per_node": node.nproc_per_node} for node in nodes
        ]
        for section, rows in (("hosts", hosts), ("spares", own.get("spares") or [])):
            raw[section] = [
                {**known.get(row["name"], {}), **{name: row[name] for name in _OF_HOST if name in row}} for row in rows
            ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(folder.key, error, "attach") from error
    return {**raw, "hostfile": None}


def damaged(key: str, error: Exception, verb: str | None) -> UsageError:
    """Return the error for a config.json with impossible values."""
    why = f"it lacks the field {error}" if isinstance(error, KeyError) else str(error)
    return UsageError(f"config.json of run {key} is no configuration that can be used: {why}", hint=_with_words(verb))


def _with_words(verb: str | None) -> str:
    return f"doit {verb} with the words that it was trained with, in place of run="


def _takes_host_names(launcher: str) -> bool:
    """Whether the launcher is told which hosts to use."""
    able = launchers.LAUNCHERS.settings(launcher).capabilities
    return not able.is_this_computer and not able.hosts_are_granted


def _host_entry(label: str) -> dict[str, Any]:
    host = starts.host_of(label)
    return {"name": host.name, "user": host.user, "port": host.port}


def _section(folder: RunFolder, name: str) -> dict[str, Any]:
    section = (folder.read_json(run_folder.CONFIG) or {}).get(name)
    return section if isinstance(section, dict) else {}
