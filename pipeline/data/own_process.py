"""Run the function of ``dataset=own`` in a separate process, with the environment of a rank, and record what it reads.

``python -m pipeline.data.own_process JSON`` is that process; it leaves the pack, or an error, in its folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.files import sha256_file, write_json
from pipeline.core.places import HOME, IS_INSTALLED, PACKAGES, ROOT
from pipeline.core.processes import process
from pipeline.data import manifest, packing, request
from pipeline.data.base import Workspace
from pipeline.data.datasets import own
from pipeline.data.datasets.own import OwnDatasetConfig
from pipeline.data.progress import reporting
from pipeline.data.request import READ, Request
from pipeline.keys import rank_environment
from trainers.contract.data_pack import Manifest
from trainers.core.config import DatasetConfig
from trainers.observation.input_record import files_changed_meanwhile, record_inputs
from trainers.observation.notes import Notes
from trainers.observation.observer import PROJECT, SKIP, hooks
from trainers.observation.processes import ObservedProgram, zones_of_host
from trainers.observation.unkeyed import joined

PACK = "pack"
_ERROR = "error.json"


def pack(dataset: DatasetConfig, wanted: Request, work: Workspace, target: Path) -> Manifest:
    """Build the pack of a user-defined function. Raises DataError."""
    folder, name = work.folder / PACK, getattr(dataset, "target", "")
    if target.exists() and (why := request.stale_because(target, ROOT)):
        print(f"{name}: {why}; the data is made anew", file=sys.stderr, flush=True)
    # Hash the sources before the call, so that an edit during the call is detected.
    code = {os.path.realpath(ROOT / path): sha256_file(ROOT / path) for path in wanted.code if (ROOT / path).is_file()}
    notes = _observed_call(dataset, work, ROOT)
    wanted.refuse_changed()
    keyed = {**{os.path.realpath(path): "" for path in wanted.stamps}, **code}
    if edited := files_changed_meanwhile(notes, ROOT, keyed):
        raise DataError(f"{joined(edited)} was edited while {name} read it", hint="the same command again")
    _record_reads(folder, notes, [*wanted.stamps, *(ROOT / path for path in wanted.code)], ROOT, name)
    made = manifest.read(folder)
    if made is None:
        raise DataError(f"dataset.target={name}: its process left no whole pack", hint="the same command again")
    return made.manifest


def _observed_call(dataset: DatasetConfig, work: Workspace, root: Path) -> Notes:
    """Build the pack in ``work.folder/pack``; return notes of what the function read. Raises DataError, OSError."""
    (work.folder / PACK).mkdir()
    skipped = [work.folder, *(place / name for place in (HOME, root) for name in PACKAGES)]
    zones = [(PROJECT, os.path.realpath(root)), *((SKIP, os.path.realpath(path)) for path in skipped), *zones_of_host()]
    observed = ObservedProgram(work.folder / "observed", zones)
    task = {
        "config": asdict(dataset),
        "root": str(root),
        "folder": str(work.folder),
        "downloads": str(work.downloads),
        "zones": zones,
        "notes": str(observed.notes_folder),
        "site": str(observed.site),
    }
    path = (None if IS_INSTALLED else str(HOME), str(root))
    env = {**rank_environment.inheritable(os.environ), **rank_environment.ALWAYS}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    child = process.guarded([sys.executable, "-m", __name__, json.dumps(task)], env=env, keeps_output=True)
    try:
        code = child.wait()
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    notes, target = observed.notes(), getattr(dataset, "target", "")
    if left := [name for name in notes.variables if name in os.environ and name not in env]:
        _say(
            f"WARNING: {target} read {joined(left)}, which this shell sets and it doesn't get; an argument passes its "
            f"value, as a part of the data's name: dataset.args.NAME='${{oc.env:{left[0]}}}'"
        )
    if (work.folder / _ERROR).exists():
        error = json.loads((work.folder / _ERROR).read_text(encoding="utf-8"))
        if error["errno"]:
            raise OSError(error["errno"], error["what"], error["filename"])
        raise DataError(error["what"], hint=error["hint"])
    if code != 0:
        ended = f"exit code {code}" if code < 128 else f"signal {code - 128}"
        raise DataError(f"dataset.target={target}: its process ended with {ended} before the data was packed")
    return notes


def _record_reads(folder: Path, notes: Notes, known: Collection[Path], root: Path, target: str) -> None:
    """Record in a pack what the function read in addition to ``known``, and warn about these files. Raises OSError."""
    keyed = {os.path.realpath(path) for path in known}
    bytewise = [os.path.realpath(path) for path in known if path.suffix != ".py"]
    record = request.stored_record(record_inputs(notes, root, keyed, bytewise))
    write_json(folder / READ, record)
    if read := [*record["files"]]:
        change = "it changes" if len(read) == 1 else "they change"
        _say(f"WARNING: {target} read {joined(read)}, no part of dataset.source; the data is made anew when {change}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _main(task: dict[str, Any]) -> int:
    folder, config = Path(task["folder"]), OwnDatasetConfig(**task["config"])
    os.environ["PYTHONPATH"] = os.pathsep.join([task["site"], os.environ["PYTHONPATH"]])  # for child processes
    hooks.compile_anew()
    hooks.start([(kind, path) for kind, path in task["zones"]], task["notes"])
    process_id = os.getpid()
    error: dict[str, Any] = {"errno": None, "hint": None, "filename": None}
    try:
        with reporting(None) as report:
            places = {name: Path(task[name]) for name in ("folder", "downloads", "root")}
            work = Workspace(**places, report=report)
            loaded = own.load(config, work)
            if os.getpid() != process_id:  # a fork of the function's, which came back from it
                os._exit(1)
            packing.write(loaded, config, folder / PACK, report)
    except DataError as failed:
        write_json(folder / _ERROR, {**error, "what": failed.what, "hint": failed.hint})
        return 1
    except OSError as failed:
        filename = failed.filename if isinstance(failed.filename, str) else None
        write_json(folder / _ERROR, {**error, "what": failed.strerror, "errno": failed.errno, "filename": filename})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
