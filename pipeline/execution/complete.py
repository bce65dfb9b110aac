"""Bring a run to result.json: launch, attempts, evaluation, record."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.cluster import launchers
from pipeline.config.build import RunConfig
from pipeline.core.errors import HostError, Killed, PacelineError, Pruned, TrainingError, UsageError, os_reason
from pipeline.core.files import remove_leftovers, write_atomic, write_hint, write_json
from pipeline.core.processes import process, threads
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.processes.signals import Interruptible
from pipeline.core.specs import State
from pipeline.core.tables import first_of
from pipeline.data import store, weights
from pipeline.data.trees import Tree
from pipeline.evaluation import report_key
from pipeline.execution import mirroring, starting
from pipeline.execution.attempting import attach, going_on, run_attempts, to_attach
from pipeline.execution.finished import VARIABLES, pattern_before, unkeyed
from pipeline.execution.next_start import next_start
from pipeline.execution.run import Run, prepare, start_of
from pipeline.execution.work import RunServices, Say, Work, note
from pipeline.keys import ABSENT, import_closure, process_groups, rank_environment, script_files
from pipeline.keys.import_closure import matches
from pipeline.runs import acceptance, index, journal, layout, provenance
from pipeline.runs.folder import EVALUATED, TRAINED, RunFolder, removed
from pipeline.runs.lock import locked
from pipeline.runs.result import Result, changed
from pipeline.tracking.client import Recorder
from trainers.contract import run_folder


def bring_weights(config: RunConfig, root: Path, *, argv: Sequence[str], say: Say) -> None:
    """Fetch the weights that the run starts from; for a parent run, train it first.

    Two commands that need the same parent share it: the second one waits.

    Raises:
        DataError: an address gives nothing.
        TrainingError: the parent run failed.
        Killed: stopped by Ctrl-C or a signal.
    """
    start = start_of(config, root)
    if start is None or start.path is not None:
        return
    if start.url is not None:
        fetch_weights(config, start)
    elif config.parent is not None:
        try:
            _train_parent(config.parent, start.said, root, argv=argv, say=say)
        except Killed:
            raise
        except PacelineError as error:
            what = f"{start.said} failed, and this run starts from its weights: {error.what}"
            raise TrainingError(what, hint=error.hint) from error


def fetch_weights(config: RunConfig, start: starting.Start) -> None:
    """Download the file from its address, if it has one. Raises DataError."""
    if start.url is not None:
        is_torchvisions = "://" not in str(config.train.init.weights)
        weights.fetch(start.url, config.data_dir, setting=start.said, hash_in_name=is_torchvisions)


def _train_parent(parent: RunConfig, said: str, root: Path, *, argv: Sequence[str], say: Say) -> None:
    bring_weights(parent, root, argv=argv, say=say)
    run = prepare(parent, root, store.fetch(parent.train.dataset, parent.data_dir))
    if run is None:
        raise PacelineError("its weights vanished after they were brought here", hint="the same command again")
    if run.reason is not None:
        say(f"{said} comes first: run {run.key.short}")
        train(run, argv=argv, say=say)
        say(f"FINISHED {run.key.short}, whose weights are the next run's")


_SHOWN_AFTER_S = 2.0  # of recording how a run ended

_SHOWN = 5  # names in a message


def alone() -> RunServices:
    """Return the services of a run outside of a sweep."""
    return RunServices(evaluate=evaluate_in_child, recorder=own_recorder, provenance=collect_provenance)


def train(
    run: Run, *, argv: Sequence[str], say: Say, services: RunServices | None = None, attach: bool = False
) -> Result:
    """Bring the run to FINISHED and return result.json; a second caller with the same key waits for the first.

    An attempt that outlived its command is followed, or its result taken. ``attach``: do nothing else.

    Raises:
        UsageError: there is none to attach to.
        HostError: a host can't take part.
        TrainingError: every attempt failed.
        Killed: stopped by Ctrl-C or SIGTERM.
        Pruned: ended early because a file ``prune`` appeared in the run folder.
        PacelineError: the run folder can't be written, or the evaluation failed.
    """
    services = services or alone()
    with Heartbeat(say, on_wait=services.on_wait) as heartbeat, _folder_errors_explained(run):
        return _train_alone(run, argv=argv, say=heartbeat, services=services, attach=attach)


@contextmanager
def _folder_errors_explained(run: Run) -> Iterator[None]:
    """Turn errors of writing the run folder (full or read-only disk) into messages about it."""
    try:
        yield
    except FileNotFoundError as error:
        raise removed(error.filename) from error
    except OSError as error:
        raise PacelineError(
            f"run {run.key.short} can't go on in {run.folder.path}: {os_reason(error)}",
            hint=write_hint(error, run.folder.path.parent),
        ) from error


def _train_alone(run: Run, *, argv: Sequence[str], say: Heartbeat, services: RunServices, attach: bool) -> Result:
    """Hold the lock of the run's key, and train unless another command has finished the run in the meantime."""
    say.doing(f"waiting for the command that trains {run.key.short}")
    with locked(run.folder, say, services.stop) as lock:
        if run.reason is None:
            say(f"{run.key.short} was finished by the other command")
        else:
            if run.folder.result.exists() and (why := run.folder.stale_because(run.key.digest)):
                say(f"WARNING: {why}, so it is made again")
            remove_leftovers([run.config.data_dir, *run.folder.path.glob("attempts/*")])
            _finish(
                Work(
                    run=run,
                    lock=lock,
                    recorder=services.recorder(run),
                    argv=argv,
                    say=say,
                    services=services,
                    started=time.time(),
                    attached=to_attach(run, say) if attach else None,
                    mirror=_mirror(run, say),
                )
            )
    result, _ = acceptance.standing(run.folder)
    if result is None:
        raise TrainingError(f"{run.folder.result} is missing after the run")
    return result


def _mirror(run: Run, say: Say) -> mirroring.Mirroring | None:
    address = run.config.cluster.checkpoint_mirror
    return mirroring.of(address, run.folder, say, of_script=run.config.script is not None)


def _finish(work: Work) -> None:
    """Bring the run to result.json. An early end is written to the journal and to the record."""
    with Interruptible(work.services.stop) as signals:
        try:
            _launch_unless_done(work)
            signals.check()
            _complete(work, signals)
        except Pruned:
            raise
        except BaseException as error:
            signals.hold()
            killed = signals.killed(error) or _stopped(work, error)
            _note_end(work, killed or error)
            if killed is not None:
                key = work.run.key.short
                raise Killed(f"KILLED {key}: {killed.what}", hint=_goes_on(work.run)) from None
            work.lock.check()  # that says more than what came of it
            raise


def _stopped(work: Work, error: BaseException) -> Killed | None:
    """Return the error for a failure that `doit stop` in another terminal caused; None: it is a real failure."""
    if isinstance(error, TrainingError | HostError) and (work.run.folder.path / run_folder.STOP).exists():
        return Killed("stopped by doit stop")
    return None


def _launch_unless_done(work: Work) -> None:
    """Train; if an earlier command did, only restore the files that describe the run."""
    run, services = work.run, work.services
    if run.key_lacks is None and not _summary_lacks(run) and run.folder.training_done(run.key):
        if run.unread_log:
            _search_log(work)
        run.folder.restore(run.description())
        if services.on_trained is not None:
            services.on_trained()
        return
    attached = work.attached or going_on(work)
    if attached is not None:
        attach(work, *attached)
        _leave_if_pruned(run, work.recorder, work.say)
        if run.folder.training_done(run.key):
            return
        # the ranks may have ended while no command was there, and what they wrote was damaged since
        work.say(f"WARNING: what the ranks wrote isn't as they left it; the next attempt starts {next_start(run)}")
    for line in _notes(run) if services.hosts is None else ():  # a sweep says it once
        work.say(line)
    if (other := index.renamed(run.folder)) is not None:
        work.say(f"WARNING: {other} is this run under another name, by which no command finds it: it is trained again")
    work.say.doing("noting where the run comes from")
    _lay_out(work)
    run_attempts(work)
    _leave_if_pruned(run, work.recorder, work.say)


def _search_log(work: Work) -> None:
    """Return the metrics that program.metrics_pattern finds in the log of an ended script. Raises PacelineError."""
    run = work.run
    work.say("searching its log for program.metrics_pattern; nothing is trained again")
    patterns = [str(run.metrics_pattern), *filter(None, [pattern_before(run.folder)])]
    argv = [sys.executable, "-m", "trainers.script.stored_logs", str(run.folder.path.resolve()), *patterns]
    run.folder.result.unlink(missing_ok=True)  # it is written anew, of the summary
    done = process.run(argv, env=rank_environment.of_report(os.environ, run.root), timeout_s=300.0)
    if done.code != 0:
        raise PacelineError(f"the log of {run.key.short} can't be searched: {done.why}")
    layout.write_config(run.folder.path, run.description())


def _notes(run: Run) -> list[str]:
    """Return remarks about a script's key, to be shown before hours of training."""
    said = [*run.config.notes]
    ranks = run.config.cluster.world_size
    if (
        run.config.script is not None
        and ranks > 1
        and not process_groups.uses_process_group(run.config.resolved, run.root)
    ):
        said.append(
            f"WARNING: nothing in the script's code or words asks for a process group, so each of the {ranks} ranks "
            "runs all of it and writes the same files; cluster.nproc_per_node=1 on one host starts it once"
        )
    if run.config.script is not None and run.sealed:
        names = script_files.lacking(run.config.script, run.code.sources, run.config.resolved["program"])
        if names:
            said.append(
                f"the script names files of the project that aren't in its copy: {first_of(names, _SHOWN)}; where it "
                f"reads them, type program.inputs=[{','.join(names)}] before the script"
            )
    inputs = "program.inputs" if run.config.script is not None else "model.inputs"
    keyed = run.key.parts["environment"]
    lacking = [f"{name} ({place})" for name, place in run.code.unresolved.items() if keyed.get(name) == ABSENT]
    if lacking:
        said.append(
            f"WARNING: not in the project and not installed here, so the key counts it as absent: "
            f"{first_of(lacking, _SHOWN)}; folders with modules belong in cluster.env.PYTHONPATH"
        )
    if run.code.left_out:
        said.append(
            f"not taken along, as files beside modules may have {import_closure.LARGEST_BYTES:,} bytes: "
            f"{first_of(run.code.left_out, _SHOWN)}; {inputs} takes files of any size"
        )
    return said


def _summary_lacks(run: Run) -> bool:
    """Whether an ended script read something that its key lacks: then the run isn't finished, and starts over."""
    nodes = [run.folder.read_json(run_folder.SUMMARY) or {}, *run.folder.dependencies_of_other_nodes()]
    return run.sealed and unkeyed(nodes) is not None


def _complete(work: Work, signals: Interruptible) -> None:
    """Do what follows the training: report, last state, record, result.json."""
    run, say = work.run, work.say
    work.lock.check()
    summary = run.folder.read_summary()
    if summary is None:
        raise removed(run.folder.summary)
    if run.config.program.evaluated:
        say.doing("making the evaluation report")
        work.services.evaluate(run.folder, run.root)
    signals.check()
    work.lock.check()
    run.folder.refuse_incomplete()
    number = journal.attempts(run.folder.journal)
    note(run, State.FINISHED, number)
    say.doing(f"recording in {titles}" if (titles := work.recorder.titles()) else "writing the result")
    mlflow_run_id = work.recorder.finish(say)
    signals.hold()  # what is left takes a moment, and is the end of it
    work.lock.check()
    run.folder.write_result(
        key=run.key,
        summary=summary,
        hosts=_hosts(run),
        attempts=number,
        duration_s=_duration_s(run, work.started),
        mlflow_run_id=mlflow_run_id,
    )
    signals.left = f"; run {run.key.short} is finished"


def _note_end(work: Work, error: BaseException) -> None:
    """Write the end of the run to the journal and to MLflow. Neither a full disk nor a slow recorder may hide its
    cause.
    """
    work.say.doing("recording how it ended")
    run = work.run
    with suppress(OSError), _shown_meanwhile(work, error):
        number = journal.attempts(run.folder.journal)
        if number == 0 or work.lock.lost():  # nothing was started; or the folder may be another command's by now
            return
        state = State.KILLED if isinstance(error, Killed | KeyboardInterrupt) else State.FAILED
        note(run, state, number, _reason(error))
        work.recorder.finish(work.say)


@contextmanager
def _shown_meanwhile(work: Work, error: BaseException) -> Iterator[None]:
    """Show the error before the block ends, if that takes a while."""

    def show() -> None:
        if isinstance(error, PacelineError) and not isinstance(error, Killed):
            work.say(str(error))
            error.shown = True

    timer = threads.after(_SHOWN_AFTER_S, show, name="show the error")
    try:
        yield
    finally:
        timer.cancel()


def _reason(error: BaseException) -> str:
    """Return a line for the journal: of a training's error the first one, with host, rank and message."""
    if isinstance(error, TrainingError):
        return error.what.partition("\n")[0]
    if isinstance(error, PacelineError):
        return "; ".join(line.strip() for line in error.what.splitlines())
    return os_reason(error) if isinstance(error, OSError) else threads.described(error)


def _goes_on(run: Run) -> str:
    """Return the hint after a signal: what the same command does next."""
    if run.folder.summary.exists():
        return "the same command again; the training is done and is not repeated"
    return f"the same command again; it starts {next_start(run)}"


def _hosts(run: Run) -> list[str]:
    """Return the hosts of the training; this command may name others if only the result is made again."""
    known = (run.folder.read_json(run_folder.PROVENANCE) or {}).get("hosts")
    return known if isinstance(known, list) else [host.label for host in run.config.cluster.hosts]


def _duration_s(run: Run, started: float) -> float:
    """Return the seconds of the last attempt until its report.

    The time between an earlier command and this one, ``started`` at that unix time, doesn't count.
    """
    entries = journal.read(run.folder.journal)
    last = [entry for entry in entries if entry.attempt == entries[-1].attempt]
    finished = next(entry.time for entry in last if entry.state is State.FINISHED)
    before = [entry.time for entry in last if entry.time < started]
    if finished < started:
        return finished - before[0]
    return finished - started + (before[-1] - before[0] if before else 0.0)


def _lay_out(work: Work) -> None:
    run = work.run
    if (accepted := run.accepted) is not None:  # what holds no longer, or is proven by this training
        acceptance.withdraw(run.folder, accepted)
    reason = run.reason if run.folder.result.exists() else "it had ended, and has no result that counts"
    if (place := run.folder.set_aside_of_script(journal.attempts(run.folder.journal) + 1)) is not None:
        work.say(f"what the script had left in this run is kept in {place}, as the run is made anew: {reason}")
    if run.key_lacks is not None:  # its checkpoints are of something else, too
        shutil.rmtree(run.folder.path / run_folder.CHECKPOINTS, ignore_errors=True)
    for name in (
        run.folder.result,
        run.folder.summary,
        *(run.folder.path / one for one in (run_folder.PRUNE, run_folder.PRUNED, run_folder.DEPENDENCIES)),
        *run.folder.path.glob(f"{run_folder.NODES}/*/{run_folder.DEPENDENCIES}"),
    ):
        name.unlink(missing_ok=True)
    if isinstance(run.pack, Tree):
        run.pack.lay_down()
    if run.start is not None:
        starting.lay_down(run.start, run.folder.path, run.config.data_dir)
    run.folder.prepare(run.description(work.services.code))
    if not matches(run.root, run.folder.code, run.key.parts["code"]):
        raise PacelineError("its code was edited while the run was being prepared", hint="the same command again")
    origin, patch = work.services.provenance(run, work.argv, work.started, work.say)
    write_json(run.folder.path / run_folder.PROVENANCE, origin.as_json())
    write_atomic(run.folder.path / run_folder.CHANGES, patch)
    if launchers.capabilities(run.config.cluster).is_this_computer:  # others' ranks have the variables of their hosts
        write_json(run.folder.path / VARIABLES, rank_environment.variable_digests(os.environ, _set_by(run)))
    else:
        (run.folder.path / VARIABLES).unlink(missing_ok=True)
    provenance.keep_lock(run.root, run.folder.path)


def _set_by(run: Run) -> set[str]:
    """Return the variables that the configuration sets; those that matter are in the key."""
    program = run.config.resolved.get("program") or {}
    return {*(program.get("env") or {}), *(name for host in run.config.cluster.hosts for name in host.env)}


def own_recorder(run: Run) -> Recorder:
    """Return a recorder process for this run."""
    return Recorder(run.folder.path, run.config, run.root)


def collect_provenance(run: Run, argv: Sequence[str], now: float, say: Say) -> tuple[provenance.Provenance, bytes]:
    """Return the origin of the run, and the patch; reports changes of the checkout that neither can hold."""
    weights = starting.file_of(run.config, run.root)
    origin, patch = provenance.collect(
        run.root,
        run.config.shown_words(argv),
        run.details(now),
        outputs=[run.config.runs_dir, run.config.data_dir, *filter(None, [weights])],  # of which the run has a copy
        secrets=run.config.secrets,
        imported=[*run.code.sources.values()],
    )
    if origin.left_out:
        more = f", and {len(origin.left_out) - 3} more (provenance.json)" if len(origin.left_out) > 3 else ""
        say(f"WARNING: not kept for doit reproduce: {'; '.join(origin.left_out[:3])}{more}")
    return origin, patch


def _leave_if_pruned(run: Run, recorder: Recorder, say: Say) -> None:
    """If rank 0 ended early on request, write that to the journal and to MLflow. Raises Pruned."""
    pruned = run.folder.read_json(run_folder.PRUNED)
    if pruned is None:
        return
    epoch = f"epoch {pruned['epoch']}, " if pruned["epoch"] else ""  # a script has none
    detail = f"after {epoch}step {pruned['step']}"
    note(run, State.PRUNED, journal.attempts(run.folder.journal), detail)
    recorder.finish(say)
    hint = "doit train with the same configuration goes on from there"
    raise Pruned(f"PRUNED {run.key.short} {detail}", hint=hint)


def evaluate_in_child(folder: RunFolder, root: Path) -> None:
    """Make the scikit-learn report in a separate process, so the controller stays small. Raises PacelineError."""
    made_of = report_key.made_of_run(folder, root)
    argv = [sys.executable, "-m", report_key.PROGRAM, str(folder.path), json.dumps(made_of)]
    done = process.run(argv, env=rank_environment.of_report(os.environ, root), timeout_s=300.0)
    if done.code != 0:
        hint = "the same command again" if done.code < 0 else None
        raise PacelineError(f"the evaluation report of {folder.key} failed: {done.why}", hint=hint)


def evaluate_again(folder: RunFolder, root: Path, say: Say) -> None:
    """Make a run's report unless it exists, intact and up to date. Raises PacelineError."""
    if not folder.program.evaluated:
        raise UsageError(f"{folder.key} is the run of a script, of which no report is made", hint="doit ui")
    if not (folder.path / TRAINED[2]).exists():
        evaluate_in_child(folder, root)  # says what is missing
    with locked(folder, say):
        folder.read_result()  # refuses one that was altered
        recorded = folder.recorded_files()
        if TRAINED[2] in recorded and (why := changed(folder.path / TRAINED[2], recorded[TRAINED[2]])):
            raise folder.altered(TRAINED[2], why)
        intact = all(name in recorded and changed(folder.path / name, recorded[name]) is None for name in EVALUATED)
        if not intact or report_key.stale_because(folder, root) is not None:
            evaluate_in_child(folder, root)
            folder.refresh_fingerprints()
