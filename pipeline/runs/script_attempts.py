"""What the attempts of a script left in its run folder, and from where the next attempt begins.

A script resumes by an argument with ``{resume}``, which Paceline replaces by the newest checkpoint, or looks for its
checkpoints by itself. Before a launch, and in plans and messages, this module says which of it will happen."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.core.specs import LaunchPlan, State
from pipeline.runs import journal
from trainers.contract import run_folder
from trainers.script import workdir
from trainers.script.files import in_words
from trainers.script.metrics.printed import keep_lines
from trainers.script.settings import ScriptConfig
from trainers.script.workdir import checkpoints_to_resume

# an option in a script's source, as in add_argument("--resume-from")
_RESUME_OPTION = re.compile(r"""["']--(\w*(?:resume|checkpoint|ckpt|restart)[\w-]*)["']""")


class ScriptAttempts:
    """The attempts of a script so far. All methods may raise OSError."""

    def __init__(self, run_dir: Path, settings: ScriptConfig) -> None:
        self._run_dir, self._settings = run_dir, settings

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that the script could resume from, even if no argument names one."""
        settings = self._settings
        if not settings.resumes:  # look as if it had such an argument
            # {checkpoints} is the only other argument that matters: a script that is given that folder saves nowhere
            # else, so the search leaves out its working directory
            folder = ["{checkpoints}"] if settings.names_checkpoints else []
            settings = replace(settings, args=["{resume}", *folder])
        return next(iter(checkpoints_to_resume(settings, self._run_dir).values()), None)

    def checkpoints_stamp(self) -> str:
        """Return names and times of the checkpoints that the script resumes from, as text to compare; '' if none."""
        return workdir.checkpoints_stamp(self._settings, self._run_dir)

    def resume_offer(self) -> str:
        """Return advice which argument would make the script resume from its newest checkpoint. It names an option that
        the script's source seems to have. '' if the script resumes already, or there is no checkpoint."""
        if checkpoints_to_resume(self._settings, self._run_dir):
            return ""
        newest = self.newest_checkpoint()
        if newest is None:
            return ""
        source = self._run_dir / run_folder.CODE / (self._settings.script or "")
        source_text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        options = _RESUME_OPTION.findall(source_text)
        work = workdir.copy_of(self._run_dir, node_rank=0)
        is_in_work = newest.is_relative_to(work)
        shown = newest.relative_to(work if is_in_work else self._run_dir)
        if options:  # --resume before --no-checkpoint, and the shorter name before the longer one
            best = min(options, key=lambda name: (not name.startswith("resume"), len(name)))
            return f"the argument --{best} '{{resume}}' would give it {shown}"
        if is_in_work:
            return f"an option of it that takes a checkpoint, as in --resume '{{resume}}', would get {shown}"
        return ""  # it may read {checkpoints} by itself

    def next_start(self, unfetched: LaunchPlan | None) -> str:
        """Return where the next attempt starts, as words that follow "it starts"; '' if there is no checkpoint.
        ``unfetched``: the plan of the newest attempt, if its host may have files that aren't here yet."""
        settings, run_dir = self._settings, self._run_dir
        saved = any(path.is_file() for path in (run_dir / run_folder.CHECKPOINTS).rglob("*"))
        elsewhere = ""
        if unfetched is not None and not saved:
            elsewhere = f"attempt {unfetched.attempt} has left on {unfetched.nodes[0].host}"
        resumable = checkpoints_to_resume(settings, run_dir)
        by_itself = resumable.get(workdir.BY_ITSELF)
        if by_itself is not None:
            return f"from {by_itself.name}, which the script looks for by itself"
        if not settings.resumes:
            parts = ["from the beginning: no argument of the script has {resume}"]
            if saved or elsewhere:
                kept = "its checkpoints stay in place" if saved else f"checkpoints that {elsewhere} are fetched"
                parts.append(f"{kept}, and it goes on from them if it reads them by itself")
            return "; ".join([*parts, *filter(None, [self.resume_offer()])])
        if elsewhere:
            return f"from the newest checkpoint that {elsewhere}, if there is one"
        if resumable:
            return "from its newest checkpoint"
        if saved:
            pattern = f" (program.resume_pattern={settings.resume_pattern})" if settings.resume_pattern else ""
            return (
                f"from the beginning: {{resume}} finds none in {run_dir / 'checkpoints'}{pattern}; they are set aside"
            )
        # a command that died before its launch may have set the checkpoints aside already
        number = journal.attempts(run_dir / run_folder.JOURNAL) + 1
        for set_aside in sorted(run_dir.glob(f"attempts/{number}/before*"), reverse=True):
            if (set_aside / run_folder.CHECKPOINTS).exists():
                return f"from the beginning: its checkpoints were set aside, to {set_aside / 'checkpoints'}"
        return ""

    def set_aside(self, attempt: int) -> str | None:
        """Move away what hosts sent of earlier attempts, if the script starts over. Return a sentence about where it is
        now; None if there was nothing, or the script resumes from it.

        Call it only if hosts have run folders of their own. In a shared one, the start of the script on its host moves
        the files (``trainers.script.start``).
        """
        if checkpoints_to_resume(self._settings, self._run_dir):
            return None
        target = self._run_dir / run_folder.ATTEMPTS / str(attempt) / "before"
        names = workdir.set_aside(self._run_dir, node_rank=0, to=target, with_checkpoints=self._settings.resumes)
        return f"what earlier attempts left is kept in {target}: {in_words(names)}" if names else None

    def keep_printed_lines(self) -> None:
        """Store the lines with metrics that earlier attempts printed, if printed metrics are read when a script ends.

        A script that resumes doesn't print them again, and the host of the next attempt has only the log of that one.
        """
        # program.metrics=off: printed metrics are never read. With program.metrics_pattern they are written to
        # metrics.jsonl while the script runs, so they are kept there.
        if self._settings.metrics == "off" or self._settings.metrics_pattern is not None:
            return
        entries = journal.read(self._run_dir / run_folder.JOURNAL)
        start_times = {entry.attempt: entry.time for entry in entries if entry.state is State.RUNNING}
        with suppress(OSError):  # another write reports a full disk
            keep_lines(self._run_dir, start_times)
