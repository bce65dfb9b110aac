"""What a command would do (`doit plan`): its tasks with reasons, and the exact command of each host, as text or graph.

Nothing is started and no host is asked: what only a host's probe would tell is a placeholder, ``<python of node0>``."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pipeline import tracking
from pipeline.cluster import launchers
from pipeline.cluster.agent.host.hardware import count_cpus
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.plan import render
from pipeline.config.build import RunConfig
from pipeline.config.step_source import StepState
from pipeline.core import program as programs
from pipeline.core.specs import Cluster, Host, LaunchPlan, NodePlan
from pipeline.core.tables import counted
from pipeline.data.manifest import Pack
from pipeline.data.trees import Tree
from pipeline.execution import stored_report
from pipeline.execution.initial_weights import InitialWeights
from pipeline.execution.restarts import next_start
from pipeline.execution.run import Run, initial_weights_of
from pipeline.runs import journal
from pipeline.runs.folder import EVALUATED
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts
from trainers.script.settings import ScriptConfig, words

_USER_STEP = "step "  # prefix of the names of user-defined steps


@dataclass(frozen=True)
class PlannedTask:
    """One task of a run, whether it is done and why. A user-defined step ``needs`` others, a task the one before."""

    name: str
    done: bool
    why: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One configuration: its tasks (``steps``) and what would be launched. ``key`` is None until its data is fetched.

    ``chosen`` are the overrides that a sweep chose; ``accepted`` describes the acceptance of another run's result.
    ``script``: the command line of a script, with its placeholders."""

    key: str | None
    chosen: tuple[str, ...]
    overrides: tuple[str, ...]
    steps: tuple[PlannedTask, ...]
    launch: LaunchPlan
    accepted: str | None = None
    script: tuple[str, ...] = ()

    @property
    def to_run(self) -> bool:
        return any(not task.done for task in self.steps)


def planned(
    config: RunConfig, pack: Pack | Tree | None, run: Run | None, *, root: Path, chosen: tuple[str, ...] = ()
) -> PlannedRun:
    """Plan one configuration from local files. ``pack``, ``run``: None if not known yet. Raises UsageError."""
    return PlannedRun(
        key=run.key.short if run else None,
        chosen=chosen,
        overrides=config.overrides,
        steps=steps(config, pack, run, root=root),
        launch=launch_plan(config, run),
        accepted=_accepted(run),
        script=_script(config),
    )


def _script(config: RunConfig) -> tuple[str, ...]:
    if config.script is None:
        return ()
    settings = ScriptConfig(**config.resolved[programs.SECTION])
    program = ["-m", settings.module] if settings.module else [settings.script] if settings.script else settings.command
    return (*program, *words(settings.args))


def _accepted(run: Run | None) -> str | None:
    return str(run.accepted) if run is not None and run.accepted is not None and run.reason is None else None


# ------------------------------------------------------------------------------------------- steps
def steps(config: RunConfig, pack: Pack | Tree | None, run: Run | None, *, root: Path) -> tuple[PlannedTask, ...]:
    """Return the user-defined steps that make the data, then fetch, init, train, evaluate and record."""
    user_defined = [step_task(state) for state in config.step.states()] if config.step is not None else []
    first = (*user_defined, _fetch(config, pack), *_init(initial_weights_of(config, root)))
    if run is None:  # no key yet
        waits = "its data isn't fetched" if pack is None else "it starts from weights that aren't here"
        train = PlannedTask("train", False, f"{waits}, so its key isn't known yet")
        return (
            *first,
            train,
            PlannedTask("evaluate", False, "after train"),
            _record(config, None, "after evaluate", root),
        )
    run.folder.refuse_newer()
    if (accepted := _accepted(run)) is not None:
        return (*first, *(PlannedTask(name, True, accepted) for name in ("train", "evaluate", "record")))
    # an acceptance that is no longer valid has a reason of its own
    stale = run.reason if run.accepted is not None else run.folder.stale_because(run.key.digest)
    train = _train(run, stale)
    if not config.program.evaluated:
        return (*first, train, _record(config, run, None if train.done else "after train", root))
    evaluate = _evaluate(run, stale, root) if train.done else PlannedTask("evaluate", False, "after train")
    return (*first, train, evaluate, _record(config, run, None if evaluate.done else "after evaluate", root))


def step_task(state: StepState) -> PlannedTask:
    """Return a user-defined step as a task."""
    needs = tuple(f"{_USER_STEP}{name}" for name in state.needs)
    return PlannedTask(f"{_USER_STEP}{state.name}", state.made, state.why, needs)


def _fetch(config: RunConfig, pack: Pack | Tree | None) -> PlannedTask:
    if config.step is not None and config.step.path is None:
        return PlannedTask("fetch", False, f"after step {config.step.name}")
    if config.script is not None:
        paths = ", ".join(str(one.path) for one in config.script.data)
        source = f"{paths}, digest {pack.digest[:12]}" if pack is not None and pack.path else ""
        return PlannedTask("fetch", True, "; ".join([source or "no data (program.data)", *config.script.notes]))
    if pack is None or pack.path is None:
        source = config.resolved["dataset"].get("source")
        why = f"there is no pack of {source} as it is now" if source else f"{config.train.dataset.name} isn't here"
        return PlannedTask("fetch", False, why)
    return PlannedTask("fetch", True, f"data/{pack.path.name}, digest {pack.digest[:12]}")


def _init(initial: InitialWeights | None) -> tuple[PlannedTask, ...]:
    if initial is None:
        return ()
    if initial.sha256 is None:
        return (PlannedTask("init", False, f"{initial.setting}: {initial.pending}"),)
    whose = f" of run {initial.run}" if initial.run and initial.run not in initial.setting else ""
    return (PlannedTask("init", True, f"{initial.setting}: weights{whose}, digest {initial.sha256[:12]}"),)


def _train(run: Run, stale: str | None) -> PlannedTask:
    """Plan the training; ``stale``: why the run isn't finished and intact."""
    if (lacks := run.key_lacks) is not None:
        return PlannedTask("train", False, lacks)
    if stale is None:
        return PlannedTask("train", True, "finished and intact")
    if stale.startswith(EVALUATED) or run.folder.training_done(run.key):
        return PlannedTask("train", True, f"its outputs are intact; {stale}")
    entries = journal.read(run.folder.journal)
    if entries and not run.folder.result.exists():
        stale = f"{stale}: {entries[-1].state} in attempt {entries[-1].attempt}; it starts {next_start(run)}"
    return PlannedTask("train", False, stale)


def _evaluate(run: Run, stale: str | None, root: Path) -> PlannedTask:
    if not run.folder.result.exists():
        return PlannedTask("evaluate", False, "the command ended before result.json recorded its report")
    reason = stale or stored_report.stale_because(run.folder, root)
    return PlannedTask("evaluate", reason is None, reason or "made of what is there")


def _record(config: RunConfig, run: Run | None, waits: str | None, root: Path) -> PlannedTask:
    destinations = tracking.destinations(vars(config.tracking), root)
    if not destinations:
        return PlannedTask("record", True, "tracking is switched off")
    if run is None or waits is not None:
        return PlannedTask("record", False, waits or "after evaluate")
    missing = [to for to in destinations if not to.is_recorded(run.folder.path)]
    if missing:
        shown = " and ".join(tracking.public_uri(to.uri) for to in missing)
        return PlannedTask("record", False, f"not (all) recorded in {shown}")
    return PlannedTask("record", True, f"everything is in {' and '.join(to.title for to in destinations)}")


# ---------------------------------------------------------------------------------------- commands
def launch_plan(config: RunConfig, run: Run | None) -> LaunchPlan:
    """Render the next attempt's plan with the function that the launch uses."""
    cluster = config.cluster
    key = run.key.short if run else "<key>"
    run_dir = config.runs_dir.absolute() / key
    attempt = journal.attempts(run_dir / run_folder.JOURNAL) + 1
    spec = AttemptSpec(
        run_dir=run_dir,
        run_key=key,
        attempt=attempt,
        trainer=config.program.entry,
        pack=run.pack_source if run else None,
        script=config.script.path if config.script is not None else None,
        project=str(config.script.root) if config.script is not None else "",
        uses_torchrun=config.uses_torchrun,
    )
    plan = render(
        cluster,
        [_placeholder_facts(host, cluster) for host in cluster.hosts],
        spec,
        run_id=f"{key}-{attempt}-<random>",
        master_port=cast(int, f"<free port of {cluster.hosts[0].label}>"),  # it is only written into the command
    )
    plan = dataclasses.replace(plan, submission=launchers.submission(cluster, spec))
    if launchers.capabilities(cluster).is_this_computer or (spec.script is None and cluster.device != "cuda"):
        return plan
    nodes = [_with_cpus_unknown(node, host) for node, host in zip(plan.nodes, cluster.hosts, strict=True)]
    return dataclasses.replace(plan, nodes=tuple(nodes))


def _placeholder_facts(host: Host, cluster: Cluster) -> HostFacts:
    """Return a host's facts from its configuration, with placeholders for what only its probe would tell."""
    local = launchers.capabilities(cluster).is_this_computer  # this process knows its own facts
    python = host.python or (sys.executable if local else f"<python of {host.label}>")
    return HostFacts(
        host=host.label,
        identity="",
        hostname=host.name,
        address=host.address or ("127.0.0.1" if local else f"<address of {host.label}>"),
        interface=host.interface or f"<interface of {host.label}>",
        python=python if cluster.container is None else "<python3 of the image>",
        python_version="",
        cpus=count_cpus() if local else 1,
        home="~",
    )


def _with_cpus_unknown(node: NodePlan, host: Host) -> NodePlan:
    """Replace a rank's share of the host's cores, which only the host's probe knows, by a placeholder."""
    if "OMP_NUM_THREADS" not in node.env or "OMP_NUM_THREADS" in host.env:
        return node
    share = f"<cpus of {host.label}>" + (f"/{host.nproc_per_node}" if host.nproc_per_node > 1 else "")
    return dataclasses.replace(node, env={**node.env, "OMP_NUM_THREADS": share})


def commands(plan: LaunchPlan) -> str:
    """Return the scheduler's submission, if there is one, and each host's shell command."""
    rows = [plan.submission] if plan.submission else []
    for node in plan.nodes:
        env = [f"{name}={shlex.quote(value)}" for name, value in node.env.items()]
        within = f", in {node.container.image} by {node.container.engine}" if node.container else ""
        rows.append(f"{node.host}{within}:\n  {' '.join(env)} {shlex.join(node.argv)}")
    return "\n".join(rows)


# ------------------------------------------------------------------------------------------- shown
def text(trials: Sequence[PlannedRun]) -> str:
    """Format for a terminal: a trial with its tasks, or a line per trial; then the commands of the first launch."""
    lines = _task_table(trials[0]) if len(trials) == 1 else _trial_table(trials)
    to_launch = [item for item in trials if any(task.name == "train" and not task.done for task in item.steps)]
    if not to_launch:
        return "\n".join([*lines, "nothing would be launched"])
    plan = to_launch[0].launch
    whose = "" if len(trials) == 1 else f" of {to_launch[0].key or 'the first'} (--json shows all)"
    shape = f"{counted(plan.nnodes, 'node')}, {counted(plan.world_size, 'rank')}"
    head = f"attempt {plan.attempt} on {shape}, {plan.launcher}{whose}:"
    return "\n".join([*lines, "", head, *_granted_hosts_note(plan), commands(plan)])


def _granted_hosts_note(plan: LaunchPlan) -> list[str]:
    if not launchers.LAUNCHERS.settings(plan.launcher).capabilities.hosts_are_granted:
        return []
    first, last = plan.nodes[0].host, plan.nodes[-1].host
    names = f"{first} stands for the host" if plan.nnodes == 1 else f"{first} to {last} stand for the hosts"
    return [f"{names} that {plan.launcher} will grant when the run asks for {'it' if plan.nnodes == 1 else 'them'}"]


def _task_table(item: PlannedRun) -> list[str]:
    rows = [f"  {task.name:<9} {'done' if task.done else 'to do':<6} {task.why}" for task in item.steps]
    waits = next((task.name for task in item.steps if not task.done), "fetch")
    script = [f"  script    {shlex.join(item.script)}"] if item.script else []
    return [f"run {item.key or f'<key: known after {waits}>'}", *script, *rows]


def _trial_table(trials: Sequence[PlannedRun]) -> list[str]:
    to_run = sum(item.to_run for item in trials)
    rows = [f"{len(trials)} trials: {len(trials) - to_run} done, {to_run} to run"]
    for item in trials:
        open_task = next((task for task in item.steps if not task.done), None)
        state = f"to run  {open_task.name}: {open_task.why}" if open_task else item.accepted or "done"
        rows.append(f"  {item.key or '<key>':<12}  {' '.join(item.chosen)}  {state}")
    return rows


# --------------------------------------------------------------------------------------------- DAG
def mermaid(trials: Sequence[PlannedRun]) -> str:
    """Return a Mermaid flow chart of the tasks, open tasks dashed."""
    nodes, edges = _graph(trials)
    lines = ["flowchart LR"]
    lines += [f'  {name}["{_escaped(label)}"]{"" if done else ":::todo"}' for name, (label, done) in nodes.items()]
    lines += [f"  {before} --> {after}" for before, after in edges]
    return "\n".join([*lines, "  classDef todo stroke-dasharray: 4 3"])


def dot(trials: Sequence[PlannedRun]) -> str:
    """Return the same graph for Graphviz."""
    nodes, edges = _graph(trials)
    lines = ["digraph paceline {", "  rankdir=LR; node [shape=box];"]
    for name, (label, done) in nodes.items():
        shown = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'  {name} [label="{shown}"{"" if done else ", style=dashed"}];')
    lines += [f"  {before} -> {after};" for before, after in edges]
    return "\n".join([*lines, "}"])


def _graph(trials: Sequence[PlannedRun]) -> tuple[dict[str, tuple[str, bool]], list[tuple[str, str]]]:
    """Return node name → (label, done), and the edges as (name, name of the one after it)."""
    nodes: dict[str, tuple[str, bool]] = {}
    edges: dict[tuple[str, str], None] = {}
    shared: dict[str, str] = {}  # label → name of the node: trials share steps and the fetch of one data pack
    for number, item in enumerate(trials):
        name_by_task: dict[str, str] = {}  # tasks of this trial so far
        for task in item.steps:
            label = _label(task, "" if _is_shared(task) else item.key or "")
            name = f"{re.sub('[^A-Za-z0-9]', '_', task.name)}{number}"
            name = shared.setdefault(label, name) if _is_shared(task) else name
            nodes[name] = (label, task.done)
            if task.name.startswith(_USER_STEP):
                needs = [name_by_task[need] for need in task.needs if need in name_by_task]
            else:
                needs = [*name_by_task.values()][-1:]
            edges.update(dict.fromkeys((need, name) for need in needs))
            name_by_task[task.name] = name
    return nodes, [*edges]


def _is_shared(task: PlannedTask) -> bool:
    return task.name == "fetch" or task.name.startswith(_USER_STEP)


def _label(task: PlannedTask, key: str) -> str:
    return f"{task.name} {key}".strip() + f"\n{'done' if task.done else 'to do'}: {task.why}"


def _escaped(label: str) -> str:
    return label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("\n", "<br/>")
