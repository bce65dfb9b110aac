"""Node modules that measure instead of train: laid out, launched like a run, results under runs/diagnostics/."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import AllSucceeded, AttemptEvent, Doing, Emit, HostNote, LogLine, Notice, ShownLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import AttemptSpec, PackSource
from pipeline.core.errors import TrainingError
from pipeline.core.files import write_atomic, write_json
from pipeline.core.processes.wait_reports import WaitReports
from pipeline.core.program import TORCHRUN
from pipeline.core.specs import Cluster, LaunchPlan, Outputs
from pipeline.data import manifest
from pipeline.keys.import_closure import import_closure
from trainers.contract import run_folder

FOLDER = "diagnostics"  # beside the runs, whose folders have a key for a name
_ENTRY = "trainers.measuring.measure"

Say = Callable[[str], None]


def new_folder(runs_dir: Path, measurement: str) -> Path:
    """Create and return ``runs/diagnostics/<local time>-<measurement>``. Raises OSError."""
    start = runs_dir / FOLDER / time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = start.with_name(f"{start.name}-{measurement}{'' if number == 1 else f'-{number}'}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def run(
    config: Mapping[str, Any],
    result: str,
    *,
    cluster: Cluster,
    folder: Path,
    root: Path,
    say: Say,
    pack: PackSource | None = None,
    other_results: tuple[str, ...] = (),
    chosen: Collection[str] = (),
) -> dict[str, Any]:
    """Run ``trainers.measuring.measure`` on all ranks, print rank 0's lines as they come, and return the result.

    Args:
        config: the content of config.json; a section of it says what is measured.
        result: the JSON file that rank 0 writes last.
        folder: where config.json, the code snapshot, plan, logs and results lie; created if it doesn't exist.
        root: the project, from which the entry's import closure is taken.
        other_results: other files that rank 0 leaves.
        chosen: the modules of the options that the configuration chose.

    Raises:
        HostError, TrainingError, Killed: as ``cluster.attempt.run_attempt`` does.
    """
    write_json(folder / run_folder.CONFIG, config)
    pack_manifest = manifest.read(pack.path) if pack is not None else None
    reading = pack_manifest.rank_modules if pack_manifest is not None else ()
    entries = (_ENTRY, TORCHRUN, *chosen, *reading)
    code = import_closure(root, entries, cluster.python_path, may_lack=True)
    for name, source in code.sources.items():
        write_atomic(folder / "code" / name, source.read_bytes())
    spec = AttemptSpec(
        run_dir=folder.resolve(),
        run_key=f"{folder.name}-{secrets.token_hex(3)}",  # a fixed one would end somebody else's on the same hosts
        attempt=1,
        trainer=_ENTRY,
        pack=pack,
        outputs=Outputs(final=(*other_results, result), needed=(result,)),
    )
    with WaitReports(say) as reports:
        reports.doing("asking the hosts")
        run_attempt(spec, closing(Hosts(cluster)), _shown_by(reports))
    try:
        value: dict[str, Any] = json.loads((folder / result).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"every rank ended well, but {folder / result} is not readable: {error}") from error
    return value


def _shown_by(say: WaitReports) -> Emit:
    """Return the receiver of an attempt's events: rank 0's lines, remarks, and what is waited for."""

    def show(event: AttemptEvent) -> None:
        match event:
            case ShownLine(line=line):
                say(_shown(line))
            case HostNote(text=text) | Notice(text=text):
                say(text)
            case Doing(what=what) if what is not None:
                say.doing(what)
            case LaunchPlan() | Doing():
                say.doing("measuring on the hosts, whose ranks import torch first")
            case AllSucceeded():
                say.doing("fetching the results")

    return show


def _shown(line: LogLine) -> str:
    """Return a line of rank 0 as it is, and one of another rank with its host and rank."""
    return line.text if line.rank == 0 else f"{line.host}:{line.rank} | {line.text}"
