"""The configuration for a command that names a run by its key: `why KEY`, `attach KEY`, `stop KEY`.

What the run computes is read from its folder. How hosts are reached, and what is started on them, comes only from conf/
and the typed words: a run folder may be a stranger's, and must not be able to start anything here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import launchers, starts
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

_LOCATION_PREFIXES = ("paths.", "tracking", "cluster")
"""Beginnings of the overrides that may be typed with a key, because they don't change what the run computes."""
_LOCATION_SECTIONS = ("paths", "tracking", "cluster", "notify")
"""Sections that decide where results go, or which programs besides the training are started: not from a run folder."""
_GROUP_CHOICE = re.compile(r"\+?(cluster|experiment|tracking)=[\w-]+(/[\w-]+)*")
"""An override that chooses an option of a group, such as ``cluster=pssh``."""
_CONNECTION_FIELDS = ("launcher", "python", "ssh_config", "workdir", "mpirun", "context", "namespace", "kind")
"""Fields of the cluster that decide which hosts are reached, and how: never taken from a run folder."""
_RANK_FIELDS = (
    *("nnodes", "nproc_per_node", "env", "secrets", "environment", "device"),
    *("lease_s", "collective_timeout_s", "stall_s"),
)
_HOST_FIELDS = ("name", "user", "port", "nproc_per_node", "env")
"""Fields of the cluster, and of each of its hosts, that `attach` takes from the run folder."""

Section = dict[str, Any]
"""A resolved configuration (all interpolations replaced), or one section of it, as plain containers."""


def configuration(invocation: Invocation, resolved: Section, root: Path) -> tuple[Section, tuple[str, ...]]:
    """Return the resolved configuration of the run that ``run=KEY`` names, and the overrides that started it.

    ``resolved`` is composed of conf/ and the typed words. From it come the folders of runs and data and the address of
    records, with two exceptions where no word says otherwise: the data folder is the run's, and `attach` records where
    the run's ``tracking=`` choice says.

    Raises UsageError: there is no such run, it has no configuration, a typed word would change it, or conf/ and the
    words don't reach its hosts; AlteredError: its key.json or config.json was altered.
    """
    for word in invocation.overrides:
        if not word.lstrip("+").startswith(_LOCATION_PREFIXES):
            raise UsageError(
                f"doit {invocation.verb} KEY takes no {word!r}: the run has its own configuration",
                hint=f"doit {invocation.verb} with all words of the run and this one, in place of run=",
            )
    folder = index.find(root / expanded(resolved["paths"]["runs"], "paths.runs"), invocation.options["run"])
    try:
        stored = documents.read(folder.path / run_folder.CONFIG)
    except (documents.DamagedError, OSError) as error:
        raise UsageError(
            f"{folder.path / run_folder.CONFIG}, the configuration of run {folder.key}, can't be read: {error}",
            hint=_with_words(invocation.verb),
        ) from error
    folder.refuse_altered_config()
    if invocation.verb == "attach":
        composed = _composed(folder, invocation)
        stored = {name: section for name, section in stored.items() if name not in _LOCATION_SECTIONS}
        cluster_section = _cluster_to_follow(folder, composed["cluster"])
        merged = {**resolved, "tracking": composed["tracking"], **stored, "cluster": cluster_section}
    else:  # `why` reaches no host and starts nothing, so the stored configuration can be taken as it is
        merged = {**resolved, **stored, "paths": resolved["paths"], "tracking": resolved["tracking"]}
    data_dir = _stored_section(folder, "paths").get("data")
    is_typed = any(word.lstrip("+").startswith("paths.data") for word in invocation.overrides)
    if not is_typed and isinstance(data_dir, str) and (root / data_dir).is_dir():
        merged["paths"] = {**resolved["paths"], "data": data_dir}
    return merged, tuple(folder.overrides())


def with_run_in_progress(invocation: Invocation, resolved: Section, root: Path) -> Invocation:
    """Return the invocation with ``run=KEY`` of the only run in progress. Raises UsageError: not exactly one is."""
    runs_dir = resolved["paths"]["runs"]
    folder = index.only_under_way(root / expanded(runs_dir, "paths.runs"), invocation.verb or "")
    if folder is None:
        raise UsageError(f"nothing to attach to: no run under {runs_dir} is under way", hint="doit status")
    return invocation._replace(options={**invocation.options, "run": folder.key})


def cluster(folder: RunFolder, invocation: Invocation, root: Path, local_gpus: int) -> Cluster:
    """Return the hosts on which the run was last started, for verbs that act on them (`stop`).

    How they are reached comes from conf/ and the typed words. Raises UsageError: the run was never started, or these
    don't reach its hosts.
    """
    path = folder.path / run_folder.CONFIG
    if not path.exists():
        raise UsageError(f"run {folder.key} was never started: there is no {path}")
    section: Section = _composed(folder, invocation)["cluster"]
    plan, launcher = starts.newest_plan(folder.path), section["launcher"]
    nodes = plan.nodes if plan is not None and plan.launcher == launcher else ()
    # conf/ may name no hosts; build_cluster would refuse that, and the plan has them
    if not section["hosts"] and section["hostfile"] is None and _takes_host_names(launcher):
        section = {**section, "hosts": [_host_entry(node.host) for node in nodes]}
    reached = build_cluster(section, root=root, local_gpus=local_gpus)
    if plan is None or not nodes or not _takes_host_names(reached.launcher):
        return reached
    # only the hosts of the plan, each with the settings that conf/ and the words give it, if any
    hosts = starts.cluster_with(reached, plan, [node.host for node in nodes]).hosts
    return replace(reached, hosts=hosts, spares=())


# ------------------------------------------------------------------------------------- how its hosts are reached
def _composed(folder: RunFolder, invocation: Invocation) -> Section:
    """Compose conf/ with the typed words, and with the run's choices of groups that no typed word changes.

    Raises UsageError: the run was started with other words about reaching hosts.
    """
    choices = {word.lstrip("+").partition("=")[0]: word for word in folder.overrides() if _GROUP_CHOICE.fullmatch(word)}
    typed_names = {word.lstrip("+~").partition("=")[0] for word in invocation.overrides}
    # an experiment may choose a cluster too, and a typed cluster= must win
    settled = {*typed_names, "experiment"} if "cluster" in typed_names else typed_names
    words = [word for name, word in choices.items() if name not in settled]
    composed = compose.resolve(compose.compose_config((*words, *invocation.overrides)))
    _refuse_unreachable(folder, invocation, composed["cluster"]["launcher"], typed_names)
    return composed


def _refuse_unreachable(folder: RunFolder, invocation: Invocation, launcher: str, typed: Collection[str]) -> None:
    """Raise UsageError if the run was started by another launcher, or with connection settings not ``typed``."""
    # the error proposes the cluster words of the run's own command
    words = [word for word in folder.overrides() if word.lstrip("+~").startswith("cluster")]
    same_words = " ".join(shlex.quote(hide(word)) for word in words if word.isprintable())
    hint = f"doit {invocation.verb} {folder.key} {same_words or 'cluster=<that of its training>'}"
    launchers_of_run = _launchers(folder)
    if launchers_of_run and launcher not in launchers_of_run:
        raise UsageError(
            f"run {folder.key} was started by cluster.launcher={', '.join(launchers_of_run)}, and these words reach "
            f"hosts by {launcher}; a run folder doesn't say how",
            hint=hint,
        )
    if "cluster" in typed or launchers.LAUNCHERS.settings(launcher).capabilities.is_this_computer:
        return
    untyped = {f"cluster.{field}" for field in _CONNECTION_FIELDS} - {*typed}
    missing = [name for word in words if (name := word.lstrip("+~").partition("=")[0]) in untyped]
    if missing:
        raise UsageError(
            f"run {folder.key} was started with {', '.join(dict.fromkeys(missing))}, which is never taken from a run "
            "folder",
            hint=hint,
        )


def _launchers(folder: RunFolder) -> list[str]:
    """Return the launchers of the run's open starts and newest start, or if it has none, of its configuration."""
    newest = starts.newest_plan(folder.path)
    plans = [start.plan for start in starts.open_starts(folder.path)] + ([newest] if newest is not None else [])
    names: list[Any] = [plan.launcher for plan in plans] or [_stored_section(folder, "cluster").get("launcher")]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and name.isidentifier()))


def _cluster_to_follow(folder: RunFolder, composed: Section) -> Section:
    """Return the section ``cluster`` with which `attach` follows a run: its ranks and hosts; the rest as composed."""
    stored = _stored_section(folder, "cluster")
    ranks = {name: stored[name] for name in _RANK_FIELDS if name in stored}
    # a run folder must not start anything, so `attach KEY` makes no further attempts
    section = {**composed, **ranks, "max_restarts": 0, "min_nodes": 0}
    if not _takes_host_names(composed["launcher"]):
        return section
    try:
        composed_hosts = {  # by label (USER@NAME:PORT); the stored configuration names hosts by label
            starts.host_of(str(host["name"])).label: host for host in (*composed["hosts"], *composed["spares"])
        }
        plan = starts.newest_plan(folder.path)
        # hosts from a hostfile are not in the stored section, but the newest plan has them
        stored_hosts = stored.get("hosts") or [
            {**_host_entry(node.host), "nproc_per_node": node.nproc_per_node}
            for node in (plan.nodes if plan is not None else ())
        ]
        for field, hosts in (("hosts", stored_hosts), ("spares", stored.get("spares") or [])):
            section[field] = [
                {**composed_hosts.get(host["name"], {}), **{name: host[name] for name in _HOST_FIELDS if name in host}}
                for host in hosts
            ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged_error(folder.key, error, "attach") from error
    return {**section, "hostfile": None}


def _takes_host_names(launcher: str) -> bool:
    capabilities = launchers.LAUNCHERS.settings(launcher).capabilities
    return not capabilities.is_this_computer and not capabilities.hosts_are_granted


def _host_entry(label: str) -> Section:
    host = starts.host_of(label)
    return {"name": host.name, "user": host.user, "port": host.port}


# ------------------------------------------------------------------------------------- its config.json
def _stored_section(folder: RunFolder, name: str) -> Section:
    section = (folder.read_json(run_folder.CONFIG) or {}).get(name)
    return section if isinstance(section, dict) else {}


def damaged_error(key: str, error: Exception, verb: str | None) -> UsageError:
    """Return the error for a config.json with impossible values; ``error`` is what its values raised."""
    why = f"it lacks the field {error}" if isinstance(error, KeyError) else str(error)
    return UsageError(f"config.json of run {key} is no configuration that can be used: {why}", hint=_with_words(verb))


def _with_words(verb: str | None) -> str:
    return f"doit {verb} with the words that it was trained with, in place of run="
