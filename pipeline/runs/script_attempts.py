"""What attempts of a script left in its run folder, and where the next one begins."""

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

_RESUME_OPTION = re.compile(r"""["']--(\w*(?:resume|checkpoint|ckpt|restart)[\w-]*)["']""")


class ScriptAttempts:
    """The attempts of a script so far. All methods raise OSError."""

    def __init__(self, run_dir: Path, settings: ScriptConfig) -> None:
        self._run_dir, self._settings = run_dir, settings

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that the script could resume from, even if no argument names one."""
        settings = self._settings
        if not settings.resumes:
            folder = ["{checkpoints}"] if settings.names_checkpoints else []
            settings = replace(settings, args=["{resume}", *folder])
        return next(iter(checkpoints_to_resume(settings, self._run_dir).values()), None)

    def checkpoints_stamp(self) -> str:
        """Return the checkpoints that the script resumes from, and their times, as text to compare; '' without any."""
        return workdir.checkpoints_stamp(self._settings, self._run_dir)

    def resume_offer(self) -> str:
        """Return the argument that would give the script the checkpoint that it saved, by an option in its source.

        '' if an argument names it already, or there is no checkpoint.
        """
        if checkpoints_to_resume(self._settings, self._run_dir) or (newest := self.newest_checkpoint()) is None:
            return ""
        source = self._run_dir / run_folder.CODE / (self._settings.script or "")
        source_text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        options = _RESUME_OPTION.findall(source_text)
        work = workdir.copy_of(self._run_dir, 0)
        is_in_work = newest.is_relative_to(work)
        shown = newest.relative_to(work if is_in_work else self._run_dir)
        if options:
            best = min(options, key=lambda name: (not name.startswith("resume"), len(name)))
            return f"the argument --{best} '{{resume}}' would give it {shown}"
        if is_in_work:
            return f"an option of it that takes a checkpoint, as in --resume '{{resume}}', would get {shown}"
        return ""  # it may read {checkpoints} by itself

    def next_start(self, unfetched: LaunchPlan | None) -> str:
        """Return the end of "it starts …"; '': there is no checkpoint.

        ``unfetched``: the newest attempt, if its host may have files that aren't here.
        """
        settings, run_dir = self._settings, self._run_dir
        saved = any(path.is_file() for path in (run_dir / run_folder.CHECKPOINTS).rglob("*"))
        elsewhere = ""
        if unfetched is not None and not saved:
            elsewhere = f"attempt {unfetched.attempt} has left on {unfetched.nodes[0].host}"
        resumable = checkpoints_to_resume(settings, run_dir)
        if (own := resumable.get(workdir.BY_ITSELF)) is not None:
            return f"from {own.name}, which the script looks for by itself"
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
        number = journal.attempts(run_dir / run_folder.JOURNAL) + 1
        for place in sorted(run_dir.glob(f"attempts/{number}/before*"), reverse=True):
            if (place / run_folder.CHECKPOINTS).exists():
                return f"from the beginning: its checkpoints were set aside, to {place / 'checkpoints'}"
        return ""

    def set_aside(self, attempt: int) -> str | None:
        """Move away what hosts sent of earlier attempts, for a script that starts over on hosts with their own folders.

        Return where it is, in words; None: there was nothing, or the script resumes from it.
        """
        if checkpoints_to_resume(self._settings, self._run_dir):
            return None
        place = self._run_dir / run_folder.ATTEMPTS / str(attempt) / "before"
        names = workdir.set_aside(self._run_dir, 0, place, with_checkpoints=self._settings.resumes)
        return f"what earlier attempts left is kept in {place}: {in_words(names)}" if names else None

    def keep_printed_lines(self) -> None:
        """Store the lines with metrics that earlier attempts printed, if they count, for the next one."""
        if self._settings.metrics == "off" or self._settings.metrics_pattern is not None:
            return
        entries = journal.read(self._run_dir / run_folder.JOURNAL)
        begun = {entry.attempt: entry.time for entry in entries if entry.state is State.RUNNING}
        with suppress(OSError):  # another write reports a full disk
            keep_lines(self._run_dir, begun)
