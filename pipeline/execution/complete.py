"""The making of a run from its lock to result.json: initial weights, attempts, evaluation, record in MLflow.

``train`` is called by the verbs that train, by sweeps for each trial, and for the run that ``init.run`` names. What an
earlier command has already done of a run isn't repeated."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.config.build import RunConfig
from pipeline.core.errors import HostError, Killed, PacelineError, Pruned, TrainingError, os_reason
from pipeline.core.files import remove_leftovers, write_hint
from pipeline.core.processes import process, threads
from pipeline.core.processes.signals import Interruptible
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import State
from pipeline.data import store
from pipeline.data.manifest import Pack
from pipeline.execution import launch_folder, stored_report
from pipeline.execution.attempting import attach, attempt_to_attach, run_attempts, surviving_attempt
from pipeline.execution.launch_folder import collect_provenance, prepare_folder, remarks
from pipeline.execution.restarts import next_start
from pipeline.execution.run import Run, initial_weights_of, pattern_before, prepare
from pipeline.execution.work import RunServices, Say, Work, add_to_journal
from pipeline.keys import rank_environment
from pipeline.runs import acceptance, contents, journal
from pipeline.runs.checkpoints import CheckpointMirror
from pipeline.runs.folder import missing_error
from pipeline.runs.lock import locked
from pipeline.runs.result import Result
from pipeline.tracking.client import Recorder
from trainers.contract import run_folder


def provide_weights(config: RunConfig, root: Path, *, argv: Sequence[str], say: Say) -> None:
    """Fetch the initial weights, or train the run whose weights they are. Raises DataError, TrainingError, Killed."""
    initial = initial_weights_of(config, root)
    if initial is None or initial.path is not None:
        return
    if initial.url is not None:
        initial.fetch(config)
    elif config.parent is not None:
        try:
            _train_parent(config.parent, initial.setting, root, argv=argv, say=say)
        except Killed:
            raise
        except PacelineError as error:
            what = f"{initial.setting} failed, and this run starts from its weights: {error.what}"
            raise TrainingError(what, hint=error.hint) from error


def _train_parent(parent: RunConfig, setting: str, root: Path, *, argv: Sequence[str], say: Say) -> None:
    provide_weights(parent, root, argv=argv, say=say)
    run = prepare(parent, root, store.fetch(parent.train.dataset, parent.data_dir))
    if run is None:
        raise PacelineError(
            "its initial weights were removed after they had been fetched", hint="the same command again"
        )
    if run.reason is not None:
        say(f"{setting} comes first: run {run.key.short}")
        train(run, argv=argv, say=say)
        say(f"FINISHED {run.key.short}, whose weights are the next run's")


_SHOW_ERROR_AFTER_S = 2.0  # a failed run shows its error before it is recorded, if recording takes longer than this


def single_run_services() -> RunServices:
    """Return the services of a run that isn't a trial of a sweep."""
    return RunServices(
        evaluate=stored_report.make,
        recorder=lambda run: Recorder(run.folder.path, run.config, run.root),
        provenance=collect_provenance,
    )


def train(
    run: Run, *, argv: Sequence[str], say: Say, services: RunServices | None = None, attach: bool = False
) -> Result:
    """Make the run and return its result; a second caller with the same key waits for the first.

    An attempt that still runs without its command is followed. ``attach``: only follow one, start none.
    Raises UsageError: no attempt to attach to; HostError: a host can't take part; TrainingError: every attempt failed;
    Killed: stopped by Ctrl-C or SIGTERM; Pruned: a search ended the run early, by the file ``prune`` in the run folder;
    PacelineError: the run folder can't be written, or the evaluation failed."""
    services = services or single_run_services()
    with WaitReports(say, on_wait=services.on_wait) as reports, _folder_errors_explained(run):
        return _train_locked(run, argv=argv, say=reports, services=services, attach=attach)


@contextmanager
def _folder_errors_explained(run: Run) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise missing_error(error.filename) from error
    except OSError as error:
        raise PacelineError(
            f"run {run.key.short} can't go on in {run.folder.path}: {os_reason(error)}",
            hint=write_hint(error, run.folder.path.parent),
        ) from error


def _train_locked(run: Run, *, argv: Sequence[str], say: WaitReports, services: RunServices, attach: bool) -> Result:
    say.doing(f"waiting for the command that trains {run.key.short}")
    with locked(run.folder, say, services.stop) as lock:
        if run.reason is None:  # asked again, now that nobody else can change the folder
            say(f"{run.key.short} was finished by the other command")
        else:
            if run.folder.result.exists() and (why := run.folder.stale_because(run.key.digest)):
                say(f"WARNING: {why}, so it is made again")
            remove_leftovers([run.config.data_dir, *run.folder.path.glob("attempts/*")])
            _bring_to_result(
                Work(
                    run=run,
                    lock=lock,
                    recorder=services.recorder(run),
                    argv=argv,
                    say=say,
                    services=services,
                    started=time.time(),
                    attached=attempt_to_attach(run, say) if attach else None,
                    mirror=_mirror(run, say),
                )
            )
    result, _ = acceptance.result_or_accepted(run.folder)
    if result is None:
        raise missing_error(run.folder.result)
    return result


def _mirror(run: Run, say: Say) -> CheckpointMirror | None:
    address = run.config.cluster.settings.checkpoint_mirror
    return None if address is None else CheckpointMirror(address, run.key.short, run.folder.path, say)


def _bring_to_result(work: Work) -> None:
    """Train and complete the run; however it ends, record it in journal and MLflow."""
    with Interruptible(work.services.stop) as signals:
        try:
            _launch_unless_done(work)
            signals.check()
            _complete(work, signals)
        except Pruned:  # it is recorded already
            raise
        except BaseException as error:
            signals.hold()  # a second Ctrl-C must not interrupt the record
            killed = signals.killed(error) or _stopped_by_user(work, error)
            _record_end(work, killed or error)
            if killed is not None:
                if work.run.folder.summary.exists():
                    hint = "the same command again; the training is done and is not repeated"
                else:
                    hint = f"the same command again; it starts {next_start(work.run)}"
                raise Killed(f"KILLED {work.run.key.short}: {killed.what}", hint=hint) from None
            work.lock.check()  # a lost lock explains more than the error that it caused
            raise


def _stopped_by_user(work: Work, error: BaseException) -> Killed | None:
    if isinstance(error, TrainingError | HostError) and (work.run.folder.path / run_folder.STOP).exists():
        return Killed("stopped by doit stop")
    return None


def _launch_unless_done(work: Work) -> None:
    """Train; if an earlier command has trained, only restore the files that describe the run."""
    run, services = work.run, work.services
    # a training that read files which its key lacks isn't trusted
    if run.key_lacks is None and not _summary_unkeyed(run) and run.folder.training_done(run.key):
        if run.unread_log:
            _search_log(work)
        launch_folder.restore(run.folder, launch_folder.inputs_of(run))
        if services.on_trained is not None:
            services.on_trained()
        return
    attached = work.attached or surviving_attempt(work)
    if attached is not None:
        attach(work, attached)
        _raise_if_pruned(run, work.recorder, work.say)
        if run.folder.training_done(run.key):
            return
        # the ranks may have ended unwatched, and their files may have been damaged since
        work.say(
            f"WARNING: files of the ranks were changed since they wrote them; the next attempt starts {next_start(run)}"
        )
    if services.hosts is None:  # a sweep prints the remarks once for all trials
        for line in remarks(run):
            work.say(line)
    work.say.doing("noting where the run comes from")
    prepare_folder(work)
    run_attempts(work)
    _raise_if_pruned(run, work.recorder, work.say)


def _search_log(work: Work) -> None:
    """Search a script's log for program.metrics_pattern, which was set or changed after the training."""
    run = work.run
    work.say("searching its log for program.metrics_pattern; nothing is trained again")
    # the metrics that the former pattern had found are removed from metrics.jsonl, so the recorder needs it too
    patterns = [str(run.metrics_pattern), *filter(None, [pattern_before(run.folder)])]
    argv = [sys.executable, "-m", "trainers.script.metrics.recorder", str(run.folder.path.resolve()), *patterns]
    run.folder.result.unlink(missing_ok=True)  # _complete writes it anew from the summary
    done = process.run(argv, env=rank_environment.for_evaluation(os.environ, run.root), timeout_s=300.0)
    if done.code != 0:
        raise PacelineError(f"the log of {run.key.short} can't be searched: {done.why}")
    launch_folder.write_config(run.folder, launch_folder.inputs_of(run))


def _summary_unkeyed(run: Run) -> bool:
    """Return True if a script that has ended read files that its key lacks: then the run starts over."""
    nodes = [run.folder.read_json(run_folder.SUMMARY) or {}, *run.folder.dependencies_of_other_nodes()]
    return run.sealed and bool(contents.unkeyed(nodes))


def _complete(work: Work, signals: Interruptible) -> None:
    """Evaluate and record a run whose training is done, and write result.json."""
    run, say = work.run, work.say
    work.lock.check()
    summary = run.folder.read_summary()
    if summary is None:
        raise missing_error(run.folder.summary)
    if run.config.program.evaluated:
        say.doing("making the evaluation report")
        work.services.evaluate(run.folder, run.root)
    signals.check()
    work.lock.check()
    run.folder.refuse_incomplete()
    number = journal.attempts(run.folder.journal)
    add_to_journal(run, State.FINISHED, number)
    say.doing(f"recording in {titles}" if (titles := work.recorder.titles()) else "writing the result")
    mlflow_run_id = work.recorder.finish(say)
    signals.hold()  # the rest takes only a moment
    work.lock.check()
    run.folder.write_result(
        key=run.key,
        summary=_with_changes_of_data(run, summary),
        hosts=_hosts(run),
        attempts=number,
        duration_s=_duration_s(run, work.started),
        mlflow_run_id=mlflow_run_id,
    )
    signals.message_end = f"; run {run.key.short} is finished"


def _with_changes_of_data(run: Run, summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add files of a script's data that were replaced while its ranks read them: the run then doesn't count."""
    # on hosts of their own, ranks read a copy of the data; a pack isn't written to
    shared = launchers.capabilities(run.config.cluster).shares_run_dir
    if not shared or run.config.script is None or isinstance(run.pack, Pack):
        return summary
    replaced = run.pack.replaced_meanwhile(run.config.script.data, run.config.data_dir)
    if not replaced:
        return summary
    return {**summary, "unkeyed": {**summary.get("unkeyed", {}), **dict.fromkeys(replaced, contents.REPLACED)}}


def _record_end(work: Work, error: BaseException) -> None:
    """Write into journal and MLflow that the run failed or was killed."""
    work.say.doing("recording how it ended")
    run = work.run
    with suppress(OSError), _shown_if_slow(work, error):  # a full disk must not hide the error
        number = journal.attempts(run.folder.journal)
        if number == 0 or work.lock.lost():  # nothing was started, or the folder may belong to another command by now
            return
        state = State.KILLED if isinstance(error, Killed | KeyboardInterrupt) else State.FAILED
        add_to_journal(run, state, number, _journal_line(error))
        work.recorder.finish(work.say)


@contextmanager
def _shown_if_slow(work: Work, error: BaseException) -> Iterator[None]:
    """Show the error before the block ends, if that takes a while."""

    def show() -> None:
        if isinstance(error, PacelineError) and not isinstance(error, Killed):
            work.say(str(error))
            error.shown = True

    timer = threads.after(_SHOW_ERROR_AFTER_S, show, name="show the error")
    try:
        yield
    finally:
        timer.cancel()


def _journal_line(error: BaseException) -> str:
    if isinstance(error, TrainingError):
        return error.what.partition("\n")[0]
    if isinstance(error, PacelineError):
        return "; ".join(line.strip() for line in error.what.splitlines())
    return os_reason(error) if isinstance(error, OSError) else threads.described(error)


def _hosts(run: Run) -> list[str]:
    """Return the hosts that trained; this command may name others if it makes only the result again."""
    recorded = (run.folder.read_json(run_folder.PROVENANCE) or {}).get("hosts")
    return recorded if isinstance(recorded, list) else [host.label for host in run.config.cluster.hosts]


def _duration_s(run: Run, started: float) -> float:
    """Return the seconds of the last attempt. ``started``: start of this command (unix time). If an earlier command
    began the attempt, the time between the two commands doesn't count."""
    entries = journal.read(run.folder.journal)
    last = [entry for entry in entries if entry.attempt == entries[-1].attempt]
    finished = next(entry.time for entry in last if entry.state is State.FINISHED)
    before = [entry.time for entry in last if entry.time < started]
    if finished < started:  # this command only made the result again
        return finished - before[0]
    return finished - started + (before[-1] - before[0] if before else 0.0)


def _raise_if_pruned(run: Run, recorder: Recorder, say: Say) -> None:
    """Record a run that a search ended early, and raise Pruned; its ranks have left a file ``pruned``."""
    pruned = run.folder.read_json(run_folder.PRUNED)
    if pruned is None:
        return
    epoch = f"epoch {pruned['epoch']}, " if pruned["epoch"] else ""  # a script has none
    detail = f"after {epoch}step {pruned['step']}"
    add_to_journal(run, State.PRUNED, journal.attempts(run.folder.journal), detail)
    recorder.finish(say)
    hint = "doit train with the same configuration goes on from there"
    raise Pruned(f"PRUNED {run.key.short} {detail}", hint=hint)
