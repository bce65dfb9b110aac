"""Say for users where the next attempt of a run would begin."""

from __future__ import annotations

from pathlib import Path

from pipeline.cluster import earlier
from pipeline.core.specs import LaunchPlan
from pipeline.execution.run import Run
from pipeline.runs import checkpoints, journal
from pipeline.runs.checkpoints import resume_offer
from trainers.contract import run_folder
from trainers.script import workdir
from trainers.script.settings import ScriptConfig

NO_CHECKPOINT = "from the beginning: there is no checkpoint yet"


def next_start(run: Run) -> str:
    """Return the end of "it starts …": ``from the checkpoint of step 40``, or from the beginning and the reason."""
    script = ScriptConfig(**run.config.resolved["program"]) if run.config.script is not None else None
    return next_start_in(run.folder.path, script)


def next_start_in(run_dir: Path, script: ScriptConfig | None) -> str:
    """Return the same text for a run folder. ``script``: None for Paceline's own trainer."""
    left = earlier.unfinished_plan(run_dir)
    if script is not None:
        return _of_script(run_dir, script, left)
    if step := checkpoints.newest_step(run_dir):
        return f"from the checkpoint of step {step}"
    if left is not None and not _wrote_here(left, run_dir):
        host = left.nodes[0].host
        return f"from the newest checkpoint that attempt {left.attempt} has left on {host}, if there is one"
    return NO_CHECKPOINT


def _wrote_here(left: LaunchPlan, run_dir: Path) -> bool:
    """True if rank 0's node wrote into the run folder itself and not into a folder of its host."""
    return Path(left.nodes[0].run_dir) == run_dir.resolve()


def _of_script(run_dir: Path, settings: ScriptConfig, left: LaunchPlan | None) -> str:
    """``left``: the newest attempt, if its hosts may hold files that weren't fetched yet."""
    saved = any(path.is_file() for path in (run_dir / run_folder.CHECKPOINTS).rglob("*"))
    elsewhere = ""
    if left is not None and not saved and not _wrote_here(left, run_dir):
        elsewhere = f"attempt {left.attempt} has left on {left.nodes[0].host}"
    if (own := workdir.checkpoints_to_resume(settings, run_dir).get(workdir.BY_ITSELF)) is not None:
        return f"from {own.name}, which the script looks for by itself"
    if not settings.resumes:
        parts = ["from the beginning: no argument of the script has {resume}"]
        if saved or elsewhere:
            kept = "its checkpoints stay in place" if saved else f"checkpoints that {elsewhere} are fetched"
            parts.append(f"{kept}, and it goes on from them if it reads them by itself")
        return "; ".join([*parts, *filter(None, [resume_offer(run_dir, settings)])])
    if elsewhere:
        return f"from the newest checkpoint that {elsewhere}, if there is one"
    if checkpoints.script_goes_on(run_dir):
        return "from its newest checkpoint"
    if saved:
        pattern = f" (program.resume_pattern={settings.resume_pattern})" if settings.resume_pattern else ""
        return f"from the beginning: {{resume}} finds none in {run_dir / 'checkpoints'}{pattern}; they are set aside"
    number = journal.attempts(run_dir / run_folder.JOURNAL) + 1
    for place in sorted(run_dir.glob(f"attempts/{number}/before*"), reverse=True):
        if (place / run_folder.CHECKPOINTS).exists():
            return f"from the beginning: its checkpoints were set aside, to {place / 'checkpoints'}"
    return NO_CHECKPOINT
