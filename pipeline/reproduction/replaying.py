"""Train a few steps of a run again, from its last checkpoint before them, and record every operator of each rank.

The ranks run on this computer, with the run's own code, in a folder of their own: the run's folder isn't changed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pipeline.core.errors import PacelineError
from pipeline.core.processes import process
from pipeline.runs.checkpoints import step_of
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder, variables

_LIMIT_S = 3600.0


def replay(folder: RunFolder, work: Path, *, first: int, last: int, ranks: int) -> Path:
    """Train the steps up to ``last`` again in ``work``, and return it with the operators from step ``first`` on.

    Raises:
        PacelineError: the replay failed; the text has the end of what the ranks printed.
    """
    prepare(folder.path, work, first=first)
    code = folder.code if folder.code.is_dir() else Path.cwd()
    environment = {
        **os.environ,
        **_environment(folder),
        "PYTHONPATH": os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]),
        variables.OPERATORS: f"{first}-{last}",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
        folder.program.entry, "--config", str(work / run_folder.CONFIG),
    ]  # fmt: skip
    done = process.run(command, env=environment, cwd=code, timeout_s=_LIMIT_S)
    if done.code != 0:
        raise PacelineError(
            f"the replay of {folder.key} ended with exit code {done.code}: {done.stderr.strip()[-600:]}",
            hint="--no-replay compares the digests alone",
        )
    return work


def _environment(folder: RunFolder) -> dict[str, str]:
    """Return the variables of the run that decide arithmetic: its number of threads, and those that it was given."""
    plan = folder.read_json(run_folder.PLAN) or {}
    nodes = plan.get("nodes") or [{}]
    given = {str(name): str(value) for name, value in (nodes[0].get("env") or {}).items()}
    return {name: value for name, value in given.items() if not name.startswith("PACELINE_")}


def prepare(run_dir: Path, work: Path, *, first: int) -> None:
    """Make ``work`` a folder in which the training goes on from the newest checkpoint before step ``first``."""
    shutil.rmtree(work, ignore_errors=True)
    (work / run_folder.CHECKPOINTS).mkdir(parents=True)
    shutil.copy(run_dir / run_folder.CONFIG, work)
    for name in (run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS_NOTES):
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, work)
    (work / run_folder.DATA).symlink_to((run_dir / run_folder.DATA).resolve())
    older = [path for path in (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt") if step_of(path) < first]
    if path := max(older, key=step_of, default=None):
        for source in (path, path.with_suffix(".json")):
            shutil.copy(source, work / run_folder.CHECKPOINTS)
        shards = path.with_name(path.stem.replace("step-", "shards-"))
        if shards.is_dir():
            shutil.copytree(shards, work / run_folder.CHECKPOINTS / shards.name)
