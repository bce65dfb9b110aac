"""`doit fetch`, `train` and `attach`: make the data set, train the run, and show its progress."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.cli import clone
from pipeline.cli.commands.finished import answer_with, figures, is_finished
from pipeline.cli.invocation import QUIET, VERBOSE, as_typed, is_on, is_wanted, process_count, verbosity
from pipeline.cli.output import answer, answer_event, note, note_usual, say, say_folded, say_usual, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster.attempt.failures import is_worth_showing
from pipeline.cluster.events import LogLine
from pipeline.cluster.spares import unused_warning
from pipeline.cluster.validation import usable_gpus
from pipeline.core import locks
from pipeline.core.errors import PacelineError, UsageError, os_reason
from pipeline.core.processes import process
from pipeline.core.processes.wait_reports import waiting
from pipeline.core.specs import Cluster
from pipeline.core.tables import counted
from pipeline.data import store
from pipeline.execution import complete, this_computer
from pipeline.execution.attempting import formatted as as_line
from pipeline.execution.run import Run
from pipeline.live.notices import Notifier
from pipeline.live.screen import Picture, Screen, is_live, plain_width
from pipeline.live.state import SweepState
from pipeline.live.watching import RunPicture, SweepPicture, first_state
from pipeline.runs import status
from pipeline.runs.contents import what_runs
from trainers.contract import run_folder

_DETACHED = ".detached"
_START_S = 120.0  # longest time until a detached command works: imports, the check of hosts
_LOOK_S = 0.1
_ASKS_TO_DETACH = re.compile(r"(?:(?:train|sweep)\.)?detach(?:=.*)?")
_LAST_WORDS = 2_000  # characters shown of the output of a detached command that ended at once
_OF_A_TRIAL = re.compile(r"trial +\d+ \| ")


def fetch(current: Session) -> None:
    """Make the data pack, and fetch the initial weights, if they are missing."""
    if current.pack is None:
        _fetch_data(current)
    if (start := current.initial_weights) is not None and start.url is not None:
        complete.fetch_weights(current.config, start)
        current.forget_pack()


def _fetch_data(current: Session) -> None:
    step = current.config.step
    if step is not None and step.path is None:
        note(f"the data comes from step {step.name}, which runs first")
        step.make(note, process_count())
        current.forget_steps()
    if current.pack is not None:
        return
    pack = store.fetch(current.config.train.dataset, current.config.data_dir)
    current.forget_pack()
    write = say if current.invocation.verb == "fetch" else note
    sizes = ", ".join(f"{name} {stop - start:,}" for name, (start, stop) in pack.manifest.splits.items())
    write(f"{pack.manifest.name}: {sizes} images in {relative(pack.path)}")
    if pack.manifest.synthetic:
        write("SYNTHETIC DATA: an accuracy on these images means nothing")


def train(current: Session) -> None:
    """Train the run. With `doit -a`, a finished run is repeated in a separate folder and compared.

    With ``--prove``, the run is proven after that, or at once if it is finished.
    """
    run, options = current.run, current.invocation.options
    is_done = run is not None and run.reason is None
    proves = is_on(options, "prove") and not is_on(options, "detach")  # the detached command proves it
    repeats = current.invocation.again and is_done
    if repeats or proves:
        from pipeline.cli.commands import reproduce  # git, archives, MLflow: for these two alone
    if repeats and run is not None:
        reproduce.reproduce_run(current, run.folder)
    elif not (proves and is_done):
        _train(current)
    if proves:
        reproduce.prove(current, once=True)


def train_all(current: Session) -> None:
    """Fetch and train in one step, for the Hydra application (doit has a task for each)."""
    if current.pack is None:
        _fetch_data(current)
    if not is_finished(current):
        _train(current)


def attach(current: Session) -> None:
    """Follow the attempt that outlived its command."""
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
    if run is None:  # a run begins only once its data is here
        raise UsageError(
            "nothing of this run is under way here: its data set was never fetched",
            hint="doit attach with the words of the command that has started it, or that command again",
        )
    _train(current, attach=True)


def _train(current: Session, *, attach: bool = False) -> None:
    if not attach and current.config.train.init.setting:  # weights to start from: fetched, or made by init.run
        complete.provide_weights(current.config, ROOT, argv=sys.argv, say=note)
        current.forget_pack()
    with waiting(note_usual, "looking up the run"):
        run = current.run
    if run is None:
        raise PacelineError("the data set vanished after it was fetched", hint="the same command again")
    if is_on(current.invocation.options, "preflight.deep"):
        from pipeline.cli.commands.diagnostics import refuse_unfit_hosts  # the measuring verbs: for this option alone

        refuse_unfit_hosts(current)
    cluster = current.config.cluster
    if not attach:
        refuse_unfit(cluster)
    if is_on(current.invocation.options, "detach"):
        start_detached(current, run.key.short, run.folder.lock)
        return
    shape = f"{counted(cluster.nnodes, 'node')}, {counted(cluster.world_size, 'rank')}"
    about = {"kind": "run", "key": run.key.short, "name": what_runs(run.config.resolved)}
    with (
        screen(lambda: RunPicture(first_state(run.key.short, run.config.resolved), run.folder.path)) as shown,
        Notifier(run.config.notify, shown.say, **about) as notices,
    ):
        shown.say(f"run {run.key.short}: {shape}, {cluster.launcher}")
        if idle := unused_warning(cluster):
            shown.say(idle)
        services = replace(
            complete.single_run_services(),
            on_event=subscriber(shown, notices.hear),
            on_wait=shown.tell if shown.is_live else None,
        )
        result = complete.train(run, argv=sys.argv, say=shown.say, services=services, attach=attach)
        notices.ended(result.metrics)
    say_folded(f"FINISHED {run.key.short}: {figures(result)}")
    for line in status.outlived(run.folder):
        note(f"WARNING: ended after the script, and lost what it had not written yet: {line}")
    say_usual(f"  results  {relative(run.folder.result)}")
    outputs = run.folder.path / run_folder.OUTPUTS
    if current.config.script is not None and any(path.is_file() for path in outputs.rglob("*")):
        say_usual(f"  files    {relative(outputs)}")
    say_usual("  compare  doit ui")
    say_usual(f"  repeat   doit reproduce {run.key.short}")
    answer_with(result, run.folder)
    if folders := _changed_meanwhile(current, run):
        note(
            f"WARNING: {folders}, which is data in the key, was changed while the run went on, so the same command "
            "trains anew; a folder that the script writes to: program.args.NAME={run}/NAME"
        )
    if (lacks := run.key_lacks) is not None:
        note(f"WARNING: {lacks}; until then it does not count as finished, and the same command runs it again")


def _changed_meanwhile(current: Session, run: Run) -> str:
    """Return which data of a script has changed since the run began, or ''."""
    if current.config.script is None or not current.config.script.data:
        return ""
    before = run.pack.digest
    current.forget_pack()
    if current.pack is None or current.pack.digest == before:
        return ""
    return ", ".join(str(item.path) for item in current.config.script.data)


def refuse_unfit(cluster: Cluster) -> None:
    """Refuse a cluster that can't work, as far as this computer shows it; warn of a slow one. Raises UsageError."""
    if warning := this_computer.refuse(cluster, root=ROOT, local_gpus=usable_gpus()):
        note(warning)


# ------------------------------------------------------------------------------- without a terminal
def start_detached(current: Session, name: str, lock: Path | None = None) -> None:
    """Start the typed command, without ``--detach``, in its own session.

    Args:
        name: of the run or sweep; its log is ``runs/.detached/NAME.log``.
        lock: the lock that the command holds while it works. None: it counts as working once it has lived two seconds.

    Raises PacelineError: it can't be started, or failed at once.
    """
    log = current.config.runs_dir / _DETACHED / f"{name}.log"
    env = process.of_this_clone({clone.STARTED_IN: str(clone.typed_in())})
    words = [word for word in sys.argv[1:] if not _ASKS_TO_DETACH.fullmatch(word)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = process.background([sys.executable, "-m", "doit", *words], env=env, log=log)
    except OSError as error:
        what = f"{log} can't be written: {os_reason(error)}"
        raise PacelineError(what, hint="the command without --detach") from error
    with waiting(note, "starting it without this terminal"):
        until = time.monotonic() + (_START_S if lock is not None else 2.0)
        while child.poll() is None and time.monotonic() < until and not (lock is not None and locks.is_held(lock)):
            time.sleep(_LOOK_S)
    if child.poll() is not None:
        ended_at_once(child.returncode, log)
        return
    if wants_json():
        answer({"name": name, "pid": child.pid, "log": str(log)})
    say(f"{name} goes on without this terminal (process {child.pid}); what it says: {relative(log)}")


def ended_at_once(code: int, log: Path) -> None:
    """Report the end of a detached command. Raises PacelineError: it failed."""
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    if code == 0:
        say(said[-_LAST_WORDS:])
        return
    raise PacelineError(
        f"it ended at once, with {code}:\n{said[-_LAST_WORDS:]}", hint=f"less {shlex.quote(os.fspath(log))}"
    )


# ------------------------------------------------------------------------------------------------ the screen
def screen(picture: Callable[[], Picture], *, trials: bool = False) -> Screen:
    """Return the screen for one command's progress on stderr. ``picture`` is called if a view can be drawn.

    ``trials``: of single trials only warnings and errors are shown; doit logs has their lines.
    """
    wanted: Callable[[str], bool] = is_wanted if verbosity() == QUIET else lambda _: True
    if trials and verbosity() != VERBOSE:
        usual, wanted = wanted, lambda text: usual(text) and (not _OF_A_TRIAL.match(text) or is_wanted(text))
    if verbosity() != QUIET and is_live(sys.stderr, os.environ):
        return Screen(picture(), wanted=wanted, as_typed=as_typed)
    return Screen(width=plain_width(sys.stderr, os.environ), wanted=wanted, as_typed=as_typed)


def screen_of_sweep(state: SweepState, runs_dir: Path) -> Screen:
    """Return the screen of a sweep in this state."""
    return screen(lambda: SweepPicture(state, runs_dir), trials=True)


def subscriber(
    shown: Screen, hear: Callable[[Any], None], lines: Callable[[Any, float], str | None] = lambda *_: None
) -> Callable[[Any], None]:
    """Return a function that passes events of an attempt, or of a sweep's trials, to the screen and to ``hear``.

    Without a table, ``lines`` reports starts and ends of trials.
    """
    verbose = verbosity() == VERBOSE

    def on_event(event: Any) -> None:
        hear(event)
        shown.tell(event)
        if wants_json():
            answer_event(event)
        if verbose and isinstance(event, LogLine) and not is_worth_showing(event):
            shown.say(as_line(event))
        if not shown.is_live and (text := lines(event, time.monotonic())) is not None:
            shown.say(text)

    return on_event
