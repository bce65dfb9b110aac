"""`doit fetch`, `train`, `attach`: make the data set, train the run, and take over a training whose command is gone."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from pipeline.cli.finished import answer_with, figures, is_finished, warn_of_variables
from pipeline.cli.invocation import process_count
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cli.terminal import screen, start_detached, subscriber
from pipeline.cluster.hosts import check_cluster
from pipeline.cluster.validation import unused_warning, usable_gpus
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes.threads import waiting
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.data import store
from pipeline.execution import complete
from pipeline.execution.run import Run
from pipeline.live.notices import Notifier
from pipeline.live.state import RunPicture, first_state
from pipeline.runs import ranks
from pipeline.runs.contents import what_runs
from pipeline.runs.result import Result
from trainers.contract import run_folder


def fetch(current: Session) -> None:
    """Make the data pack, and fetch the initial weights, if they are missing."""
    if current.pack is None:
        _fetch_data(current)
    if (weights := current.initial_weights) is not None and weights.url is not None:
        weights.fetch(current.config)
        current.forget_run()  # its key contains the digest of the weights, which may be known only now


def _fetch_data(current: Session) -> None:
    """Make the data pack, after the user's step that makes the data, if there is one; print its sizes."""
    step = current.config.step
    if step is not None and step.path is None:
        note(f"the data comes from step {step.name}, which runs first")
        step.make(note, process_count())
        current.forget_steps()
    if current.pack is not None:
        return
    pack = store.fetch(current.config.train.dataset, current.config.data_dir)
    current.forget_run()
    write = say if current.invocation.verb == "fetch" else note
    sizes = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in pack.manifest.splits.items())
    write(f"{pack.manifest.name}: {sizes} images in {relative(pack.path)}")
    if pack.manifest.synthetic:
        write("SYNTHETIC DATA: an accuracy on these images means nothing")


def train(current: Session) -> None:
    """Train the run, or repeat a finished one and compare (--force, `doit -a`); then prove it (--prove)."""
    run, invocation = current.run, current.invocation
    is_done = run is not None and run.reason is None
    proves = invocation.is_on("prove") and not invocation.is_on("detach")  # with --detach, the detached command does it
    repeats = invocation.repeats and is_done
    if repeats or proves:
        from pipeline.cli.commands import reproduce  # imports git, archives and MLflow, which few trainings need
    if repeats and run is not None:
        reproduce.reproduce_run(current, run.folder)
    elif not (proves and is_done):
        _train(current)
    if proves:
        reproduce.prove(current, unless_proven=True)


def train_all(current: Session) -> None:
    """Fetch and train, for `python -m pipeline` (the Hydra application); in doit these are two tasks."""
    if current.pack is None:
        _fetch_data(current)
    if not is_finished(current):
        _train(current)


def attach(current: Session) -> None:
    """Take over an attempt whose command was closed or killed. Raises UsageError: these words name no such run."""
    if is_finished(current):
        return
    run = current.run
    if "run" in current.invocation.options:
        folder = current.folder()
        if run is not None and folder.key != run.key.short:
            raise UsageError(
                f"run {folder.key} was started with other code, data or versions than are here now",
                hint=f"doit why {folder.key}, which shows them; or doit stop {folder.key}",
            )
        if current.pack is None:
            raise UsageError(
                f"the data of run {folder.key} isn't in {current.config.data_dir}",
                hint="the same command with paths.data=<the folder that the run was started with>",
            )
    if run is None:  # a training starts only after its data is here
        raise UsageError(
            "nothing of this run is under way here: its data set was never fetched",
            hint="doit attach with the words of the command that has started it, or that command again",
        )
    _train(current, attach=True)


def _train(current: Session, *, attach: bool = False) -> None:
    """Train the run to its end, or with ``attach`` only follow what still runs of it; print the result."""
    if not attach and current.config.train.init.setting:  # initial weights: downloaded, or trained first (init.run)
        complete.provide_weights(current.config, ROOT, argv=sys.argv, say=note)
        current.forget_run()  # its key contains the digest of the weights, which may be known only now
    with waiting(note, "looking up the run"):
        run = current.run
    if run is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    if current.invocation.is_on("preflight.deep"):
        from pipeline.cli.commands.diagnostics import refuse_unfit_hosts  # imports measurements, rarely needed

        refuse_unfit_hosts(current)
    if not attach:
        refuse_unfit(current.config.cluster)
    if current.invocation.is_on("detach"):
        start_detached(current.config.runs_dir, run.key.short, run.folder.lock)
        return
    result = _train_in_view(run, current.config.cluster, attach=attach)
    _report_end(current, run, result)


def _train_in_view(run: Run, cluster: Cluster, *, attach: bool) -> Result:
    """Train or follow the run with its progress on the terminal, and notices to the user's channels (``notify``)."""
    shape = f"{counted(cluster.nnodes, 'node')}, {counted(cluster.world_size, 'rank')}"
    about = {"kind": "run", "key": run.key.short, "name": what_runs(run.config.resolved)}
    with (
        screen(lambda: RunPicture(first_state(run.key.short, run.config.resolved), run.folder.path)) as terminal,
        Notifier(run.config.notify, terminal.say, **about) as notices,
    ):
        terminal.say(f"run {run.key.short}: {shape}, {cluster.launcher}")
        if warning := unused_warning(cluster):
            terminal.say(warning)
        services = replace(
            complete.single_run_services(),
            on_event=subscriber(terminal, notices.on_event),
            on_wait=terminal.show_event if terminal.is_live else None,
        )
        result = complete.train(run, argv=sys.argv, say=terminal.say, services=services, attach=attach)
        notices.ended(result.metrics)
    return result


def _report_end(current: Session, run: Run, result: Result) -> None:
    """Print the result, where its files are, the next commands, and what the user has to know about it."""
    say(f"FINISHED {run.key.short}: {figures(result)}", folds=True)
    for line in ranks.outliving_processes(run.folder):
        note(f"WARNING: outlived the script and was ended, so what it had not written yet is lost: {line}")
    say(f"  results  {relative(run.folder.result)}", is_detail=True)
    outputs = run.folder.path / run_folder.OUTPUTS
    if current.config.script is not None and any(path.is_file() for path in outputs.rglob("*")):
        say(f"  files    {relative(outputs)}", is_detail=True)
    say("  compare  doit ui", is_detail=True)
    words = ["reproduce", run.key.short, *current.invocation.runs_dir_words]
    say(f"  repeat   doit {shlex.join(words)}", is_detail=True)
    answer_with(result, run.folder)
    warn_of_variables(run)
    if (unkeyed := run.key_lacks) is not None:  # files that the script read and that its key doesn't contain
        note(f"WARNING: {unkeyed}; until then it does not count as finished, and the same command runs it again")


def refuse_unfit(cluster: Cluster) -> None:
    """Raise UsageError for a cluster that can't work, as far as this computer can tell; warn of a slow one."""
    if warning := check_cluster(cluster, root=ROOT, local_gpus=usable_gpus()):
        note(warning)
