"""The process that runs a function of yours (``dataset=own``) to make a pack, and the call of it.

The function runs in a process of its own, with the environment that a rank gets, and an audit hook records what it
reads. ``python -m pipeline.data.own_process JSON`` is that process; it leaves the pack, or an error, in its folder.
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


def pack(dataset: DatasetConfig, pack_request: Request, work: Workspace, target: Path) -> Manifest:
    """Build the pack of a user-defined function in ``work.folder / PACK``; the caller moves it to ``target``."""
    folder, function = work.folder / PACK, getattr(dataset, "target", "")
    # the pack of an earlier call, of which an input has changed
    if target.exists() and (reason := request.stale_because(target, ROOT)):
        _print(f"{function}: {reason}; the data is made anew")
    # Hash the sources before the call, so that an edit during the call is detected.
    code_files = [ROOT / path for path in pack_request.code]
    code = {os.path.realpath(path): sha256_file(path) for path in code_files if path.is_file()}
    notes = _observed_call(dataset, work, ROOT)
    pack_request.refuse_changed()
    # refuse_changed compares the files as they are now. An edit that was undone again shows only in the digests that
    # the hook took when the function opened the files. Source files get '' in the place of a digest: as no file has
    # this digest, they are compared with their present content alone, which is the requested one (refuse_changed).
    keyed = {**{os.path.realpath(path): "" for path in pack_request.stamps}, **code}
    if edited := files_changed_meanwhile(notes, ROOT, keyed):
        raise DataError(f"{joined(edited)} was edited while {function} read it", hint="the same command again")
    _record_reads(folder, notes, [*pack_request.stamps, *code_files], ROOT, function)
    complete_pack = manifest.read(folder)
    if complete_pack is None:
        raise DataError(f"dataset.target={function}: its process left no whole pack", hint="the same command again")
    return complete_pack.manifest


def _observed_call(dataset: DatasetConfig, work: Workspace, root: Path) -> Notes:
    """Build the pack in ``work.folder / PACK``; return notes of what the function read. Raises DataError, OSError."""
    (work.folder / PACK).mkdir()
    # the hook doesn't note files of Paceline itself and of the pack in progress
    skipped = [work.folder, *(parent / name for parent in (HOME, root) for name in PACKAGES)]
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
    env = {**rank_environment.inheritable(os.environ), **rank_environment.ALWAYS}
    # an installed Paceline is on the path already
    env["PYTHONPATH"] = str(root) if IS_INSTALLED else os.pathsep.join([str(HOME), str(root)])
    child = process.guarded([sys.executable, "-m", __name__, json.dumps(task)], env=env, keeps_output=True)
    try:
        code = child.wait()
    finally:  # after Ctrl-C: the child ends when its stdin closes
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    notes, target = observed.notes(), getattr(dataset, "target", "")
    if withheld := [name for name in notes.variables if name in os.environ and name not in env]:
        _print(
            f"WARNING: {target} read {joined(withheld)}, which this shell sets and it doesn't get; an argument passes "
            f"its value, as a part of the data's name: dataset.args.NAME='${{oc.env:{withheld[0]}}}'"
        )
    # the child's DataError or OSError, as `_main` has written it
    if (work.folder / _ERROR).exists():
        error = json.loads((work.folder / _ERROR).read_text(encoding="utf-8"))
        if error["errno"]:
            raise OSError(error["errno"], error["what"], error["filename"])
        raise DataError(error["what"], hint=error["hint"])
    if code != 0:
        ended = f"exit code {code}" if code < 128 else f"signal {code - 128}"
        raise DataError(f"dataset.target={target}: its process ended with {ended} before the data was packed")
    return notes


def _record_reads(folder: Path, notes: Notes, keyed_files: Collection[Path], root: Path, target: str) -> None:
    """Record in a pack which files the function read besides source and code (``keyed_files``), and warn about them."""
    keyed = {os.path.realpath(path) for path in keyed_files}
    # The pack's name covers imports of .py files, so these are in ``keyed``. But they count there without comments: a
    # file that is opened as text is covered only if it is in ``bytewise``; so a .py file that is read so is recorded.
    bytewise = [os.path.realpath(path) for path in keyed_files if path.suffix != ".py"]
    record = request.stored_record(record_inputs(notes, root, keyed, bytewise))
    write_json(folder / READ, record)
    if files := [*record["files"]]:
        change = "it changes" if len(files) == 1 else "they change"
        what = f"{target} read {joined(files)}, no part of dataset.source"
        _print(f"WARNING: {what}; the data is made anew when {change}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _main(task: dict[str, Any]) -> int:
    """Make the pack in this process, with the hook that notes what is read; ``task`` is that of ``_observed_call``."""
    folder, config = Path(task["folder"]), OwnDatasetConfig(**task["config"])
    # processes that the function starts find the hook in the folder `site`, as sitecustomize.py
    os.environ["PYTHONPATH"] = os.pathsep.join([task["site"], os.environ["PYTHONPATH"]])
    # import the user's sources without byte code, which may be that of a version edited within the same second
    hooks.compile_anew()
    hooks.start([(kind, path) for kind, path in task["zones"]], task["notes"])
    process_id = os.getpid()
    error: dict[str, Any] = {"errno": None, "hint": None, "filename": None}
    try:
        with reporting(None) as report:
            work = Workspace(folder=folder, downloads=Path(task["downloads"]), root=Path(task["root"]), report=report)
            loaded = own.load(config, work)
            # the function has forked, and its child has returned too: only the parent may write the pack
            if os.getpid() != process_id:
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
