"""The verbs without a module of their own: each says what it does on stdout, and raises PacelineError if it can't."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pipeline.cli.invocation import at_once, is_on
from pipeline.cli.listing import figures, other_arithmetic
from pipeline.cli.output import note, note_usual, say, say_folded, say_usual
from pipeline.cli.session import ROOT, Session, relative, session
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.tables import counted, is_count
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.core.specs import Cluster
    from pipeline.runs.folder import RunFolder


def overview() -> None:
    """What a bare `doit` shows."""
    from pipeline.cli import help as pages

    say(pages.overview())


def title(verb: str) -> str:
    """What doit prints as the task's line."""
    if verb == "fetch":
        return f"fetch {session().config.resolved.get('dataset', {}).get('name', 'nothing')}"
    if verb in ("train", "evaluate") and "run" not in session().asked.options:
        run = session().run
        return f"{verb} {run.key.short}" if run else verb
    return verb


def is_fetched() -> bool:
    start = session().start
    return session().pack is not None and (start is None or start.url is None)


def _make_step(current: Session) -> None:
    """The step that the data comes from, where it isn't made yet."""
    step = current.config.step
    if step is not None and step.path is None:
        note(f"the data comes from step {step.name}, which runs first")
        step.make(note, at_once())
        current.forget_steps()


def fetch() -> None:
    if session().pack is None:
        _fetch(session())
    if (start := session().start) is not None and start.url is not None:
        from pipeline.execution import complete

        complete.fetch(session().config, start)
        session().forget_pack()


def train_all(current: Session) -> None:
    """Fetch and train in one go, for the Hydra application (doit has a task for each)."""
    if current.pack is None:
        _fetch(current)
    if not _finished(current):
        _train(current)


def _fetch(current: Session) -> None:
    from pipeline.data import store

    _make_step(current)
    if current.pack is not None:
        return
    config = current.config
    pack = store.fetch(config.train.dataset, config.data_dir)
    current.forget_pack()
    told = say if current.asked.verb == "fetch" else note
    sizes = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in pack.manifest.splits.items())
    told(f"{pack.manifest.name}: {sizes} images in {relative(pack.path)}")
    if pack.manifest.synthetic:
        told("SYNTHETIC DATA: an accuracy on these images means nothing")


def is_trained() -> bool:
    current = session()
    try:
        finished = _finished(current)
    except UsageError:  # said by the verb itself, in one line
        return False
    if finished and current.run is not None and current.run.accepted is None:
        _record_what_is_missing(current, current.run.folder)
    return finished


def _record_what_is_missing(current: Session, folder: RunFolder) -> None:
    """A finished run whose record the tracking server never got, or only in part."""
    told = current.config.resolved["tracking"]
    if not any(told[name] for name in ("enabled", "tracker", "tensorboard")):
        return  # without the imports below, which a finished run would wait for
    from pipeline import tracking

    missing = [to for to in tracking.destinations(told, ROOT) if not to.is_recorded(folder.path)]
    if not missing:
        return
    from pipeline.tracking.client import Recorder

    where = " and ".join(to.shown for to in missing)
    note(f"{folder.key} is not (all) recorded in {where}: it is recorded now")
    with waiting(note, f"recording in {' and '.join(to.title for to in missing)}"):
        Recorder(folder.path, current.config, ROOT).finish(note)


def train() -> None:
    """A finished run is only here with `doit -a`: it is made again in a folder of its own, and compared."""
    current = session()
    run = current.run
    if current.asked.again and run is not None and run.reason is None:
        from pipeline.cli.reproducing import reproduce_run

        reproduce_run(run.folder)
    else:
        _train(current)


def attach() -> None:
    """Take up the attempt that a command which is gone has left running."""
    if _finished(session()):
        return
    run = session().run
    if run is not None and "run" in session().asked.options:
        started = session().folder()
        if started.key != run.key.short:
            raise UsageError(
                f"run {started.key} was started with other code, data or versions than are here now",
                hint=f"doit why run={started.key}, which shows them; or doit stop run={started.key}",
            )
    if session().pack is None and "run" in session().asked.options:
        raise UsageError(
            f"the data of run {session().folder().key} isn't in {session().config.data_dir}",
            hint="the same command with paths.data=<the folder that the run was started with>",
        )
    if run is None:  # a run begins only once its data is here
        raise UsageError(
            "nothing of this run is under way here: its data set was never fetched",
            hint="doit attach with the words of the command that has started it, or doit train with the same words",
        )
    _train(session(), attach=True)


def _finished(current: Session) -> bool:
    with waiting(note, "looking up the run"):
        run = current.run
        if run is None or run.reason is not None:
            return False
    result, accepted = run.standing()
    if result is None:  # removed a moment ago
        return False
    word = "finished" if accepted is None else str(accepted)
    say_folded(f"{run.key.short} is {word}: {figures(result)}; {relative(run.folder.path)}")
    if other := other_arithmetic(result.fields):
        say_folded(f"  finished on other arithmetic: {other}; bits unverified here")
    return True


def _train(current: Session, *, attach: bool = False) -> None:
    from pipeline.cli import showing, telling
    from pipeline.cluster.spares import without_use
    from pipeline.execution import complete as training
    from pipeline.runs import status

    if not attach:
        _bring_weights(current)
    with waiting(note_usual, "looking up the run"):
        run = current.run
    if run is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    if is_on(current.asked.options, "preflight.deep"):
        from pipeline.cli.diagnostics import refuse_unfit_hosts

        refuse_unfit_hosts()
    cluster = current.config.cluster
    if not attach:
        refuse_unfit(cluster)
    shape = f"{counted(cluster.nnodes, 'node')}, {counted(cluster.world_size, 'rank')}"
    services = training.alone()
    with showing.of_run(run) as shown, telling.of_run(run, shown.say) as told:
        shown.say(f"run {run.key.short}: {shape}, {cluster.launcher}")
        if idle := without_use(cluster):
            shown.say(idle)
        services = showing.services_shown(services, shown, told.hear)
        result = training.train(run, argv=sys.argv, say=shown.say, services=services, attach=attach)
        told.ended(result.metrics)
    say_folded(f"FINISHED {run.key.short}: {figures(result)}")
    for line in status.outlived(run.folder):
        note(f"WARNING: ended after the script, and lost what it had not written yet: {line}")
    say_usual(f"  results  {relative(run.folder.result)}")
    say_usual("  compare  doit ui")
    say_usual(f"  prove    doit reproduce run={run.key.short}")
    if (lacks := run.key_lacks) is not None:
        note(f"WARNING: {lacks}; until then it does not count as finished, and the same command runs it again")


def refuse_unfit(cluster: Cluster) -> None:
    """Raises UsageError, before there is a run, where that is known without a host; warns of what will be slow."""
    from pipeline.cluster.local_gpus import usable_gpus
    from pipeline.execution import this_computer

    if warning := this_computer.refuse(cluster, root=ROOT, local_gpus=usable_gpus()):
        note(warning)


def _bring_weights(current: Session) -> None:
    """Those that the run starts from: fetched, or made by the run that init.run names."""
    if not current.config.train.init.said:
        return
    from pipeline.execution.complete import bring

    bring(current.config, ROOT, argv=sys.argv, say=note)
    current.forget_pack()


def evaluate() -> None:
    from pipeline.evaluation.table import format_report
    from pipeline.execution import complete as training

    folder = holder(session().folder())
    with waiting(note, "making the evaluation report"):
        training.evaluate_again(folder, ROOT, note)
    report = folder.read_json(run_folder.REPORT)
    if report is None:
        raise PacelineError(f"{folder.path / run_folder.REPORT} is not readable")
    say(format_report(report))
    say(f"  picture  {relative(folder.path / run_folder.CONFUSION_MATRIX)}")


def record() -> None:
    from pipeline import tracking
    from pipeline.core.specs import UNDER_WAY
    from pipeline.runs import journal
    from pipeline.tracking.client import Recorder

    folder = holder(session().folder())
    folder.read_summary(), folder.read_result(), folder.refuse_altered_config()  # what was altered is no record
    config = session().config
    nowhere = not tracking.destinations(vars(config.tracking), ROOT)
    recorder = Recorder(folder.path, config, ROOT, enabled=True if nowhere else None)
    with waiting(note, f"recording in {recorder.titles()}"):
        recorded = recorder.replay()
    if not recorded:
        states = [entry.state for entry in journal.read(folder.journal)]
        if states and states[-1] in UNDER_WAY:
            raise PacelineError(
                f"{folder.key} has not ended, its journal says {states[-1]}; it is recorded up to where it is",
                hint="the same doit train, which goes on with it; it records by itself",
            )
        raise PacelineError(
            f"{folder.key} is not recorded in {recorder.titles()} yet: {recorder.why()}",
            hint=recorder.hint(),
        )
    say(f"{folder.key} is recorded as {recorder.where()}")


def holder(folder: RunFolder) -> RunFolder:
    """The folder itself, or that of the finished run which a person has accepted in its place."""
    from pipeline.runs import acceptance

    _, accepted = acceptance.standing(folder)
    if accepted is None:
        return folder
    note(f"{folder.key} is {accepted}")
    return acceptance.base_of(folder, accepted)


def stop() -> None:
    from pipeline.cluster.attempt import stop_run
    from pipeline.core.specs import UNDER_WAY
    from pipeline.execution import next_start
    from pipeline.runs import checkpoints, journal
    from pipeline.runs.lock import ask_to_stop, note_stopped

    by_its_words = not _names_no_run() and "run" not in session().asked.options
    folder = _under_way() if _names_no_run() else session().folder()
    if folder is None:
        say(f"nothing to stop: no run under {relative(session().config.runs_dir)} is under way")
        return
    cluster = session().config.cluster if by_its_words else session().cluster_of(folder)
    entries = journal.read(folder.journal)
    with waiting(note, "ending what runs there"):
        ask_to_stop(folder)
        where = ", ".join(stop_run(cluster, folder.path, folder.key))
    if note_stopped(folder):
        start = next_start.of_folder(folder.path, checkpoints.settings_of(folder.path))
        say(f"{folder.key} is stopped on {where}; no command was attached, and the same doit train starts it {start}")
    elif entries and entries[-1].state in UNDER_WAY:
        say(f"{folder.key} is stopped on {where}; the command that was attached ends as well")
    else:
        say(f"nothing of {folder.key} runs on {where}")


def _names_no_run() -> bool:
    asked = session().asked
    return "run" not in asked.options and all(word.startswith("paths.") for word in asked.overrides)


def _under_way() -> RunFolder | None:
    """The one run whose journal has no end. Raises UsageError: there are several."""
    from pipeline.core.specs import UNDER_WAY
    from pipeline.runs import index as all_runs
    from pipeline.runs.folder import RunFolder

    runs_dir = session().config.runs_dir
    keys = [row.key for row in all_runs.rows(runs_dir) if row.state in UNDER_WAY]
    if len(keys) > 1:
        raise UsageError(f"{len(keys)} runs are under way: {', '.join(keys)}", hint=f"doit stop run={keys[-1]}")
    return RunFolder(runs_dir / keys[0]) if keys else None


def lab() -> None:
    from pipeline import lab as labs

    options = session().asked.options
    if {"down", "hosts"} <= options.keys():
        raise UsageError("doit lab takes down=1, which removes the lab, or hosts=N, which raises it; not both")
    if "down" in options:
        if options["down"].lower() not in ("1", "true", "yes"):
            raise UsageError(f"down={options['down']}: doit lab down=1 removes the lab")
        with waiting(note, "removing the lab"):
            removed = labs.down(ROOT)
        say(f"removed {', '.join(removed)}" if removed else "no lab is up here; nothing was removed")
        return
    if "hosts" in options:
        if not is_count(options["hosts"]):
            raise UsageError(f"hosts={options['hosts']} must be a whole number from 1; try doit lab hosts=2")
        with waiting(note, "raising the lab"):
            labs.up(ROOT, int(options["hosts"]))
    raised = labs.status(ROOT)
    if raised is None or not raised.running:
        state = "no lab is up here" if raised is None else "the lab's hosts are down"
        say(f"{state}; raise it: doit lab hosts={len(raised.hosts) if raised else 2}")
        return
    for host in raised.hosts:
        say(f"{host.name}  {host.address}  ssh -F {relative(raised.ssh_config)} {host.name}")
    say("  train on it  doit train experiment=quickstart cluster=two_node\n  remove it    doit lab down=1")
