"""cluster.checkpoint_mirror during a run: copy checkpoints there, and restore them for a run without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.runs.checkpoint_mirror import CheckpointMirror, ScriptMirror
from pipeline.runs.folder import RunFolder


class Mirroring:
    """The mirror of one run, and where its messages go."""

    def __init__(self, mirror: CheckpointMirror | ScriptMirror, run_dir: Path, say: Callable[[str], None]) -> None:
        self._mirror, self._run_dir, self._say = mirror, run_dir, say
        self._failed = False

    @property
    def shown(self) -> str:
        """The setting and the address, without a login."""
        return self._mirror.shown

    def try_writing(self) -> None:
        """Test the mirror at the start, so nobody relies on it in vain; failures are reported as by ``push``."""
        try:
            self._mirror.try_writing()
        except DataError as error:
            self._tell(error)

    def push(self) -> None:
        """Copy the newest checkpoint. A failing mirror doesn't end the training, and is reported once."""
        try:
            self._mirror.push(self._run_dir)
            self._failed = False
        except FileNotFoundError:  # a newer one came
            return
        except (DataError, OSError) as error:
            self._tell(error)

    def _tell(self, error: DataError | OSError) -> None:
        if not self._failed:
            what, hint = (error.what, error.hint) if isinstance(error, DataError) else (error, None)
            self._say(f"WARNING: {what}; the training goes on without the mirror, which is tried again")
            if hint is not None:
                self._say(f"  try: {hint}")
        self._failed = True

    def restore(self) -> None:
        """Restore a checkpoint if the run folder has none. Raises DataError: unknown whether the mirror has one."""
        if not self._mirror.is_lost(self._run_dir):
            return
        try:
            restored, warnings = self._mirror.restore(self._run_dir)
        except DataError as error:
            hint = "the same command when it can be reached, or cluster.checkpoint_mirror=null, which begins anew"
            raise DataError(error.what, hint=f"{error.hint}; {hint}" if error.hint else hint) from error
        for warning in warnings:
            self._say(f"WARNING: {warning}")
        if restored:
            taken = self._mirror.taken.format(restored)
            self._say(f"the run folder has no checkpoint; took {taken} from {self._mirror.shown}")


def of(address: str | None, folder: RunFolder, say: Callable[[str], None], *, of_script: bool) -> Mirroring | None:
    """Return the mirror; None without an address. Raises DataError: it can't be used here."""
    if address is None:
        return None
    mirror = ScriptMirror(address, folder.key) if of_script else CheckpointMirror(address, folder.key)
    return Mirroring(mirror, folder.path, say)
