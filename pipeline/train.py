"""A run brought to result.json: launch, attempts, evaluation, record."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import (
    acceptance,
    evaluation_key,
    journal,
    leftovers,
    misplaced,
    progress,
    provenance,
    rank_environment,
    remembered,
    shell,
)
from pipeline.closure import matches
from pipeline.errors import Killed, PacelineError, Pruned, TrainingError, os_reason
from pipeline.files import write_atomic, write_json
from pipeline.heartbeat import Heartbeat
from pipeline.interrupt import Stop
from pipeline.launch import Hosts, run_attempt
from pipeline.recorder import Recorder
from pipeline.result import Result, changed
from pipeline.run import ENTRY, Run
from pipeline.runfolder import EVALUATED, TRAINED, RunFolder
from pipeline.types import PRUNE, PRUNED, NodeFacts, State

if TYPE_CHECKING:
    from filelock import FileLock

_LOCK_POLL_S = 0.2
_WRITTEN_IN = ("evaluation", "checkpoints")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a run takes from its surroundings. A sweep gives its trials what they can share.

    ``evaluate`` makes the report of a run folder, by the project's code (raises PacelineError); ``on_trained`` is
    called when the hosts are free again, before outputs, report and record are complete; ``code`` are the files that
    the snapshot is copied from (None: the run's own); ``hosts``, ``stop`` and ``threads_per_rank`` are those of
    run_attempt.
    """

    evaluate: Callable[[RunFolder, Path], None]
    recorder: Callable[[Run], Recorder]
    provenance: Callable[[Run, Sequence[str], float, Say], tuple[provenance.Provenance, bytes]]
    on_trained: Callable[[], None] | None = None
    code: Mapping[str, Path] | None = None
    hosts: Hosts | None = None
    stop: Stop | None = None
    threads_per_rank: Sequence[int] = ()


def alone(threads_per_rank: Sequence[int] = ()) -> Means:
    """The means of a run that is no part of a sweep."""
    return Means(
        evaluate=evaluate_in_child,
        recorder=own_recorder,
        provenance=collect_provenance,
        threads_per_rank=threads_per_rank,
    )


def train(run: Run, *, config_yaml: str, argv: Sequence[str], say: Say, means: Means | None = None) -> Result:
    """Bring the run to FINISHED and return result.json; a second caller with the same key waits for the first.

    Raises:
        HostError: a host can't take part.
        TrainingError: every attempt failed.
        Killed: stopped by Ctrl-C or SIGTERM.
        Pruned: ended early because a file ``prune`` came into the run folder.
        PacelineError: the run folder can't be written, the evaluation failed.
    """
    with Heartbeat(say) as heartbeat, _folder_errors_explained(run):
        return _train_alone(run, config_yaml=config_yaml, argv=argv, say=heartbeat, means=means or alone())


@contextmanager
def _folder_errors_explained(run: Run) -> Iterator[None]:
    """What the controller writes during a run lies in its folder: a full or read-only disk has to be told there."""
    try:
        yield
    except OSError as error:
        raise PacelineError(
            f"run {run.key.short} can't go on in {run.folder.path}: {os_reason(error)}",
            try_="make room or mend its permissions, then the same command; or paths.runs=<another folder>",
        ) from error


def _train_alone(run: Run, *, config_yaml: str, argv: Sequence[str], say: Heartbeat, means: Means) -> Result:
    """Behind the lock of the run's key."""
    say.doing(f"waiting for the command that trains {run.key.short}")
    with locked(run.folder, say, means.stop):
        if run.reason is None:
            say(f"{run.key.short} was finished by the other command")
        else:
            leftovers.remove([run.config.data_dir, *run.folder.path.glob("attempts/*")])
            _finish(run, config_yaml=config_yaml, argv=argv, say=say, means=means)
    result, _ = acceptance.standing(run.folder)
    if result is None:
        raise TrainingError(f"{run.folder.result} is missing after the run")
    return result


@contextmanager
def locked(folder: RunFolder, say: Say, stop: Stop | None = None) -> Iterator[None]:
    """The only one to write into the folder. The kernel frees the lock when its holder dies, however it dies."""
    from filelock import FileLock, Timeout

    folder.refuse_newer()
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another command is training {folder.key}; waiting for it")
        _wait_for(lock, stop)
    try:
        runs_dir = folder.path.parent
        inside = (folder.path / name for name in _WRITTEN_IN)
        leftovers.remove([runs_dir, runs_dir / remembered.FOLDER, folder.path, *inside])
        leftovers.remove_of_system()
        for line in misplaced.set_aside(folder.path):
            say(line)
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock, stop: Stop | None) -> None:
    """Until the other command is done. Raises Killed when ``stop`` is told."""
    from filelock import Timeout

    while True:
        try:
            lock.acquire(timeout=1.0, poll_interval=_LOCK_POLL_S)
            return
        except Timeout:
            if stop is not None and stop.told:
                raise Killed(f"stopped by {stop.by} while it waited for another command") from None


def _finish(run: Run, *, config_yaml: str, argv: Sequence[str], say: Heartbeat, means: Means) -> None:
    """Whatever is still to do: launch, evaluation, record, result.json."""
    started = time.time()
    recorder = means.recorder(run)
    if not run.folder.training_done(run.key):
        say.doing("noting where the run comes from")
        _lay_out(run, config_yaml=config_yaml, argv=argv, now=started, say=say, means=means)
        _attempts(run, recorder, say, means)
        _leave_if_pruned(run, recorder, say)
    else:
        run.folder.restore(key=run.key, config=run.config.resolved, config_yaml=config_yaml)
        if means.on_trained is not None:
            means.on_trained()
    summary = run.folder.read_summary()
    if summary is None:
        raise TrainingError(f"{run.folder.summary} is missing though every node ended well")
    number = journal.attempts(run.folder.journal)
    say.doing("making the evaluation report")
    try:
        means.evaluate(run.folder, run.root)
    except PacelineError as error:
        _failed(run, recorder, number, error, say)
        raise
    duration_s = _took_before(run) or time.time() - started
    _note(run, State.FINISHED, number)
    say.doing("recording in MLflow")
    mlflow_run_id = recorder.finish(say)
    run.folder.write_result(
        key=run.key,
        summary=summary,
        hosts=_hosts(run),
        attempts=number,
        duration_s=duration_s,
        mlflow_run_id=mlflow_run_id,
    )


def _hosts(run: Run) -> list[str]:
    """Where it was trained: this command may name others, when only the result is made again."""
    known = (run.folder.read_json("provenance.json") or {}).get("hosts")
    return known if isinstance(known, list) else [host.label for host in run.config.cluster.hosts]


def _took_before(run: Run) -> float | None:
    """Seconds that the last attempt took, where it had ended before this command."""
    entries = journal.read(run.folder.journal)
    if not entries or entries[-1].state is not State.FINISHED:
        return None
    return entries[-1].time - min(entry.time for entry in entries if entry.attempt == entries[-1].attempt)


def _lay_out(run: Run, *, config_yaml: str, argv: Sequence[str], now: float, say: Say, means: Means) -> None:
    if (accepted := run.accepted) is not None:  # what holds no longer, or is proven by this training
        acceptance.withdraw(run.folder, accepted)
    for name in (run.folder.result, run.folder.summary, run.folder.path / PRUNE, run.folder.path / PRUNED):
        name.unlink(missing_ok=True)
    run.folder.prepare(
        sources=means.code or run.sources,
        key=run.key,
        config=run.config.resolved,
        config_yaml=config_yaml,
        pack_path=run.pack.path,
    )
    if not matches(run.root, run.folder.code, run.key.parts["code"]):
        raise PacelineError("its code was edited while the run was being prepared", try_="the same command again")
    origin, patch = means.provenance(run, argv, now, say)
    write_json(run.folder.path / "provenance.json", origin.as_json())
    write_atomic(run.folder.path / "changes.patch", patch)
    provenance.keep_lock(run.root, run.folder.path)


def own_recorder(run: Run) -> Recorder:
    """A recorder process for this run."""
    return Recorder(run.folder.path, run.config, run.root)


def collect_provenance(run: Run, argv: Sequence[str], now: float, say: Say) -> tuple[provenance.Provenance, bytes]:
    """Where the run comes from, and the patch; says what of the checkout neither of them can keep."""
    origin, patch = provenance.collect(
        root=run.root,
        argv=run.config.shown_words(argv),
        overrides=run.config.overrides,
        hosts=[host.label for host in run.config.cluster.hosts],
        outputs=[run.config.runs_dir, run.config.data_dir],
        data_digest=run.pack.digest,
        unix_time=now,
        secrets=run.config.secrets,
        imported=[*run.sources.values()],
    )
    if origin.left_out:
        more = f", and {len(origin.left_out) - 3} more (provenance.json)" if len(origin.left_out) > 3 else ""
        say(f"WARNING: not kept for doit reproduce: {'; '.join(origin.left_out[:3])}{more}")
    return origin, patch


def _leave_if_pruned(run: Run, recorder: Recorder, say: Say) -> None:
    """Into the journal and the record, as a run without a result. Raises Pruned."""
    pruned = run.folder.read_json(PRUNED)
    if pruned is None:
        return
    detail = f"after epoch {pruned['epoch']}, step {pruned['step']}"
    _note(run, State.PRUNED, journal.attempts(run.folder.journal), detail)
    recorder.finish(say)
    mend = "doit train with the same configuration goes on from there"
    raise Pruned(f"PRUNED {run.key.short} {detail}", try_=mend)


def _attempts(run: Run, recorder: Recorder, say: Heartbeat, means: Means) -> None:
    """Attempt after attempt, each from the last checkpoint, until one ends well or none is left."""
    first = journal.attempts(run.folder.journal) + 1
    last = first + run.config.cluster.max_restarts
    for number in range(first, last + 1):
        _note(run, State.PLANNED, number)
        say.doing("asking the hosts")
        try:
            run_attempt(
                cluster=run.config.cluster,
                run_dir=run.folder.path,
                run_key=run.key.short,
                pack_dir=run.pack.path,
                pack_digest=run.pack.digest,
                attempt=number,
                trainer=ENTRY,
                on_line=lambda line: say(f"{line.host}:{'-' if line.rank is None else line.rank} | {line.text}"),
                on_start=partial(_on_start, run, recorder, number, say),
                on_facts=partial(_on_facts, run, say),
                on_end=partial(_on_end, say, means),
                on_note=say if number == first else None,
                hosts=means.hosts,
                stop=means.stop,
                threads_per_rank=means.threads_per_rank,
                versions=run.key.parts["environment"],
            )
            return
        except Killed as error:
            _failed(run, recorder, number, error, say, State.KILLED)
            text = f"KILLED {run.key.short}: {error}"
            raise Killed(text, try_="the same command again; it goes on from the last checkpoint") from error
        except TrainingError as error:
            if number == last or not (run.folder.path / "config.json").exists():  # somebody has removed the folder
                _failed(run, recorder, number, error, say)
                raise
            _note(run, State.FAILED, number, error.what)
            say(f"{error}\nattempt {number} failed; starting attempt {number + 1} of {last} from the last checkpoint")
        except (PacelineError, OSError) as error:
            _failed(run, recorder, number, error, say)
            raise


def _failed(
    run: Run,
    recorder: Recorder,
    number: int,
    error: PacelineError | OSError,
    say: Say,
    state: State = State.FAILED,
) -> None:
    """Into the journal and the record. A disk that takes neither must not hide what went wrong."""
    with suppress(OSError):
        _note(run, state, number, error.what if isinstance(error, PacelineError) else os_reason(error))
        recorder.finish(say)


def _on_start(run: Run, recorder: Recorder, number: int, say: Heartbeat) -> None:
    _note(run, State.RUNNING, number)
    recorder.start()
    say.doing(partial(_training, run))


def _training(run: Run) -> str:
    """What the ranks are at, as rank 0's last metrics tell."""
    step = progress.last_step(run.folder)
    if step is None:
        return "waiting for the first step; the ranks import torch and read the data"
    return f"training, the last word was of step {step}"


def _on_end(say: Heartbeat, means: Means) -> None:
    say.doing("bringing the results here")
    if means.on_trained is not None:
        means.on_trained()


def _on_facts(run: Run, say: Heartbeat, facts: Sequence[NodeFacts]) -> None:
    """What each host has installed, into provenance.json."""
    say.doing("sending code and data to the hosts and starting torchrun there")
    known = run.folder.read_json("provenance.json") or {}
    told = {fact.host: provenance.environment(fact) for fact in facts}
    write_json(run.folder.path / "provenance.json", {**known, "environments": told})


def _note(run: Run, state: State, attempt: int, detail: str = "") -> None:
    entry = journal.Entry(state=state, attempt=attempt, time=time.time(), detail=run.config.hide(detail))
    journal.append(run.folder.journal, entry)


def evaluate_in_child(folder: RunFolder, root: Path) -> None:
    """The scikit-learn report, made in a process of its own: the controller stays small. Raises PacelineError."""
    made_of = evaluation_key.made_of_run(folder, root)
    argv = [sys.executable, "-m", evaluation_key.ENTRY, str(folder.path), json.dumps(made_of)]
    done = shell.run(argv, env=rank_environment.of_report(os.environ, root), timeout_s=300.0)
    if done.code != 0:
        raise PacelineError(f"the evaluation report of {folder.key} failed: {done.stderr.strip()}")


def evaluate_again(folder: RunFolder, root: Path, say: Say) -> None:
    """Make a run's report unless it is there, intact and up to date. Raises PacelineError."""
    if not (folder.path / TRAINED[2]).exists():
        evaluate_in_child(folder, root)  # says what is missing
    with locked(folder, say):
        folder.read_result()  # refuses one that was altered
        vouched = folder.vouched()
        if TRAINED[2] in vouched and (why := changed(folder.path / TRAINED[2], vouched[TRAINED[2]])):
            raise folder.altered(TRAINED[2], why)
        intact = all(name in vouched and changed(folder.path / name, vouched[name]) is None for name in EVALUATED)
        if not intact or evaluation_key.stale_because(folder, root) is not None:
            evaluate_in_child(folder, root)
            folder.vouch_again()
