"""Record the starts of a run whose hosts may still hold processes or files, and find folders there that nobody needs.

plan.json describes only the newest start, and a run may go on with other hosts. So each start whose hosts have copies
of the run folder first writes attempts/N/start-*.json. The file is removed once everything was fetched from the hosts.

A run folder may come from anyone, so only names are read from it: run ids, host names, folders named by the run id.
How a host is reached (launcher, interpreter, ssh configuration) always comes from the command line and conf/.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.files import write_json
from pipeline.core.specs import SCRIPT_OUTPUTS, TRAINING_OUTPUTS, Cluster, Host, LaunchPlan, NodePlan, unfit_name
from pipeline.core.tables import counted, file_size
from pipeline.runs import journal
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts, LeftFolder

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher


_COLLECTED = "collected"  # file in attempts/N with the run id of a start whose outputs are all here
_CONNECT_S = 5.0  # short, because hosts that the command doesn't name may no longer exist
_RUN_ID = re.compile(r"(?P<key>\w+)-[0-9a-f]{6}-(?P<attempt>\d+)-[0-9a-f]+")
_LABEL = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>[^@]+?)(?::(?P<port>\d{1,5}))?")
_ADDRESS = re.compile(r"[\w.-]{0,255}|[0-9A-Fa-f.:]*(%[\w.-]+)?", re.ASCII)
_LONGEST = 1000  # characters of a text
# fields of a plan, and of its nodes, by their type
_TEXTS, _COUNTS = ("run_id", "run_key", "launcher"), ("attempt", "master_port", "world_size")
_SECONDS = ("lease_s", "stall_s", "collective_timeout_s", "checkpoint_fetch_s")
_TEXTS_OF_NODE = ("host", "identity", "machine", "run_dir", "data_dir", "state_dir")
_COUNTS_OF_NODE = ("node_rank", "first_rank", "nproc_per_node")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start: its ``plan`` without commands and environments, and the unix time when a command last followed it."""

    plan: LaunchPlan
    followed_at: float

    @property
    def lease_ends(self) -> float:
        """Unix time after which none of its ranks runs any more, unless a command follows it again."""
        return self.followed_at + self.plan.lease_s


def record(plan: LaunchPlan, run_dir: Path) -> None:
    """Record the hosts on which ``plan`` is about to start."""
    path = _path(plan.run_id, run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    value = dataclasses.asdict(dataclasses.replace(plan, submission=""))
    not_recorded = {"argv", "env", "container"}
    nodes = [{name: node[name] for name in node if name not in not_recorded} for node in value["nodes"]]
    write_json(path, {**value, "nodes": nodes})


def renew(run_id: str, run_dir: Path) -> None:
    """Record that a command follows the start now, which renews its lease."""
    with suppress(OSError):  # starts of earlier versions have no such file
        os.utime(_path(run_id, run_dir))


def remove(run_id: str, run_dir: Path) -> None:
    """Remove the record of a start whose hosts hold nothing more."""
    _path(run_id, run_dir).unlink(missing_ok=True)


def is_recorded(run_id: str, run_dir: Path) -> bool:
    """Return whether the hosts of the start may still hold something of it."""
    return _path(run_id, run_dir).is_file()


def open_starts(run_dir: Path) -> list[Start]:
    """Return the recorded starts of a run, the oldest first; skip damaged records."""
    starts = []
    for path in run_dir.glob("attempts/*/start-*.json"):
        plan = read_plan(path, run_dir)
        if plan is not None and _path(plan.run_id, run_dir) == path:
            with suppress(OSError):  # just removed
                starts.append(Start(plan=plan, followed_at=path.stat().st_mtime))
    order = {run_id: number for number, run_id in enumerate(journal.known_attempts(run_dir))}
    return sorted(starts, key=lambda start: (start.plan.attempt, order.get(start.plan.run_id, len(order))))


def read_plan(path: Path, run_dir: Path) -> LaunchPlan | None:
    """Read a plan of ``run_dir`` without commands and environments; None if it is missing, damaged or invalid."""
    try:
        return plan_of(documents.read(path), run_dir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def mark_collected(plan: LaunchPlan, run_dir: Path) -> None:
    """Record that later attempts need nothing from the hosts of ``plan``, unless the run folder was removed."""
    folder = run_dir / run_folder.ATTEMPTS / str(plan.attempt)
    if folder.is_dir():
        (folder / _COLLECTED).write_text(plan.run_id, encoding="utf-8")
        remove(plan.run_id, run_dir)


def is_collected(run_id: str, run_dir: Path) -> bool:
    """Return whether nothing on a start's hosts is needed: all was fetched, or a later attempt has begun without it."""
    run_ids = journal.known_attempts(run_dir)
    if run_id not in run_ids or is_open(run_id, run_dir):
        return False
    return run_ids[-1] != run_id or _collected_run_id(run_dir, journal.attempt_number(run_id)) == run_id


def is_open(run_id: str, run_dir: Path) -> bool:
    return is_recorded(run_id, run_dir) and not (run_dir / run_folder.RESULT).exists()


def _collected_run_id(run_dir: Path, attempt: int | str) -> str:
    path = run_dir / run_folder.ATTEMPTS / str(attempt) / _COLLECTED
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def newest_plan(run_dir: Path) -> LaunchPlan | None:
    """Return the plan of the newest attempt; None if there is none."""
    return read_plan(run_dir / run_folder.PLAN, run_dir)


def unfinished_plan(run_dir: Path) -> LaunchPlan | None:
    """Return the plan of the newest attempt; None if nothing of it is left on its hosts."""
    plan = newest_plan(run_dir)
    if plan is None or not plan.nodes or journal.known_attempts(run_dir)[-1:] != [plan.run_id]:
        return None
    return None if _collected_run_id(run_dir, plan.attempt) == plan.run_id else plan


def plan_of(value: Mapping[str, Any], run_dir: Path) -> LaunchPlan:
    """Build a plan from its JSON, and check each field, because the file may come from anyone.

    Commands and environments stay empty. Raises KeyError, TypeError, ValueError: damaged, or not of this run folder.
    """
    fields = _fields(value, _TEXTS, _COUNTS, "master_addr", _SECONDS)
    run_id, nodes = value["run_id"], value["nodes"]
    form = _RUN_ID.fullmatch(run_id)
    if form is None or form["key"] != value["run_key"] or int(form["attempt"]) != value["attempt"]:
        raise ValueError(f"{run_id!r} is no run id of attempt {value['attempt']!r} of run {value['run_key']!r}")
    if not re.fullmatch(r"[\w-]{0,255}", value["launcher"]) or not isinstance(nodes, list):
        raise ValueError(f"{value['launcher']!r} is no launcher, or {nodes!r} no list")
    if len({node["host"] for node in nodes}) != len(nodes):
        raise ValueError("it names a host twice")
    return LaunchPlan(
        **fields,
        nodes=tuple(_node(row, number, run_id, run_dir) for number, row in enumerate(nodes)),
        outputs=SCRIPT_OUTPUTS if value["outputs"]["whole"] else TRAINING_OUTPUTS,
    )


def cluster_with(cluster: Cluster, plan: LaunchPlan, labels: Collection[str]) -> Cluster:
    """Return ``cluster`` with these hosts of the plan instead. Raises UsageError: another launcher started the plan."""
    if plan.launcher != cluster.launcher:
        raise UsageError(
            f"cluster.launcher={plan.launcher} started it there, and this command reaches hosts by {cluster.launcher}",
            hint=f"doit stop {plan.run_key} cluster=<the cluster of that attempt>",
        )
    configured = {host.label: host for host in (*cluster.hosts, *cluster.spares)}
    # of a host that isn't configured any more, the interpreter is probably that of all others
    pythons = {host.python for host in cluster.hosts}
    python = pythons.pop() if len(pythons) == 1 else None
    hosts = tuple(configured.get(label) or dataclasses.replace(host_of(label), python=python) for label in labels)
    return dataclasses.replace(cluster, hosts=hosts, spares=()).with_settings(connect_timeout_s=_CONNECT_S)


def host_of(label: str) -> Host:
    """Return the host with this label. Raises ValueError: not a valid label."""
    form = _LABEL.fullmatch(label) if label.isprintable() else None
    if form is None:
        raise ValueError(f"{label!r} is no label of a host")
    host = Host(name=form["name"], user=form["user"], port=int(form["port"]) if form["port"] else None)
    if (why := unfit_name(host)) is not None or not 0 < (host.port or 1) < 1 << 16:
        raise ValueError(f"{label!r} {why or 'has no such port'}")
    return host


def _node(row: Mapping[str, Any], number: int, run_id: str, run_dir: Path) -> NodePlan:
    fields = _fields({**row, "machine": row.get("machine") or ""}, _TEXTS_OF_NODE, _COUNTS_OF_NODE, "address")
    if row["node_rank"] != number:
        raise ValueError(f"node {number} has the rank {row['node_rank']!r}")
    if not _is_folder_of(run_id, row["run_dir"], row["state_dir"], run_dir):
        raise ValueError(f"{row['run_dir']!r} is no folder of run {run_id}")
    return NodePlan(**{**fields, "host": host_of(row["host"]).label}, argv=(), env={})


def _fields(
    row: Mapping[str, Any], texts: Sequence[str], counts: Sequence[str], address: str, seconds: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the named fields of a plan or node. Raises KeyError, TypeError, ValueError: one has another form."""
    for name in texts:
        if len(row[name]) > _LONGEST or not row[name].isprintable():
            raise ValueError(name)
    for name in (*counts, *seconds):
        if type(row[name]) not in ((int, float) if name in seconds else (int,)) or not 0 <= row[name] < 1 << 32:
            raise ValueError(name)
    if _ADDRESS.fullmatch(row[address]) is None:
        raise ValueError(address)
    return {name: row[name] for name in (*texts, *counts, *seconds, address)}


def _is_folder_of(run_id: str, node_dir: str, state_dir: str, run_dir: Path) -> bool:
    """Return whether ``plan.render`` could have chosen these folders for the start."""
    parts = node_dir.split("/")
    if not node_dir.startswith(("/", "~/")) or ".." in (*parts, *state_dir.split("/")):
        return False
    if parts[-3:-1] == ["runs", run_id] and re.fullmatch(r"node\d+", parts[-1]):  # below a host's workdir
        return state_dir == f"{node_dir}/agent"
    shared = f"{node_dir}/attempts/{journal.attempt_number(run_id)}/agent-{run_id}"
    return (
        node_dir == str(run_dir.resolve()) and re.fullmatch(rf"{re.escape(shared)}(/node\d+)?", state_dir) is not None
    )


def _path(run_id: str, run_dir: Path) -> Path:
    """Return the file that records a start."""
    attempt, random_part = str(journal.attempt_number(run_id)), run_id.rpartition("-")[2]
    return run_dir / run_folder.ATTEMPTS / attempt / f"start-{random_part}.json"


# ----------------------------------------------------------------------------- folders that old attempts left on hosts
OUTPUTS_KEPT_S = 7 * 86_400.0  # for a run that this project doesn't know, whose outputs another clone may fetch
EMPTY_KEPT_S = 3600.0  # for folders without outputs; then their controller counts as gone


def why_kept(left: LeftFolder, runs_dir: Path) -> str:
    """Return the reason to keep a folder; '' if it may be removed. ``runs_dir``: this project's folder of runs."""
    # a run id also names its run folder by six digits of a digest: other clones of a project have the same keys
    prefix = journal.prefix_of_attempt(left.run_id)
    key = prefix[: -len("-abcdef-")]
    run_dir = runs_dir.resolve() / key
    is_ours = prefix == journal.attempt_prefix(key, run_dir)
    if is_ours and is_collected(left.run_id, run_dir):
        return ""
    is_needed = journal.known_attempts(run_dir)[-1:] == [left.run_id] or is_open(left.run_id, run_dir)
    if is_ours and left.holds_outputs and is_needed:  # the next attempt fetches them
        return f"run {key} goes on from its checkpoints: the same command fetches them"
    may_be_fetched = left.holds_outputs and (not is_ours or run_dir.exists())
    if left.idle_s > (OUTPUTS_KEPT_S if may_be_fetched else EMPTY_KEPT_S):
        return ""
    outputs = ", and has outputs of a run unknown here" if may_be_fetched else ""
    return f"it was in use {idle_words(left.idle_s)} ago{outputs}"


def clear_leftovers(launcher: Launcher, facts: Sequence[HostFacts], runs_dir: Path) -> list[str]:
    """Remove the folders of old attempts that nobody needs; return a line for each host that had one."""
    unneeded = {fact.host: [folder for folder in fact.left_folders if not why_kept(folder, runs_dir)] for fact in facts}
    names = [(fact, [folder.name for folder in unneeded[fact.host]]) for fact in facts if unneeded[fact.host]]
    lines = []
    for host, removed in launcher.remove_folders(names).items():
        size = file_size(sum(folder.bytes for folder in unneeded[host] if folder.name in removed))
        if removed:
            lines.append(f"{host}: removed what was left of {counted(len(removed), 'attempt')}, {size}")
    return lines


def idle_words(seconds: float) -> str:
    """Return a duration in words."""
    return f"{seconds / 86_400:.0f} days" if seconds >= 2 * 86_400 else f"{seconds / 60:.0f} minutes"
