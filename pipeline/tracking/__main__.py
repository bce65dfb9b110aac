"""The recorder process: ``record RUN_DIR``; ``prepare`` creates a database's schema, ``fetch`` downloads a recipe.
``serve`` records each run folder named on stdin, one JSON line each, several at a time, with one line as answer.
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
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.core import masking
from pipeline.core.errors import PacelineError
from pipeline.core.processes import threads, unexpected
from pipeline.core.processes.process import BESIDE, set_priority
from pipeline.tracking import answers
from pipeline.tracking.address import URI_VARIABLE, absolute_uri
from pipeline.tracking.answers import StoreError
from pipeline.tracking.destinations import NO_SUCH_RUN, PENDING, SETTINGS_VARIABLE, TrackingState
from pipeline.tracking.mlflow_writer import RECIPE
from pipeline.tracking.recorder import record

if TYPE_CHECKING:
    pass

_LOOK_S, _LEAVES_S = 0.5, 1.0  # interval of looking for the parent; time to end regularly after it is gone
_LARGEST_BYTES = 1 << 30  # of a downloaded recipe file, so that an endless answer doesn't fill the disk
_NOT_NEEDED = ("numpy", "pandas", "pyarrow", "scipy")


def main(argv: list[str] | None = None) -> int:
    """Return 0: done; 1: pending or failed, with the reason on stderr; 4: no such run (``fetch``)."""
    arguments = _parser().parse_args(argv)
    unexpected.install()
    if arguments.do == "record":
        unexpected.keep_in(arguments.run_dir.absolute().parent)
    try:
        return _done(arguments)
    except (PacelineError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking")
    parser.set_defaults(tracker=None)
    verbs = parser.add_subparsers(dest="do", required=True)
    for verb in ("record", "prepare", "serve", "fetch"):
        verbs.add_parser(verb).add_argument("--uri", help=f"default: {URI_VARIABLE} of the environment")
    for verb in ("record", "serve"):
        verbs.choices[verb].add_argument("--experiment", required=True)
        verbs.choices[verb].add_argument("--tracker", help="default: MLflow")
        verbs.choices[verb].add_argument("--parent", type=int, help="process that wants the record")
    verbs.choices["fetch"].add_argument("run_id")
    verbs.choices["fetch"].add_argument("place", type=Path)
    recording = verbs.choices["record"]
    recording.add_argument("run_dir", type=Path)
    recording.add_argument("--follow", action="store_true")
    recording.add_argument("--check", action="store_true")
    return parser


def _done(arguments: argparse.Namespace) -> int:
    tracker: str | None = arguments.tracker
    uri = tracker or absolute_uri(arguments.uri or os.environ.get(URI_VARIABLE), Path.cwd())
    if tracker is None:  # mlflow does without these (mlflow-skinny): the import takes half the time and 80 MB less
        sys.modules.update(dict.fromkeys(_NOT_NEEDED))  # type: ignore[arg-type]  # None raises ImportError
    if arguments.do in ("prepare", "fetch"):  # in the foreground, while no ranks run
        from pipeline.tracking.mlflow_store import Store  # late import: mlflow takes seconds

        store = Store(uri)  # creates the schema
        if arguments.do == "prepare":
            return 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return 0 if store.fetch(arguments.run_id, RECIPE, arguments.place) else NO_SUCH_RUN
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the journal's last state KILLED must still be recorded
    settings = "{}"
    if tracker is not None:
        masking.begin()  # a tracker's output goes into a file of the run folder
        settings = os.environ.get(SETTINGS_VARIABLE, settings)
    to = partial(record, uri=uri, experiment=arguments.experiment, tracker=tracker, settings=settings)
    if arguments.do == "serve":
        set_priority(os.getpid(), BESIDE)  # trials end while others train, so the priority is low all the time
        return _serve(arguments, to)
    return _record_one(arguments, to)


def _record_one(arguments: argparse.Namespace, to: Callable[..., TrackingState]) -> int:
    parent = _parent(arguments) if arguments.follow else None
    recorded = to(arguments.run_dir, follow=arguments.follow, check=arguments.check, parent_pid=parent)
    if recorded.state == PENDING:
        when = "once that is fixed" if recorded.refused else "once it answers"
        print(f"{recorded.message}\n  try: doit record {arguments.run_dir.name}, {when}", file=sys.stderr)
        return 1
    print(f"{recorded.state} {recorded.run_id or arguments.tracker}")
    return 0


def _parent(arguments: argparse.Namespace) -> int:
    """Return the process that wants the record, and end this process, in any state, once that is gone.

    The same command run again would otherwise wait for this process's lock.
    """
    parent: int = arguments.parent or os.getppid()

    def end_with_it() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        time.sleep(_LEAVES_S)
        os._exit(1)

    threads.start(end_with_it, name="parent", on_error=lambda why: print(why, file=sys.stderr))
    return parent


def _serve(arguments: argparse.Namespace, to: Callable[..., TrackingState]) -> int:
    """Record each run in its own thread, which mostly sleeps. Imports and schema are paid for once."""
    parent = _parent(arguments)
    stdout, sys.stdout = sys.stdout, sys.stderr  # mlflow's output must not mix with answers
    recording: list[threading.Thread] = []
    for line in sys.stdin:
        request = json.loads(line)
        name, failed = f"record {request['run_dir']}", partial(_answer, request, stdout)
        thread = threads.start(_record, request, to, parent, stdout, name=name, on_error=failed, daemon=False)
        recording = [known for known in [*recording, thread] if known.is_alive()]
    for thread in recording:  # they end by themselves when the parent is gone
        thread.join()
    return 0


def _record(request: dict[str, Any], to: Callable[..., TrackingState], parent: int, stdout: TextIO) -> None:
    try:
        to(Path(request["run_dir"]), follow=True, parent_pid=parent)
    except PacelineError as failure:  # other records continue
        _answer(request, stdout, str(failure))
    else:
        _answer(request, stdout, None)


def _answer(request: dict[str, Any], stdout: TextIO, error: str | None) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        stdout.write(json.dumps({"id": request["id"], "error": error}) + "\n")
        stdout.flush()


if __name__ == "__main__":
    answers.leave(main())
