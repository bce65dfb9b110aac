"""cluster.checkpoint_mirror during a run: copy checkpoints there, and restore the newest one into an empty run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.runs.checkpoint_mirror import CheckpointMirror, ScriptMirror
from pipeline.runs.folder import RunFolder


class Mirroring:
    """Copies the checkpoints of one run to its mirror, and reports failures through ``say``."""

    def __init__(self, mirror: CheckpointMirror | ScriptMirror, run_dir: Path, say: Callable[[str], None]) -> None:
        self._mirror, self._run_dir, self._say = mirror, run_dir, say
        self._failed = False

    @property
    def shown(self) -> str:
        """The setting and the address, without a login."""
        return self._mirror.shown

    def try_writing(self) -> None:
        """Test at the start whether the mirror can be written; report a failure as ``push`` does."""
        try:
            self._mirror.try_writing()
        except DataError as error:
            self._warn(error)

    def push(self) -> None:
        """Copy the newest checkpoint. A failure doesn't end the training; a row of failures is reported once."""
        try:
            self._mirror.push(self._run_dir)
            self._failed = False
        except FileNotFoundError:  # replaced by a newer checkpoint meanwhile
            return
        except (DataError, OSError) as error:
            self._warn(error)

    def _warn(self, error: DataError | OSError) -> None:
        if not self._failed:
            what, hint = (error.what, error.hint) if isinstance(error, DataError) else (error, None)
            self._say(f"WARNING: {what}; the training goes on without the mirror, which is tried again")
            if hint is not None:
                self._say(f"  try: {hint}")
        self._failed = True

    def restore(self) -> None:
        """Restore a checkpoint if the run folder has none. Raises DataError: the mirror can't be read."""
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


def open_mirror(
    address: str | None, folder: RunFolder, say: Callable[[str], None], *, of_script: bool
) -> Mirroring | None:
    """Return the mirror; None without an address. Raises DataError: the address can't be used on this computer."""
    if address is None:
        return None
    mirror = ScriptMirror(address, folder.key) if of_script else CheckpointMirror(address, folder.key)
    return Mirroring(mirror, folder.path, say)
