"""The recorder process, which the controller starts as ``python -m pipeline.tracking VERB``.

``record RUN_DIR`` records one run. ``serve`` records the trials of a sweep, several at a time: it reads lines of JSON
{"id", "run_dir"}, and answers {"id", "error": why it failed, or null}. ``prepare`` creates a database's schema.
``fetch RUN_ID FOLDER`` downloads the files of a record from which the run can be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from pipeline.core import masking
from pipeline.core.errors import PacelineError
from pipeline.core.processes import threads, unexpected
from pipeline.core.processes.process import BESIDE, set_priority
from pipeline.tracking.destinations import (
    NO_SUCH_RUN,
    PENDING,
    SETTINGS_VARIABLE,
    URI_VARIABLE,
    TrackingState,
    absolute_uri,
)
from pipeline.tracking.recorder import record
from pipeline.tracking.sent_files import RECIPE
from pipeline.tracking.store_calls import StoreError, exit_process

_LOOK_S, _GRACE_S = 0.5, 1.0  # how often to look whether the parent lives; time to end regularly once it is gone
_LARGEST_BYTES = 1 << 30  # of a downloaded file, so that an endless answer doesn't fill the disk
_NOT_NEEDED = ("numpy", "pandas", "pyarrow", "scipy")  # mlflow works without them, and its import takes half as long


def main(argv: list[str] | None = None) -> int:
    """Run a verb. Return 0: done; 1: pending or failed, with the reason on stderr; 4: no such run (``fetch``)."""
    arguments = _parser().parse_args(argv)
    unexpected.install()
    if arguments.verb == "record":
        unexpected.keep_tracebacks_in(arguments.run_dir.absolute().parent)
    try:
        return _run_verb(arguments)
    except (PacelineError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking")
    parser.set_defaults(tracker=None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("record", "prepare", "serve", "fetch"):
        verbs.add_parser(verb).add_argument("--uri", help=f"default: {URI_VARIABLE} of the environment")
    for verb in ("record", "serve"):
        verbs.choices[verb].add_argument("--experiment", required=True)
        verbs.choices[verb].add_argument("--tracker", help="default: MLflow")
        verbs.choices[verb].add_argument("--parent", type=int, help="process that wants the record")
    verbs.choices["fetch"].add_argument("run_id")
    verbs.choices["fetch"].add_argument("folder", type=Path)
    recording = verbs.choices["record"]
    recording.add_argument("run_dir", type=Path)
    recording.add_argument("--follow", action="store_true")
    recording.add_argument("--check", action="store_true")
    return parser


def _run_verb(arguments: argparse.Namespace) -> int:
    tracker: str | None = arguments.tracker
    uri = tracker or absolute_uri(arguments.uri or os.environ.get(URI_VARIABLE), Path.cwd())
    if tracker is None:
        # a None there makes the import of the module raise ImportError
        sys.modules.update(dict.fromkeys(_NOT_NEEDED))  # type: ignore[arg-type]
    if arguments.verb in ("prepare", "fetch"):
        from pipeline.tracking.mlflow_store import Store  # late import: mlflow takes seconds

        store = Store(uri)  # creates the schema
        if arguments.verb == "prepare":
            return 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return 0 if store.fetch(arguments.run_id, RECIPE, arguments.folder) else NO_SUCH_RUN
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the journal's last state KILLED must still be recorded
    settings = "{}"
    if tracker is not None:
        masking.begin()  # a tracker's output goes into a file of the run folder
        settings = os.environ.get(SETTINGS_VARIABLE, settings)
    record_run = partial(record, uri=uri, experiment=arguments.experiment, tracker=tracker, settings=settings)
    if arguments.verb == "serve":
        set_priority(os.getpid(), BESIDE)  # trials end while others train, so the priority is low all the time
        return _serve(arguments, record_run)
    return _record_one(arguments, record_run)


def _record_one(arguments: argparse.Namespace, record_run: Callable[..., TrackingState]) -> int:
    parent = _watched_parent(arguments) if arguments.follow else None
    recorded = record_run(arguments.run_dir, follow=arguments.follow, check=arguments.check, parent_pid=parent)
    if recorded.state == PENDING:
        condition = "once that is fixed" if recorded.refused else "once it answers"
        print(f"{recorded.message}\n  try: doit record {arguments.run_dir.name}, {condition}", file=sys.stderr)
        return 1
    print(f"{recorded.state} {recorded.run_id or arguments.tracker}")
    return 0


def _watched_parent(arguments: argparse.Namespace) -> int:
    """Return the pid of the process that wants the record, and end this process once the other one is gone."""
    parent_pid: int = arguments.parent or os.getppid()

    # otherwise the same command, run again, would wait for the lock that this process holds
    def end_with_parent() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_LOOK_S)
        time.sleep(_GRACE_S)
        os._exit(1)

    threads.start(end_with_parent, name="parent", on_error=lambda error: print(error, file=sys.stderr))
    return parent_pid


def _serve(arguments: argparse.Namespace, record_run: Callable[..., TrackingState]) -> int:
    """Record each run in its own thread, which mostly sleeps. All share one import of mlflow and one schema check."""
    parent = _watched_parent(arguments)
    stdout, sys.stdout = sys.stdout, sys.stderr  # mlflow's output must not mix with answers
    alive: list[threading.Thread] = []
    for line in sys.stdin:
        request = json.loads(line)
        name, answer_error = f"record {request['run_dir']}", partial(_answer, request, stdout)
        begin = partial(threads.start, name=name, on_error=answer_error, daemon=False)
        thread = begin(_follow, request, record_run, parent, stdout)
        alive = [earlier for earlier in [*alive, thread] if earlier.is_alive()]
    for thread in alive:  # they end by themselves when the parent is gone
        thread.join()
    return 0


def _follow(request: dict[str, Any], record_run: Callable[..., TrackingState], parent: int, stdout: TextIO) -> None:
    try:
        record_run(Path(request["run_dir"]), follow=True, parent_pid=parent)
    except PacelineError as failure:  # other records continue
        _answer(request, stdout, str(failure))
    else:
        _answer(request, stdout, None)


def _answer(request: dict[str, Any], stdout: TextIO, error: str | None) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        stdout.write(json.dumps({"id": request["id"], "error": error}) + "\n")
        stdout.flush()


if __name__ == "__main__":
    exit_process(main())
