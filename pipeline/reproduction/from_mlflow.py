"""Fetch a run that another host made from its MLflow record, so that it can be reproduced here."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline import tracking
from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes import process
from pipeline.core.specs import State
from pipeline.keys.content_key import KEY_LENGTH
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder

_FETCH_S = 600.0  # importing mlflow takes seconds of CPU time, on a busy host minutes


def fetched(run_id: str, uri: str, place: Path, *, runs_dir: Path) -> RunFolder:
    """Download recipe and result of an MLflow run made on another host; return its run folder below ``place``.

    Raises:
        UsageError: neither the store nor ``runs_dir`` has such a run, or it isn't one of Paceline's.
        PacelineError: the store doesn't answer, or the run has not finished.
    """
    store = f"MLflow at {tracking.shown(uri)}"
    database = tracking.sqlite_path(uri)
    if database is not None and not database.exists():
        raise UsageError(
            f"run={run_id}: no such run under {runs_dir}, and there is no {database} to ask",
            hint="tracking.uri=<the tracking server that knows it>",
        )
    download = place / "record"
    argv = tracking.fetch_command(run_id, download, uri)
    done = process.run(argv, env=process.of_this_clone(tracking.recorder_env(uri)), timeout_s=_FETCH_S)
    if done.code == tracking.NO_SUCH_RUN:
        raise UsageError(
            f"run={run_id}: no such run under {runs_dir}, and {store} knows none either",
            hint="tracking.uri=<the tracking server that knows it>",
        )
    if done.code != 0:
        why = done.stderr.strip().splitlines()[-1:]
        raise PacelineError(f"run={run_id} is not under {runs_dir}, and {store} can't tell: {'; '.join(why)}")
    key = str((RunFolder(download).read_json(run_folder.KEY) or {}).get("key"))
    if not re.fullmatch(f"[0-9a-f]{{{KEY_LENGTH}}}", key):
        raise UsageError(f"run={run_id}: that run of {store} is none of Paceline's; it has no key.json")
    folder = RunFolder(download.rename(place / key))
    folder.refuse_newer()
    entries, summary = journal.read(folder.journal), folder.read_summary()
    if not entries or entries[-1].state is not State.FINISHED or summary is None:
        state = f"it ended {entries[-1].state}" if entries else "as far as its record goes, it has not ended"
        raise PacelineError(f"run={run_id} ({folder.key}) has no result to compare with: {state}")
    # result.json is written after the record, so that has none
    documents.write_sealed(folder.result, {**summary, "key": folder.key, "mlflow_run_id": run_id, "files": {}})
    return folder
